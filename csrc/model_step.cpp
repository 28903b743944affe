#include "model_step.h"

#include <string.h>

#include "dispatch.h"
#include "model_sample.h"
#include "model_work.h"
#include "pool.h"

namespace linattn {
namespace {

constexpr int64_t LINE = 64;  // bytes: no two buffers share a cache line

int64_t padded(int64_t outputs) { return (outputs + LINATTN_PANEL - 1) / LINATTN_PANEL * LINATTN_PANEL; }

int64_t most(int64_t x, int64_t y) { return x > y ? x : y; }

// Hands out pieces of one block of memory; without a block it only counts.
struct Pieces {
    char* memory;
    size_t used;
    template <class T>
    T* take(int64_t n) {
        T* piece = memory ? reinterpret_cast<T*>(memory + used) : nullptr;
        used += (static_cast<size_t>(n) * sizeof(T) + LINE - 1) / LINE * LINE;
        return piece;
    }
};

void measure(ModelWork* w) {
    const linattn_model& model = *w->model;
    w->width = padded(model.width);
    w->params_width = padded(model.head.outputs);
    w->sampling_size = sample_scratch(model);
    for (int64_t i = 0; i < model.num_blocks; i++) {
        const linattn_block& b = model.blocks[i];
        w->qkv_width = most(w->qkv_width, padded(b.qkv.outputs));
        w->heads_width = most(w->heads_width, padded(b.heads * b.value_width));
        w->hidden_width = most(w->hidden_width, padded(b.enter.outputs));
        w->attending_size = most(w->attending_size, padded(2 * (b.heads / b.kv_heads + 1) * b.key_width));
        if (b.rotary != LINATTN_NO_ROTARY) w->rotary_width = most(w->rotary_width, padded(b.key_width));
    }
}

void lay_out(ModelWork* w, Pieces* pieces, int threads) {
    const int64_t rows = w->run->rows, copies = w->copies ? threads : 1;
    w->active = pieces->take<int64_t>(rows);
    w->drawn = pieces->take<int64_t>(rows);
    w->x = pieces->take<float>(rows * copies * w->width);
    w->h = pieces->take<float>(rows * copies * w->width);
    w->y = pieces->take<float>(rows * w->width);
    w->qkv = pieces->take<float>(rows * w->qkv_width);
    w->heads = pieces->take<float>(rows * w->heads_width);
    w->hidden = pieces->take<float>(rows * w->hidden_width);
    w->read = pieces->take<float>(rows * w->width);
    w->params = pieces->take<float>(rows * w->params_width);
    w->cosines = pieces->take<float>(rows * copies * w->rotary_width);
    w->sampling = pieces->take<double>(threads * w->sampling_size);
    w->attending = pieces->take<float>(threads * w->attending_size);
}

}  // namespace
}  // namespace linattn

extern "C" {

int32_t linattn_model_run(const linattn_model* model, linattn_run* run, int32_t threads) {
    using namespace linattn;
    threads = threads < 1 ? 1 : threads;
    ModelWork w;
    memset(&w, 0, sizeof w);
    w.model = model;
    w.run = run;
    w.copies = run->rows <= MOST_COPIED_ROWS;
    run->done = run->not_finite = 0;
    measure(&w);
    Pieces pieces = {nullptr, 0};
    lay_out(&w, &pieces, threads);
    pieces.memory = static_cast<char*>(scratch_take(pieces.used));
    if (!pieces.memory) return -1;
    memset(pieces.memory, 0, pieces.used);
    pieces.used = 0;
    lay_out(&w, &pieces, threads);
    for (int64_t b = 0; b < run->rows; b++)
        if (run->left[b] > 0) w.active[w.num_active++] = b;
    pool_run(threads, kernels()->model_run, &w);
    run->not_finite = w.not_finite;
    scratch_give_back(pieces.memory);
    return 0;
}

int32_t linattn_attend(const linattn_block* block, int64_t rows, const float* q, const float* k, const float* v,
                       float* out, int32_t threads) {
    using namespace linattn;
    threads = threads < 1 ? 1 : threads;
    const int64_t size = padded(2 * (block->heads / block->kv_heads + 1) * block->key_width);
    float* memory = static_cast<float*>(scratch_take(static_cast<size_t>(threads * size) * sizeof(float)));
    if (!memory) return -1;
    AttendWork w = {block, rows, q, k, v, out, memory, size};
    pool_run(threads, kernels()->attend_run, &w);
    scratch_give_back(memory);
    return 0;
}

int64_t linattn_model_sizes(int32_t which) {
    switch (which) {
        case 0: return sizeof(linattn_product);
        case 1: return sizeof(linattn_norm);
        case 2: return sizeof(linattn_block);
        case 3: return sizeof(linattn_model);
        default: return sizeof(linattn_run);
    }
}

}  // extern "C"
