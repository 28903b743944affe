// What the files compiled per instruction set offer to the table.
#ifndef LINATTN_KERNELS_H
#define LINATTN_KERNELS_H

#include <stdint.h>

namespace linattn {
namespace LINATTN_ISA {

void feature_map(int map, float root_scale, const float* x, float* y, float* slope, int64_t n);
void model_run(void* work, int index, int count);

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
