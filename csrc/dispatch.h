// One table of functions per instruction set, and the choice between them at run time.
#ifndef LINATTN_DISPATCH_H
#define LINATTN_DISPATCH_H

#include <stdint.h>

#include "attention.h"
#include "linattn.h"

namespace linattn {

// Forward or backward: one head of one sequence (attention.h), in `scratch` bytes of memory; or a part of it at a time.
struct Operation {
    int64_t (*scratch)(const linattn_attention& call, int64_t longest);
    void (*run)(const linattn_attention& call, const Sequence& sequence, int head, float* scratch);
    int phases;
    int64_t (*shared)(const linattn_attention& call, const Sequence& sequence, int64_t parts);  // bytes for each head
    void (*run_part)(const linattn_attention& call, const Sequence& sequence, int head, const Part& part,
                     float* scratch);
};

// What is compiled once per instruction set (*.isa.cpp); table.isa.cpp fills one table for each.
struct Kernels {
    const char* name;
    int lanes;
    void (*feature_map)(int map, float root_scale, const float* x, float* y, float* slope, int64_t n);
    void (*model_run)(void* work, int index, int count);
    void (*attend_run)(void* work, int index, int count);
    Operation forward, backward;
};

// The chosen table. The first call chooses the best.
const Kernels* kernels();

}  // namespace linattn
#endif
