// The operator's calls: which sequences there are, and who works on which head of them.
#include "attention.h"

#include "dispatch.h"
#include "linattn.h"
#include "platform.h"
#include "pool.h"

namespace linattn {
namespace {

int64_t within(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// Cuts and lengths are clamped: whatever they say, nothing outside of the tensors is read or written.
Sequence sequence_of(const linattn_attention& c, int64_t state) {
    Sequence s = {state, state, 0, c.T, 0, c.U};
    if (c.cu_seqlens) {
        const int64_t* q_cuts = c.cu_seqlens_q ? c.cu_seqlens_q : c.cu_seqlens;
        s.row = 0;
        s.k_begin = within(c.cu_seqlens[state], 0, c.U);
        s.keys = within(c.cu_seqlens[state + 1], s.k_begin, c.U) - s.k_begin;
        s.q_begin = within(q_cuts[state], 0, c.T);
        s.queries = within(q_cuts[state + 1], s.q_begin, c.T) - s.q_begin;
        if (c.causal) s.queries = s.keys = s.keys < s.queries ? s.keys : s.queries;
        return s;
    }
    if (c.lengths) s.keys = within(c.lengths[state], 0, c.U);
    if (c.causal) s.queries = s.keys = s.keys < c.T ? s.keys : c.T;
    else if (c.q_lengths) s.queries = within(c.q_lengths[state], 0, c.T);
    return s;
}

// Of `heads` heads of tokens in each row of the batch.
int64_t bytes_of_values(const linattn_attention& c, int64_t heads) { return c.B * heads * c.M * (c.narrow_values ? 2 : 4); }
int64_t bytes_of_features(const linattn_attention& c, int64_t heads) {
    return c.B * heads * c.D * (c.narrow_features ? 2 : 4);
}

struct Shared {
    const linattn_attention& call;
    void (*run)(const linattn_attention&, const Sequence&, int, float*);
    char* scratch;
    int64_t bytes;  // of scratch for each thread
    int64_t next;   // head that nobody works on yet
};

void work(void* context, int index, int) {
    Shared& shared = *static_cast<Shared*>(context);
    const linattn_attention& c = shared.call;
    float* scratch = reinterpret_cast<float*>(shared.scratch + index * shared.bytes);
    for (;;) {
        const int64_t item = __atomic_fetch_add(&shared.next, 1, __ATOMIC_RELAXED);
        if (item >= c.R * c.K) return;
        shared.run(c, sequence_of(c, item / c.K), static_cast<int>(item % c.K), scratch);
    }
}

int32_t run(const linattn_attention& c, void (*function)(const linattn_attention&, const Sequence&, int, float*),
            int64_t bytes) {
    const int64_t items = c.R * c.K;
    if (items == 0) return 0;
    const int threads = static_cast<int>(within(c.threads, 1, items));
    bytes = (bytes + 127) / 128 * 128;
    Shared shared = {c, function, static_cast<char*>(scratch_take(bytes * threads)), bytes, 0};
    if (!shared.scratch) return -1;
    pool_run(threads, work, &shared);
    scratch_give_back(shared.scratch);
    return 0;
}

}  // namespace
}  // namespace linattn

extern "C" {

int32_t linattn_attention_forward(const linattn_attention* call) {
    linattn::large_pages(call->out, linattn::bytes_of_values(*call, call->T * call->H));
    const linattn::Kernels& table = *linattn::kernels();
    return linattn::run(*call, table.forward, table.forward_scratch(*call));
}

int32_t linattn_attention_backward(const linattn_attention* call) {
    linattn::large_pages(call->dq, linattn::bytes_of_features(*call, call->T * call->H));
    linattn::large_pages(call->dk, linattn::bytes_of_features(*call, call->U * call->K));
    linattn::large_pages(call->dv, linattn::bytes_of_values(*call, call->U * call->K));
    const linattn::Kernels& table = *linattn::kernels();
    return linattn::run(*call, table.backward, table.backward_scratch(*call, call->U));
}

}  // extern "C"
