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

// Where rows × key/value heads leave threads idle, a long sequence is cut into parts that are worked on at once. Causal,
// its keys are then summed twice, a third more work; so this is for heads that keep no more than two thirds of the
// threads busy. Parts depend on the sizes and on the number of threads asked for, never on who does what when.
constexpr int64_t LONG = 2048, SHORTEST_PART = 512;  // tokens

int64_t divisor_of(int64_t x, int64_t y) { return y == 0 ? x : divisor_of(y, x % y); }

int64_t longer(int64_t x, int64_t y) { return x > y ? x : y; }

// The most parts that a head of this call is cut into: with that many, all threads get equally much to do.
int64_t most_parts(const linattn_attention& c) {
    const int64_t heads = c.R * c.K;
    if (3 * heads > 2 * c.threads || longer(c.T, c.U) < LONG) return 1;
    return c.threads / divisor_of(c.threads, heads);
}

int64_t parts_of(const Sequence& s, int64_t most) {
    const int64_t tokens = longer(s.keys, s.queries);
    return tokens < LONG ? 1 : within(tokens / SHORTEST_PART, 1, most);
}

struct Work {
    const linattn_attention& call;
    const Operation& operation;
    int64_t parts;    // of a head, at most
    int64_t scratch;  // bytes for each thread
    int64_t shared;   // bytes for each head that is cut
    int threads;
    int phase;
    int64_t next;  // task that nobody works on yet
    char* memory;
};

void work_on(const Work& w, int64_t head, int64_t number, float* scratch) {
    const linattn_attention& c = w.call;
    const Sequence s = sequence_of(c, head / c.K);
    const int kv_head = static_cast<int>(head % c.K);
    const int64_t parts = parts_of(s, w.parts);
    if (parts == 1) {
        if (w.phase == 0 && number == 0) w.operation.run(c, s, kv_head, scratch);
    } else if (number < parts) {
        char* shared = w.memory + w.threads * w.scratch + head * w.shared;
        w.operation.run_part(c, s, kv_head, {number, parts, w.phase, reinterpret_cast<float*>(shared)}, scratch);
    }
}

void work(void* context, int index, int) {
    Work& w = *static_cast<Work*>(context);
    float* scratch = reinterpret_cast<float*>(w.memory + index * w.scratch);
    for (;;) {
        const int64_t task = __atomic_fetch_add(&w.next, 1, __ATOMIC_RELAXED);
        if (task >= w.call.R * w.call.K * w.parts) return;
        work_on(w, task / w.parts, task % w.parts, scratch);
    }
}

int64_t whole_lines(int64_t bytes) { return (bytes + 127) / 128 * 128; }

// Bytes that a head of the longest sequence needs to share.
int64_t shared_by_parts(const linattn_attention& c, const Operation& operation, int64_t most) {
    int64_t bytes = 0;
    for (int64_t state = 0; most > 1 && state < c.R; state++) {
        const Sequence s = sequence_of(c, state);
        const int64_t parts = parts_of(s, most);
        if (parts > 1) bytes = longer(bytes, operation.shared(c, s, parts));
    }
    return whole_lines(bytes);
}

int32_t run(const linattn_attention& c, const Operation& operation) {
    const int64_t heads = c.R * c.K;
    if (heads == 0) return 0;
    Work w = {c, operation, most_parts(c), 0, 0, 1, 0, 0, nullptr};
    w.threads = static_cast<int>(within(c.threads, 1, heads * w.parts));
    w.scratch = whole_lines(operation.scratch(c, w.parts > 1 && c.U > LONG ? LONG : c.U));
    w.shared = shared_by_parts(c, operation, w.parts);
    w.memory = static_cast<char*>(scratch_take(w.scratch * w.threads + w.shared * heads));
    if (!w.memory) return -1;
    for (; w.phase < (w.parts > 1 ? operation.phases : 1); w.phase++) {
        w.next = 0;
        pool_run(w.threads, work, &w);
    }
    scratch_give_back(w.memory);
    return 0;
}

}  // namespace
}  // namespace linattn

extern "C" {

int32_t linattn_attention_forward(const linattn_attention* call) {
    linattn::large_pages(call->out, linattn::bytes_of_values(*call, call->T * call->H));
    return linattn::run(*call, linattn::kernels()->forward);
}

int32_t linattn_attention_backward(const linattn_attention* call) {
    linattn::large_pages(call->dq, linattn::bytes_of_features(*call, call->T * call->H));
    linattn::large_pages(call->dk, linattn::bytes_of_features(*call, call->U * call->K));
    linattn::large_pages(call->dv, linattn::bytes_of_values(*call, call->U * call->K));
    return linattn::run(*call, linattn::kernels()->backward);
}

}  // extern "C"
