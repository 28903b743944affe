// One table of functions per instruction set, and the choice between them at run time.
#ifndef LINATTN_DISPATCH_H
#define LINATTN_DISPATCH_H

#include <stdint.h>

#include "attention.h"
#include "linattn.h"

namespace linattn {

// What is compiled once per instruction set (*.isa.cpp); table.isa.cpp fills one table for each.
struct Kernels {
    const char* name;
    int lanes;
    void (*feature_map)(int map, float root_scale, const float* x, float* y, float* slope, int64_t n);
    void (*model_run)(void* work, int index, int count);
    void (*attend_run)(void* work, int index, int count);
    // One head of one sequence (attention.h), in `scratch_size` bytes of memory.
    int64_t (*forward_scratch)(const linattn_attention& call);
    void (*forward)(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);
    int64_t (*backward_scratch)(const linattn_attention& call, int64_t longest);
    void (*backward)(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);
};

// The chosen table. The first call chooses the best.
const Kernels* kernels();

}  // namespace linattn
#endif
