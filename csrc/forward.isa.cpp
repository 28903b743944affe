// Outputs of one head of one sequence, chunk by chunk (equation 5):
//
//     A = tril(φq φkᵀ)      out = (A v + φq S) / (A 1 + φq·z)      S += φkᵀ v      z += 1ᵀ φk
//
// Not causal: first all keys into the sums, then out = φq S / φq·z.
//
// A sequence that is cut into parts: while the first part's outputs are made, the others are summed, each by itself; then
// the sums before each part are added up, and then come the outputs of the others.
//
// φq (L, D)   φk (L, D) and transposed (D, L)   v (L, M)   S (D, M)   z (D)      a group of heads shares φk, v, S
#include "call.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int CHUNK = 32;                      // tokens: measured, docs/decisions.md
constexpr int64_t LARGE = int64_t(16) << 20;  // bytes of an output that hardly stays in a last cache

struct Memory {
    float *q, *k, *k_transposed, *v, *table, *out, *factors;
    float *S, *S_low, *z, *z_low, *z_added;

    Memory(const Widths& w, float* scratch) {
        Arena arena = {scratch};
        q = arena.take(CHUNK * w.Dp);
        k = arena.take(CHUNK * w.Dp);
        k_transposed = arena.take(w.Dp * CHUNK);
        v = arena.take(CHUNK * w.Mp);
        table = arena.take(CHUNK * CHUNK);
        out = arena.take(CHUNK * w.Mp);
        factors = arena.take(round_up(CHUNK, LANES));
        S = arena.take(w.sums());
        S_low = arena.take(w.sums());
        z = arena.take(w.Dp);
        z_low = arena.take(w.Dp);
        z_added = arena.take(w.Dp);
        end = arena.next;
    }
    float* end;
};

enum Phase { SUMS, ADD_SUMS, OUTPUTS };
static_assert(OUTPUTS + 1 == FORWARD_PHASES, "");

// The sums after each part, in the memory that its parts share.
struct Borders {
    Arena arena;
    int64_t n, width;  // numbers of S and of z

    Borders(const Widths& w, float* shared) : arena{shared}, n(w.sums()), width(w.Dp) {}
    int64_t size() const { return 2 * round_up(n, 16) + 2 * round_up(width, 16); }
    // S, S_low, z and z_low after part number - 1
    void at(int64_t number, float* (&sums)[4]) const {
        Arena here = {arena.next + (number - 1) * size()};
        for (int i = 0; i < 4; i++) sums[i] = here.take(i < 2 ? n : width);
    }
};

struct Head {
    const linattn_attention& c;
    const Sequence& s;
    const Widths w;
    const Packing pack;
    Memory m;
    int64_t head, groups;
    bool empty;        // nothing has been summed
    bool direct;       // outputs go from the registers to their place
    bool past_caches;  // and from there to the memory

    Head(const linattn_attention& call, const Sequence& sequence, int kv_head, float* scratch)
        : c(call), s(sequence), w(call), pack(packing(call)), m(w, scratch), head(kv_head), groups(call.H / call.K),
          empty(true), direct(!call.narrow_values && w.M == w.Mp),
          past_caches(CAN_STORE_PAST_CACHES && direct && reinterpret_cast<uintptr_t>(call.out) % 64 == 0 &&
                      call.B * call.T * call.H * call.M * int64_t(sizeof(float)) >= LARGE) {}

    ~Head() {
        if (past_caches) all_stored();
    }

    void run() {
        load_state();
        if (c.causal) {
            causal(0, s.keys, c.kv_out);
        } else {
            sum_keys(0, s.keys);
            full(0, s.queries);
        }
        if (c.kv_out) store_state();
    }

    void run_part(const Part& part) {
        const Borders borders(w, part.shared);
        if (part.phase == SUMS) sum_part(part, borders);
        else if (part.phase == ADD_SUMS) add_borders(part, borders);
        else if (c.causal) causal_part(part, borders);
        else full_part(part, borders);
    }

    void sum_part(const Part& part, const Borders& borders) {
        if (part.number == 0) load_state();
        else clear_sums();
        if (!c.causal) sum_keys(cut(s.keys, part.number, part.parts, CHUNK), cut(s.keys, part.number + 1, part.parts, CHUNK));
        else if (part.number == 0) causal(0, causal_cut(1, part.parts), true);
        else sum_keys(causal_cut(part.number, part.parts), causal_cut(part.number + 1, part.parts));
        float* sums[4];
        borders.at(part.number + 1, sums);
        copy_sums(sums[0], sums[1], sums[2], sums[3], m.S, m.S_low, m.z, m.z_low);
    }

    // Each part's task adds up an equal share of the numbers.
    void add_borders(const Part& part, const Borders& borders) {
        const int64_t from = share(w.sums() / LANES, part.number, part.parts) * LANES;
        const int64_t n = share(w.sums() / LANES, part.number + 1, part.parts) * LANES - from;
        float *before[4], *after[4];
        for (int64_t i = 1; i < part.parts; i++) {
            borders.at(i, before);
            borders.at(i + 1, after);
            add_pairs(after[0] + from, after[1] + from, before[0] + from, before[1] + from, n);
            if (part.number == 0) add_pairs(after[2], after[3], before[2], before[3], w.Dp);
        }
    }

    void causal_part(const Part& part, const Borders& borders) {
        const bool last = part.number + 1 == part.parts;
        load_border(part.number + 1, borders);
        causal(causal_cut(part.number + 1, part.parts), causal_cut(part.number + 2, part.parts), last && c.kv_out);
        if (last && c.kv_out) store_state();
    }

    void full_part(const Part& part, const Borders& borders) {
        load_border(part.parts, borders);
        full(cut(s.queries, part.number, part.parts, CHUNK), cut(s.queries, part.number + 1, part.parts, CHUNK));
        if (part.number == 0 && c.kv_out) store_state();
    }

    // Cuts into one part more than there are tasks at a time. The first has its outputs made while the others are only
    // summed, so it is as much shorter as that takes longer, by the number of flops.
    int64_t causal_cut(int64_t i, int64_t parts) const {
        const int64_t chunks = (s.keys + CHUNK - 1) / CHUNK;
        const double pairs = double(CHUNK) * (w.D + w.M) / (2.0 * w.D * w.M);
        const int64_t first = static_cast<int64_t>(chunks / (1 + parts * (1 + groups * (1 + pairs))));
        const int64_t at = i == 0 ? 0 : (first + share(chunks - first, i - 1, parts)) * CHUNK;
        return at < s.keys ? at : s.keys;
    }

    // Outputs, and sums up to the last chunk; with that one if `on`.
    void causal(int64_t begin, int64_t end, bool on) {
        for (int64_t t = begin; t < end; t += CHUNK) causal_chunk(t, size(t, end), on || t + CHUNK < end);
    }

    void sum_keys(int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t += CHUNK) {
            pack_keys(t, size(t, end));
            add_keys(t, size(t, end));
        }
    }

    void full(int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t += CHUNK)
            for (int64_t g = 0; g < groups; g++) read_sums(t, size(t, end), head * groups + g);
    }

    static int size(int64_t t, int64_t end) { return static_cast<int>(end - t < CHUNK ? end - t : CHUNK); }

    void causal_chunk(int64_t t, int n, bool on) {
        pack_keys(t, n);
        transpose_tile(m.k, w.Dp, n, w.D, m.k_transposed, CHUNK);
        for (int64_t g = 0; g < groups; g++) causal_outputs(t, n, head * groups + g);
        if (on) add_keys(t, n);
    }

    Rows keys(int64_t t) const { return rows_of(c.k, c.narrow_features, c.k_strides, s.row, s.k_begin + t, head); }
    Rows values(int64_t t) const { return rows_of(c.v, c.narrow_values, c.v_strides, s.row, s.k_begin + t, head); }
    Rows queries(int64_t t, int64_t h) const {
        return rows_of(c.q, c.narrow_features, c.q_strides, s.row, s.q_begin + t, h);
    }
    Rows outputs(int64_t t, int64_t h) const {
        return rows_in(c.out, c.narrow_values, c.T, c.H, c.M, s.row, s.q_begin + t, h);
    }

    void pack_keys(int64_t t, int n) {
        pack.features(keys(t), n, w.D, float(c.root_scale), m.k, w.Dp);
        pack.plain(values(t), n, w.M, m.v, w.Mp);
    }

    void pack_queries(int64_t t, int n, int64_t h) {
        pack.features(queries(t, h), n, w.D, float(c.root_scale), m.q, w.Dp);
    }

    void causal_outputs(int64_t t, int n, int64_t h) {
        pack_queries(t, n, h);
        Ahead next = next_queries(t, h, blocks(n, (n + 1) / 2) + blocks(n, w.M));
        Product pairs = {n, n, m.table, CHUNK, {m.q, w.Dp, 1}, m.k_transposed, CHUNK, w.D, TABLE};
        pairs.ahead = &next;
        product(pairs);
        find_factors(n, true);
        Product sums = {n, w.M, m.out, w.Mp, {m.table, CHUNK, 1}, m.v, w.Mp, n, PAST};
        if (!empty) {
            sums.a2 = {m.q, w.Dp, 1};
            sums.b2 = m.S;
            sums.b2_row = w.Mp;
            sums.depth2 = w.D;
        }
        write(sums, t, n, h, &next);
    }

    void read_sums(int64_t t, int n, int64_t h) {
        pack_queries(t, n, h);
        find_factors(n, false);
        Ahead next = next_queries(t, h, blocks(n, w.M));
        write({n, w.M, m.out, w.Mp, {m.q, w.Dp, 1}, m.S, w.Mp, w.D}, t, n, h, &next);
    }

    // Zeroes what a causal table must not hold, and finds 1 / den for each row.
    void find_factors(int n, bool own) {
        const int columns = static_cast<int>(round_up(n, LANES));
        for (int first = 0; first < n; first += LANES) {
            vec dens[LANES];
            for (int r = 0; r < LANES; r++) {
                const int i = first + r;
                dens[r] = own && i < n ? keep_past(m.table + i * CHUNK, i, reach(i, columns)) : zero();
                if (c.normalize && !empty && i < n) dens[r] += dot_parts(m.q + i * w.Dp, m.z, w.Dp);
            }
            store(m.factors + first, c.normalize ? inverse_of(c, sums_of(dens)) : splat(1.0f));
        }
    }

    void write(Product sums, int64_t t, int n, int64_t h, Ahead* next) {
        const Rows out = outputs(t, h);
        sums.factors = m.factors;
        sums.past_caches = past_caches;
        sums.ahead = next;
        if (direct) {
            sums.c = static_cast<float*>(out.at);
            sums.c_row = out.stride;
        }
        product(sums);
        if (!direct) pack.unpack(out, n, w.M, m.out, w.Mp);
    }

    void add_keys(int64_t t, int n) {
        Ahead next = {{part_of(keys(t + CHUNK), w.D, c.narrow_features), part_of(values(t + CHUNK), w.M, c.narrow_values)},
                      0};
        next.at_once = (CHUNK - 1) / blocks(w.D, w.M) + 1;
        Product sums = {w.D, w.M, m.S, w.Mp, {m.k, 1, w.Dp}, m.v, w.Mp, n};
        sums.low = m.S_low;
        sums.ahead = &next;
        product(sums);
        clear(m.z_added, w.Dp);
        add_rows(m.z_added, m.k, w.Dp, n, w.Dp);
        add_exactly(m.z, m.z_low, m.z_added, w.Dp);
        empty = false;
    }

    // How many blocks a product has at least.
    static int blocks(int rows, int columns) { return ((rows - 1) / ROWS + 1) * ((columns - 1) / (VECTORS * LANES) + 1); }

    static Ahead::Part part_of(Rows x, int width, bool narrow) {
        const int size = narrow ? 2 : 4;
        return {reinterpret_cast<uintptr_t>(x.at), x.stride * size, width * size, CHUNK};
    }

    // Those of the chunk after t, and the place of their outputs.
    Ahead next_queries(int64_t t, int64_t h, int blocks) const {
        Ahead next = {{part_of(queries(t + CHUNK, h), w.D, c.narrow_features),
                       part_of(outputs(t + CHUNK, h), w.M, c.narrow_values)},
                      (CHUNK - 1) / blocks + 1};
        if (past_caches) next.parts[1].rows = 0;
        return next;
    }

    void clear_sums() {
        clear(m.S, w.sums());
        clear(m.S_low, w.sums());
        clear(m.z, w.Dp);
        clear(m.z_low, w.Dp);
    }

    void load_border(int64_t number, const Borders& borders) {
        float* sums[4];
        borders.at(number, sums);
        copy_sums(m.S, m.S_low, m.z, m.z_low, sums[0], sums[1], sums[2], sums[3]);
        empty = false;
    }

    void copy_sums(float* S, float* S_low, float* z, float* z_low, const float* from_S, const float* from_S_low,
                   const float* from_z, const float* from_z_low) const {
        memcpy(S, from_S, w.sums() * sizeof(float));
        memcpy(S_low, from_S_low, w.sums() * sizeof(float));
        memcpy(z, from_z, w.Dp * sizeof(float));
        memcpy(z_low, from_z_low, w.Dp * sizeof(float));
    }

    void load_state() {
        clear_sums();
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

int64_t forward_scratch(const linattn_attention& call, int64_t) {
    return (Memory(Widths(call), nullptr).end - static_cast<float*>(nullptr)) * sizeof(float);
}

void forward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch) {
    Head(call, sequence, head, scratch).run();
}

int64_t forward_shared(const linattn_attention& call, const Sequence&, int64_t parts) {
    return parts * Borders(Widths(call), nullptr).size() * static_cast<int64_t>(sizeof(float));
}

void forward_part(const linattn_attention& call, const Sequence& sequence, int head, const Part& part, float* scratch) {
    Head(call, sequence, head, scratch).run_part(part);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
