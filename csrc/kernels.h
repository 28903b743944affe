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
int64_t forward_scratch(const linattn_attention& call);
void forward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);
int64_t backward_scratch(const linattn_attention& call, int64_t longest);
void backward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
