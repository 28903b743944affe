// One table of functions per instruction set, and the choice between them at run time.
#ifndef LINATTN_DISPATCH_H
#define LINATTN_DISPATCH_H

#include <stdint.h>

namespace linattn {

// What is compiled once per instruction set (*.isa.cpp); table.isa.cpp fills one table for each.
struct Kernels {
    const char* name;
    int lanes;
    void (*feature_map)(int map, float root_scale, const float* x, float* y, float* slope, int64_t n);
    void (*model_run)(void* work, int index, int count);
};

// The chosen table. The first call chooses the best.
const Kernels* kernels();

}  // namespace linattn
#endif
