// What the files compiled per instruction set offer to the table.
#ifndef LINATTN_KERNELS_H
#define LINATTN_KERNELS_H

#include <stdint.h>

#include "attention.h"
#include "linattn.h"

namespace linattn {
namespace LINATTN_ISA {

void feature_map(int map, float root_scale, const float* x, float* y, float* slope, int64_t n);
void model_run(void* work, int index, int count);
void attend_run(void* work, int index, int count);

constexpr int FORWARD_PHASES = 3, BACKWARD_PHASES = 6;
int64_t forward_scratch(const linattn_attention& call, int64_t longest);
void forward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);
int64_t forward_shared(const linattn_attention& call, const Sequence& sequence, int64_t parts);
void forward_part(const linattn_attention& call, const Sequence& sequence, int head, const Part& part, float* scratch);
int64_t backward_scratch(const linattn_attention& call, int64_t longest);
void backward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);
int64_t backward_shared(const linattn_attention& call, const Sequence& sequence, int64_t parts);
void backward_part(const linattn_attention& call, const Sequence& sequence, int head, const Part& part, float* scratch);

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
