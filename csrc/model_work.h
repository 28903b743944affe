// One call of linattn_model_run: what its threads share.
#ifndef LINATTN_MODEL_WORK_H
#define LINATTN_MODEL_WORK_H

#include "model_step.h"

namespace linattn {

// Rows that have not ended are gathered: row i of every buffer belongs to row active[i] of the state.
struct ModelWork {
    const linattn_model* model;
    linattn_run* run;
    int64_t* active;   // (B,)
    int64_t* drawn;    // (B,) the next token of each active row
    int64_t num_active;
    int64_t not_finite;
    float *x, *h, *y, *qkv, *heads, *hidden, *params, *cosines;
    float* read;       // what a convolution has read of each row's token, where a block has one
    int64_t width, qkv_width, heads_width, hidden_width, params_width, rotary_width;  // of a row of these buffers
    double* sampling;  // sampling_size for each thread
    float* attending;  // attending_size for each thread
    int64_t sampling_size, attending_size;
    bool copies;       // each thread has an x and an h of its own: few rows are normalised sooner than waited for
};

// One call of linattn_attend.
struct AttendWork {
    const linattn_block* block;
    int64_t rows;
    const float *q, *k, *v;
    float* out;
    float* memory;  // memory_size for each thread
    int64_t memory_size;
};

// For rows up to that many; it saves two barriers a block.
constexpr int64_t MOST_COPIED_ROWS = 4;

}  // namespace linattn
#endif
