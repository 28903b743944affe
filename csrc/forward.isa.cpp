// Outputs of one head of one sequence, chunk by chunk (equation 5):
//
//     A = tril(φq φkᵀ)      out = (A v + φq S) / (A 1 + φq·z)      S += φkᵀ v      z += 1ᵀ φk
//
// Not causal: first all keys into the sums, then out = φq S / φq·z.
//
// φq (L, D)   φk (L, D) and transposed (D, L)   v (L, M)   S (D, M)   z (D)      a group of heads shares φk, v, S
#include "call.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

struct Memory {
    float *q, *k, *k_transposed, *v, *table, *out, *factors;
    float *S, *S_low, *added, *z, *z_low, *z_added;

    Memory(const Widths& w, float* scratch) {
        Arena arena = {scratch};
        q = arena.take(CHUNK * w.Dp);
        k = arena.take(CHUNK * w.Dp);
        k_transposed = arena.take(w.Dp * CHUNK);
        v = arena.take(CHUNK * w.Mp);
        table = arena.take(CHUNK * CHUNK);
        out = arena.take(CHUNK * w.Mp);
        factors = arena.take(CHUNK);
        S = arena.take(w.sums());
        S_low = arena.take(w.sums());
        added = arena.take(w.sums());
        z = arena.take(w.Dp);
        z_low = arena.take(w.Dp);
        z_added = arena.take(w.Dp);
        end = arena.next;
    }
    float* end;
};

struct Head {
    const linattn_attention& c;
    const Sequence& s;
    const Widths w;
    const Packing pack;
    Memory m;
    int64_t head, groups;
    bool empty;  // nothing has been summed

    Head(const linattn_attention& call, const Sequence& sequence, int kv_head, float* scratch)
        : c(call), s(sequence), w(call), pack(packing(call)), m(w, scratch), head(kv_head), groups(call.H / call.K),
          empty(true) {}

    void run() {
        load_state();
        if (c.causal) {
            for (int64_t t = 0; t < s.keys; t += CHUNK) causal_chunk(t, size(t, s.keys));
        } else {
            for (int64_t t = 0; t < s.keys; t += CHUNK) {
                pack_keys(t, size(t, s.keys));
                add_keys(size(t, s.keys));
            }
            for (int64_t t = 0; t < s.queries; t += CHUNK)
                for (int64_t g = 0; g < groups; g++) read_sums(t, size(t, s.queries), head * groups + g);
        }
        if (c.kv_out) store_state();
    }

    static int size(int64_t t, int64_t end) { return static_cast<int>(end - t < CHUNK ? end - t : CHUNK); }

    void causal_chunk(int64_t t, int n) {
        pack_keys(t, n);
        transpose_tile(m.k, w.Dp, n, w.D, m.k_transposed, CHUNK);
        for (int64_t g = 0; g < groups; g++) causal_outputs(t, n, head * groups + g);
        if (t + n < s.keys || c.kv_out) add_keys(n);
    }

    void pack_keys(int64_t t, int n) {
        Rows k = rows_of(c.k, c.narrow_features, c.k_strides, s.row, s.k_begin + t, head);
        Rows v = rows_of(c.v, c.narrow_values, c.v_strides, s.row, s.k_begin + t, head);
        k.ahead = v.ahead = CHUNK;
        pack.features(k, n, w.D, float(c.root_scale), m.k, w.Dp);
        pack.plain(v, n, w.M, m.v, w.Mp);
    }

    void pack_queries(int64_t t, int n, int64_t h) {
        Rows q = rows_of(c.q, c.narrow_features, c.q_strides, s.row, s.q_begin + t, h);
        q.ahead = CHUNK;
        pack.features(q, n, w.D, float(c.root_scale), m.q, w.Dp);
    }

    void causal_outputs(int64_t t, int n, int64_t h) {
        pack_queries(t, n, h);
        Product pairs = {n, n, m.table, CHUNK, {m.q, w.Dp, 1}, m.k_transposed, CHUNK, w.D, TABLE};
        product(pairs);
        const int columns = static_cast<int>(round_up(n, LANES));
        for (int i = 0; i < n; i++) m.factors[i] = keep_past(m.table + i * CHUNK, i, reach(i, columns));
        Product sums = {n, w.M, m.out, w.Mp, {m.table, CHUNK, 1}, m.v, w.Mp, n, PAST};
        if (!empty) {
            sums.a2 = {m.q, w.Dp, 1};
            sums.b2 = m.S;
            sums.b2_row = w.Mp;
            sums.depth2 = w.D;
        }
        product(sums);
        write(t, n, h);
    }

    // A block of at most 8 rows reads 8 columns beyond the diagonal at most.
    static int reach(int i, int columns) {
        const int needed = static_cast<int>(round_up(i + 8, LANES));
        return needed < columns ? needed : columns;
    }

    void read_sums(int64_t t, int n, int64_t h) {
        pack_queries(t, n, h);
        for (int i = 0; i < n; i++) m.factors[i] = 0;
        Product sums = {n, w.M, m.out, w.Mp, {m.q, w.Dp, 1}, m.S, w.Mp, w.D};
        product(sums);
        write(t, n, h);
    }

    // `factors` holds what the chunk itself adds to den.
    void write(int64_t t, int n, int64_t h) {
        bool follows;
        for (int i = 0; c.normalize && i < n; i++) {
            const float den = m.factors[i] + (empty ? 0.0f : dot(m.q + i * w.Dp, m.z, w.Dp));
            m.factors[i] = inverse_of(c, den, &follows);
        }
        Rows out = rows_in(c.out, c.narrow_values, c.T, c.H, c.M, s.row, s.q_begin + t, h);
        out.ahead = CHUNK;
        pack.unpack(out, n, w.M, m.out, w.Mp, c.normalize ? m.factors : nullptr);
    }

    void add_keys(int n) {
        Product sums = {w.D, w.M, m.added, w.Mp, {m.k, 1, w.Dp}, m.v, w.Mp, n};
        product(sums);
        add_exactly(m.S, m.S_low, m.added, w.sums());
        clear(m.z_added, w.Dp);
        add_rows(m.z_added, m.k, w.Dp, n, w.Dp);
        add_exactly(m.z, m.z_low, m.z_added, w.Dp);
        empty = false;
    }

    void load_state() {
        clear(m.S, w.sums());
        clear(m.S_low, w.sums());
        clear(m.z, w.Dp);
        clear(m.z_low, w.Dp);
        if (!c.kv) return;
        empty = false;
        const int64_t at = s.state * c.K + head;
        for (int d = 0; d < w.D; d++) {
            memcpy(m.S + d * w.Mp, c.kv + (at * w.D + d) * w.M, w.M * sizeof(float));
            memcpy(m.S_low + d * w.Mp, c.kv_low + (at * w.D + d) * w.M, w.M * sizeof(float));
        }
        if (!c.z) return;
        memcpy(m.z, c.z + at * w.D, w.D * sizeof(float));
        memcpy(m.z_low, c.z_low + at * w.D, w.D * sizeof(float));
    }

    void store_state() const {
        const int64_t at = s.state * c.K + head;
        for (int d = 0; d < w.D; d++) {
            memcpy(c.kv_out + (at * w.D + d) * w.M, m.S + d * w.Mp, w.M * sizeof(float));
            memcpy(c.kv_low_out + (at * w.D + d) * w.M, m.S_low + d * w.Mp, w.M * sizeof(float));
        }
        if (!c.z_out) return;
        memcpy(c.z_out + at * w.D, m.z, w.D * sizeof(float));
        memcpy(c.z_low_out + at * w.D, m.z_low, w.D * sizeof(float));
    }
};

}  // namespace

int64_t forward_scratch(const linattn_attention& call) {
    return (Memory(Widths(call), nullptr).end - static_cast<float*>(nullptr)) * sizeof(float);
}

void forward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch) {
    Head(call, sequence, head, scratch).run();
}

}  // namespace LINATTN_ISA
}  // namespace linattn
