// Gradients of one head of one sequence, from the last chunk to the first (equations 6 to 9):
//
//     A = tril(φq φkᵀ)    g = dout / den    dA = tril(g v'ᵀ + dden 1ᵀ)    dden = −(Σ_j A dA + φq·(g S'ᵀ)) / den
//     dφq = dA φk + g S'ᵀ + dden z      dφk = dAᵀ φq + v' dSᵀ + dz      dv = Aᵀ g + φk dS
//     dS += φqᵀ g                       dz += ddenᵀ φq
//
// The sums before each chunk are recomputed: one pass over the keys keeps those at the borders of segments, in pairs
// of numbers (12); within a segment the sums before its chunks are made again and stay in the second-level cache.
// Running them backwards (S -= φkᵀ v) would spare that, and is not accurate enough in fp32. In a segment the values are
// counted from c, the mean of the values before it (9). S is only needed transposed here.
//
// A sequence that is cut into parts: each part's gradients are made as if nothing came after it, which leaves its share
// of dS and dz; these are added up from the last part to the first; then dφk and dv get what comes after their part.
// Until then they stay in fp32. This takes no more flops than doing it in one.
//
// φq, dφq, φk, dφk (L, D)   v, dv, g (L, M)   A, dA (L, L)   Sᵀ (M, D)   dS (D, M) and transposed   z, dz (D)   c (M)
#include "call.h"
#include "kernels.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

constexpr int CHUNK = 64;              // tokens: measured, docs/decisions.md
constexpr int64_t CACHED = 64 * 1024;  // numbers: the sums of one segment's chunks, a quarter of a megabyte
constexpr int64_t MOST_CHUNKS = 32;

// The sums before a segment.
struct Border {
    float *S, *S_low, *z, *z_low;
};

struct Memory {
    float *q, *k, *v, *g, *dq, *dk, *dv, *k_transposed, *v_transposed, *table, *dtable;
    float *dS, *dS_transposed, *dz, *center, *inverse, *dden;
    float *starts, *starts_z;  // the sums before each chunk of a segment
    float* borders;
    int64_t chunks, segment, transposed, border;  // chunks and tokens of a segment; numbers of Sᵀ and of a border
    float* end;

    Memory(const Widths& w, float* scratch, int64_t keys) {
        Arena arena = {scratch};
        q = arena.take(CHUNK * w.Dp);
        k = arena.take(CHUNK * w.Dp);
        dq = arena.take(CHUNK * w.Dp);
        dk = arena.take(CHUNK * w.Dp);
        v = arena.take(CHUNK * w.Mp);
        g = arena.take(CHUNK * w.Mp);
        dv = arena.take(CHUNK * w.Mp);
        k_transposed = arena.take(w.Dp * CHUNK);
        v_transposed = arena.take(w.Mp * CHUNK);
        table = arena.take(CHUNK * CHUNK);
        dtable = arena.take(CHUNK * CHUNK);
        dS = arena.take(w.sums());
        transposed = static_cast<int64_t>(w.M) * w.Dp;
        dS_transposed = arena.take(transposed);
        dz = arena.take(w.Dp);
        center = arena.take(w.Mp);
        inverse = arena.take(CHUNK);
        dden = arena.take(CHUNK);
        chunks = CACHED / (transposed + 1);
        chunks = chunks < 1 ? 1 : chunks > MOST_CHUNKS ? MOST_CHUNKS : chunks;
        segment = chunks * CHUNK;
        starts = arena.take(chunks * transposed);
        starts_z = arena.take(chunks * w.Dp);
        border = 2 * round_up(transposed, 16) + 2 * round_up(w.Dp, 16);
        borders = arena.take(border * ((keys + segment - 1) / segment + 1));
        end = arena.next;
    }

    // Borders that lie elsewhere, and shorter segments where there would be too few.
    void cut(float* shared_borders, int64_t chunks_of_segment) {
        borders = shared_borders;
        chunks = chunks_of_segment;
        segment = chunks * CHUNK;
    }

    Border border_before(int64_t number, const Widths& w) const {
        Arena arena = {borders + number * border};
        float* S = arena.take(transposed);
        float* S_low = arena.take(transposed);
        float* z = arena.take(w.Dp);
        return {S, S_low, z, arena.take(w.Dp)};
    }
};

enum Phase { MEAN, SUMS, ADD_SUMS, QUERIES, ADD_GRADIENTS, KEYS };
static_assert(KEYS + 1 == BACKWARD_PHASES, "");

// What the parts of a head share: sums at borders (of segments if causal, of parts if not), gradients of the sums before
// each part and after the last, sums of values, and dφk and dv.
struct Shared {
    int64_t chunks, segments;  // chunks of a segment
    int64_t gradients;         // numbers of dS and dz
    float *borders, *ends, *means, *dk, *dv;
    float* end;

    Shared(const linattn_attention& c, const Widths& w, const Sequence& s, int64_t parts, float* memory) {
        const Memory m(w, nullptr, 0);
        const int64_t enough = (s.keys + 4 * parts * CHUNK - 1) / (4 * parts * CHUNK);  // four segments a part
        chunks = enough < 1 ? 1 : enough < m.chunks ? enough : m.chunks;
        segments = c.causal ? (s.keys + chunks * CHUNK - 1) / (chunks * CHUNK) : parts;
        gradients = round_up(w.sums(), 16) + round_up(w.Dp, 16);
        Arena arena = {memory};
        borders = arena.take((segments + 1) * m.border);
        ends = arena.take((parts + 1) * gradients);
        means = arena.take(parts * w.Mp);
        dk = arena.take(c.causal ? s.keys * w.Dp : 0);
        dv = arena.take(c.causal ? s.keys * w.Mp : 0);
        end = arena.next;
    }
};

struct Head {
    const linattn_attention& c;
    const Sequence& s;
    const Widths w;
    const Packing pack;
    Memory m;
    int64_t head, groups;
    bool centered, later;  // later: dS and dz are not zero
    const Shared* shared;  // where the sequence is cut into parts

    Head(const linattn_attention& call, const Sequence& sequence, int kv_head, float* scratch)
        : c(call), s(sequence), w(call), pack(packing(call)), m(w, scratch, sequence.keys), head(kv_head),
          groups(call.H / call.K), centered(call.normalize && call.eps < 0), later(false), shared(nullptr) {}

    void run() {
        clear(m.center, w.Mp);
        if (c.causal) {
            load_state(m.border_before(0, w));
            load_gradients();
            const int64_t segments = (s.keys + m.segment - 1) / m.segment;
            for (int64_t i = 0; i + 1 < segments; i++) sum_segment(i);
            for (int64_t i = segments; i-- > 0;) causal_segment(i);
        } else {
            full();
        }
        if (c.dkv) store_gradients();
    }

    static int size(int64_t t, int64_t end) { return static_cast<int>(end - t < CHUNK ? end - t : CHUNK); }

    // Parts

    // Where a part begins, or one that is `later`.
    static int64_t first_token(int64_t tokens, const Part& part, int64_t later = 0) {
        return cut(tokens, part.number + later, part.parts, CHUNK);
    }

    void run_part(const Part& part, const Shared& of_parts) {
        shared = &of_parts;
        m.cut(shared->borders, shared->chunks);
        clear(m.center, w.Mp);
        switch (part.phase) {
            case MEAN: return c.causal ? void() : mean_part(part);
            case SUMS: return c.causal ? causal_sums(part) : full_sums(part);
            case ADD_SUMS: return add_borders(part);
            case QUERIES: return c.causal ? causal_queries(part) : full_queries(part);
            case ADD_GRADIENTS: return add_gradients(part);
            default: return c.causal ? causal_keys(part) : full_keys(part);
        }
    }

    void causal_sums(const Part& part) {
        if (part.number == 0) {
            load_state(m.border_before(0, w));
            load_gradients();
            store_end(part.parts);
        }
        const int64_t last = share(shared->segments - 1, part.number + 1, part.parts);
        for (int64_t i = share(shared->segments - 1, part.number, part.parts); i < last; i++) {
            const Border to = m.border_before(i + 1, w);
            clear(to.S, m.border);
            sum_keys(i * m.segment, (i + 1) * m.segment, to);
        }
    }

    // From one border to the next; each part's task adds up an equal share of the numbers.
    void add_borders(const Part& part) {
        const int64_t from = share(m.transposed / LANES, part.number, part.parts) * LANES;
        const int64_t n = share(m.transposed / LANES, part.number + 1, part.parts) * LANES - from;
        for (int64_t i = 1; i < shared->segments + (c.causal ? 0 : 1); i++) {
            const Border before = m.border_before(i - 1, w), after = m.border_before(i, w);
            add_pairs(after.S + from, after.S_low + from, before.S + from, before.S_low + from, n);
            if (part.number == 0) add_pairs(after.z, after.z_low, before.z, before.z_low, w.Dp);
        }
    }

    void causal_queries(const Part& part) {
        clear_gradients();
        for (int64_t i = first_segment(part.number + 1, part.parts); i-- > first_segment(part.number, part.parts);)
            causal_segment(i);
        store_end(part.number);
    }

    int64_t first_segment(int64_t number, int64_t parts) const { return share(shared->segments, number, parts); }

    void add_gradients(const Part& part) {
        const int64_t from = share(shared->gradients / LANES, part.number, part.parts) * LANES;
        const int64_t until = share(shared->gradients / LANES, part.number + 1, part.parts) * LANES;
        for (int64_t p = part.parts; p-- > 0;) {
            float *to = shared->ends + p * shared->gradients, *later_ones = to + shared->gradients;
            for (int64_t i = from; i < until; i += LANES) store(to + i, load(to + i) + load(later_ones + i));
        }
    }

    // Segments are dealt out in turn: those of the last part may have nothing after them.
    void causal_keys(const Part& part) {
        int64_t owner = 0;
        for (int64_t i = part.number; i < shared->segments; i += part.parts) {
            while (first_segment(owner + 1, part.parts) <= i) owner++;
            load_end(owner + 1);
            later = owner + 1 < part.parts || c.dkv_out || c.dz_out;
            finish_segment(i);
        }
        if (part.number || !c.dkv) return;
        load_end(0);
        store_gradients();
    }

    // dφk and dv of a segment get what comes after its part.
    void finish_segment(int64_t number) {
        const int64_t begin = number * m.segment, end = segment_end(number);
        if (centered) find_center(m.border_before(number, w), begin, end);
        recount(1);
        transpose_tile(m.dS, w.Mp, w.D, w.M, m.dS_transposed, w.Dp);
        for (int64_t t = begin; t < end; t += CHUNK) {
            const int n = size(t, end);
            pack_keys(t, n);
            share_key_gradients(t);
            if (later) later_keys(n, true);
            store_key_gradients(t, n);
        }
    }

    void share_key_gradients(int64_t t) {
        m.dk = shared->dk + t * w.Dp;
        m.dv = shared->dv + t * w.Mp;
    }

    void mean_part(const Part& part) {
        if (centered) add_values(first_token(s.keys, part), first_token(s.keys, part, 1));
        memcpy(shared->means + part.number * w.Mp, m.center, w.Mp * sizeof(float));
    }

    void join_means(int64_t parts) {
        if (!centered || s.keys == 0) return;
        add_rows(m.center, shared->means, w.Mp, static_cast<int>(parts), w.Mp);
        divide_center(s.keys);
    }

    void full_sums(const Part& part) {
        join_means(part.parts);
        const Border first = m.border_before(0, w), to = m.border_before(part.number + 1, w);
        if (part.number == 0) {
            start_full(first);
            store_end(part.parts);
        }
        clear(to.S, m.border);
        sum_keys(first_token(s.keys, part), first_token(s.keys, part, 1), to);
    }

    void full_queries(const Part& part) {
        clear_gradients();
        ask(first_token(s.queries, part), first_token(s.queries, part, 1),
            m.border_before(part.parts, w));
        store_end(part.number);
    }

    void full_keys(const Part& part) {
        join_means(part.parts);
        load_end(0);
        answer(first_token(s.keys, part), first_token(s.keys, part, 1));
        recount(-1);
        if (part.number == 0 && c.dkv) store_gradients();
    }

    void clear_gradients() {
        clear(m.dS, w.sums());
        clear(m.dz, w.Dp);
        later = false;
    }

    // dS and dz before part `number`
    void store_end(int64_t number) const {
        float* end = shared->ends + number * shared->gradients;
        clear(end, shared->gradients);
        memcpy(end, m.dS, w.sums() * sizeof(float));
        memcpy(end + round_up(w.sums(), 16), m.dz, w.Dp * sizeof(float));
    }

    void load_end(int64_t number) {
        const float* end = shared->ends + number * shared->gradients;
        memcpy(m.dS, end, w.sums() * sizeof(float));
        memcpy(m.dz, end + round_up(w.sums(), 16), w.Dp * sizeof(float));
        later = true;
    }

    // Causal

    // From one border to the next.
    void sum_segment(int64_t number) {
        const Border from = m.border_before(number, w), to = m.border_before(number + 1, w);
        memcpy(to.S, from.S, m.border * sizeof(float));
        sum_keys(number * m.segment, (number + 1) * m.segment, to);
    }

    void sum_keys(int64_t begin, int64_t end, const Border& to) {
        for (int64_t t = begin; t < end; t += CHUNK) {
            pack_keys(t, size(t, end));
            add_to_border(to, size(t, end));
        }
    }

    int64_t segment_end(int64_t number) const {
        return s.keys - number * m.segment < m.segment ? s.keys : (number + 1) * m.segment;
    }

    void add_to_border(const Border& to, int n) {
        float *added = m.starts, *added_z = m.starts_z;
        product({w.M, w.D, added, w.Dp, {m.v, 1, w.Mp}, m.k, w.Dp, n});
        add_exactly(to.S, to.S_low, added, m.transposed);
        clear(added_z, w.Dp);
        add_rows(added_z, m.k, w.Dp, n, w.Dp);
        add_exactly(to.z, to.z_low, added_z, w.Dp);
    }

    void causal_segment(int64_t number) {
        const Border before = m.border_before(number, w);
        const int64_t begin = number * m.segment, end = segment_end(number);
        if (centered) find_center(before, begin, end);
        if (number || c.kv) count_from_center(before, m.starts);
        else clear(m.starts, m.transposed);
        memcpy(m.starts_z, before.z, w.Dp * sizeof(float));
        recount(1);
        int64_t chunk = 0;
        for (int64_t t = begin; t + CHUNK < end; t += CHUNK, chunk++) {
            pack_keys(t, CHUNK);
            float *S = m.starts + chunk * m.transposed, *z = m.starts_z + chunk * w.Dp;
            Product sums = {w.M, w.D, S + m.transposed, w.Dp, {m.v, 1, w.Mp}, m.k, w.Dp, CHUNK};
            sums.start = S;
            product(sums);
            memcpy(z + w.Dp, z, w.Dp * sizeof(float));
            add_rows(z + w.Dp, m.k, w.Dp, CHUNK, w.Dp);
        }
        for (; chunk >= 0; chunk--) {
            const int64_t t = begin + chunk * CHUNK;
            causal_chunk(t, size(t, end), m.starts + chunk * m.transposed, m.starts_z + chunk * w.Dp, t || c.kv);
        }
        recount(-1);
    }

    // S and z: the sums before the chunk; `earlier`: they are not zero.
    void causal_chunk(int64_t t, int n, const float* S, const float* z, bool earlier) {
        pack_keys(t, n);
        if (shared) share_key_gradients(t);
        transpose_tile(m.k, w.Dp, n, w.D, m.k_transposed, CHUNK);
        transpose_tile(m.v, w.Mp, n, w.M, m.v_transposed, CHUNK);
        if (later) transpose_tile(m.dS, w.Mp, w.D, w.M, m.dS_transposed, w.Dp);
        const int columns = static_cast<int>(round_up(n, LANES));
        for (int64_t g = 0; g < groups; g++) {
            const int64_t h = head * groups + g;
            pack_queries(t, n, h);
            product({n, n, m.table, CHUNK, {m.q, w.Dp, 1}, m.k_transposed, CHUNK, w.D, TABLE});
            for (int i = 0; i < n; i++) {
                const float den = sum(keep_past(m.table + i * CHUNK, i, reach(i, columns)));
                if (c.normalize) divide(i, den + (earlier ? dot(m.q + i * w.Dp, z, w.Dp) : 0.0f));
            }
            product({n, n, m.dtable, CHUNK, {m.g, w.Mp, 1}, m.v_transposed, CHUNK, w.M, TABLE});
            if (earlier) product({n, w.D, m.dq, w.Dp, {m.g, w.Mp, 1}, S, w.Dp, w.M});
            for (int i = 0; i < n; i++) through_den(i, reach(i, columns), earlier ? z : nullptr);
            Product dq = {n, w.D, m.dq, w.Dp, {m.dtable, CHUNK, 1}, m.k, w.Dp, n, PAST};
            dq.start = earlier ? m.dq : nullptr;
            product(dq);
            store_query_gradients(t, n, h);
            keys_and_values(n, g == 0);
            if (t || c.dkv || shared) add_to_later(n);  // else nobody asks what came before the first chunk
        }
        if (!shared) store_key_gradients(t, n);
    }

    void keys_and_values(int n, bool first) {
        Product dk = {n, w.D, m.dk, w.Dp, {m.dtable, 1, CHUNK}, m.q, w.Dp, n, FUTURE};
        Product dv = {n, w.M, m.dv, w.Mp, {m.table, 1, CHUNK}, m.g, w.Mp, n, FUTURE};
        if (!first) {
            dk.start = m.dk;
            dv.start = m.dv;
        } else if (later) {
            dk.a2 = {m.v, w.Mp, 1};
            dk.b2 = m.dS_transposed;
            dk.b2_row = w.Dp;
            dk.depth2 = w.M;
            dv.a2 = {m.k, w.Dp, 1};
            dv.b2 = m.dS;
            dv.b2_row = w.Mp;
            dv.depth2 = w.D;
        }
        product(dk);
        product(dv);
        if (first && c.normalize) add_to_rows(m.dk, w.Dp, n, m.dz);
    }

    // Row i of g becomes dout / den.
    void divide(int i, float den) {
        bool follows;
        const float inverse = inverse_of(c, den, &follows);
        m.inverse[i] = follows ? inverse : 0.0f;
        float* g = m.g + i * w.Mp;
        for (int j = 0; j < w.Mp; j += LANES) store(g + j, load(g + j) * splat(inverse));
    }

    // dden of row i, which every weight of the row gets (7); what lies beyond the diagonal of dA becomes 0.
    void through_den(int i, int columns, const float* z) {
        const float* table = m.table + i * CHUNK;
        float* dtable = m.dtable + i * CHUNK;
        keep_past(dtable, i, columns);
        if (!c.normalize) return;
        float through = dot(table, dtable, columns);
        if (z) through += dot(m.q + i * w.Dp, m.dq + i * w.Dp, w.Dp);
        const float dden = -through * m.inverse[i];
        m.dden[i] = dden;
        for (int j = 0; j <= i; j += LANES) {
            const vec all = load(dtable + j) + splat(dden);
            store(dtable + j, j + LANES > i + 1 ? keep_first(all, i + 1 - j) : all);
        }
        if (z) add_times(m.dq + i * w.Dp, z, dden);
    }

    void add_times(float* to, const float* x, float factor) {
        for (int d = 0; d < w.Dp; d += LANES) store(to + d, load(to + d) + load(x + d) * splat(factor));
    }

    static void add_to_rows(float* rows, int64_t row, int n, const float* x) {
        for (int i = 0; i < n; i++)
            for (int64_t j = 0; j < row; j += LANES) store(rows + i * row + j, load(rows + i * row + j) + load(x + j));
    }

    // dS += φqᵀ g, dz += ddenᵀ φq
    void add_to_later(int n) {
        Product sums = {w.D, w.M, m.dS, w.Mp, {m.q, 1, w.Dp}, m.g, w.Mp, n};
        sums.start = later ? m.dS : nullptr;
        product(sums);
        for (int d = 0; c.normalize && d < w.Dp; d += LANES) {
            vec dz = zero();
            for (int i = 0; i < n; i++) dz = fma(load(m.q + i * w.Dp + d), splat(m.dden[i]), dz);
            store(m.dz + d, load(m.dz + d) + dz);
        }
        later = true;
    }

    // All keys for every query

    void full() {
        const Border sums = m.border_before(0, w);
        if (centered) plain_mean(0, s.keys);
        start_full(sums);
        sum_keys(0, s.keys, sums);
        ask(0, s.queries, sums);
        answer(0, s.keys);
        recount(-1);
    }

    // The state and the gradients that were given, counted from the center.
    void start_full(const Border& sums) {
        load_state(sums);
        load_gradients();
        count_from_center(sums, sums.S);
        clear(sums.S_low, m.transposed);
        recount(1);
    }

    void ask(int64_t begin, int64_t end, const Border& sums) {
        for (int64_t t = begin; t < end; t += CHUNK)
            for (int64_t g = 0; g < groups; g++) full_queries(t, size(t, end), head * groups + g, sums);
    }

    void answer(int64_t begin, int64_t end) {
        transpose_tile(m.dS, w.Mp, w.D, w.M, m.dS_transposed, w.Dp);
        for (int64_t t = begin; t < end; t += CHUNK) full_keys(t, size(t, end));
    }

    void full_queries(int64_t t, int n, int64_t h, const Border& sums) {
        pack_queries(t, n, h);
        for (int i = 0; c.normalize && i < n; i++) divide(i, dot(m.q + i * w.Dp, sums.z, w.Dp));
        product({n, w.D, m.dq, w.Dp, {m.g, w.Mp, 1}, sums.S, w.Dp, w.M});
        for (int i = 0; c.normalize && i < n; i++) {
            float* dq = m.dq + i * w.Dp;
            m.dden[i] = -dot(m.q + i * w.Dp, dq, w.Dp) * m.inverse[i];
            add_times(dq, sums.z, m.dden[i]);
        }
        store_query_gradients(t, n, h);
        add_to_later(n);
    }

    void full_keys(int64_t t, int n) {
        pack_keys(t, n);
        later_keys(n, false);
        store_key_gradients(t, n);
    }

    // dφk = v' dSᵀ + dz, dv = φk dS; or added to what is there.
    void later_keys(int n, bool add) {
        Product dk = {n, w.D, m.dk, w.Dp, {m.v, w.Mp, 1}, m.dS_transposed, w.Dp, w.M};
        Product dv = {n, w.M, m.dv, w.Mp, {m.k, w.Dp, 1}, m.dS, w.Mp, w.D};
        dk.start = add ? m.dk : nullptr;
        dv.start = add ? m.dv : nullptr;
        product(dk);
        product(dv);
        if (c.normalize) add_to_rows(m.dk, w.Dp, n, m.dz);
    }

    // Where values are counted from (9)

    void find_center(const Border& before, int64_t begin, int64_t end) {
        const float weight = total(before.z, w.Dp);
        if (weight == 0) return plain_mean(begin, end);
        for (int j = 0; j < w.M; j++) m.center[j] = total(before.S + j * w.Dp, w.Dp) / weight;
    }

    // Nothing came before: any c will do that is near the values.
    void plain_mean(int64_t begin, int64_t end) {
        clear(m.center, w.Mp);
        if (begin == end) return;
        add_values(begin, end);
        divide_center(end - begin);
    }

    void add_values(int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t += CHUNK) {
            const int n = size(t, end);
            pack.plain(rows_of(c.v, c.narrow_values, c.v_strides, s.row, s.k_begin + t, head), n, w.M, m.v, w.Mp);
            add_rows(m.center, m.v, w.Mp, n, w.Mp);
        }
    }

    void divide_center(int64_t tokens) {
        const vec factor = splat(1.0f / static_cast<float>(tokens));
        for (int j = 0; j < w.Mp; j += LANES) store(m.center + j, load(m.center + j) * factor);
    }

    // S' = S − zᵀ c in float64: in fp32 S itself is already too coarse. `to` may be the border's own.
    void count_from_center(const Border& before, float* to) const {
        for (int j = 0; j < w.M; j++) {
            const double from = m.center[j];
            const float *S = before.S + j * w.Dp, *S_low = before.S_low + j * w.Dp;
            for (int d = 0; d < w.Dp; d++) {
                const double z = double(before.z[d]) + double(before.z_low[d]);
                to[j * w.Dp + d] = static_cast<float>(double(S[d]) + double(S_low[d]) - z * from);
            }
        }
    }

    // dz ± dS cᵀ, when values begin (sign = 1) or cease (-1) to be counted from c.
    void recount(float sign) {
        if (!centered || !later) return;
        for (int d = 0; d < w.D; d++) m.dz[d] += sign * dot(m.dS + d * w.Mp, m.center, w.Mp);
    }

    static float total(const float* x, int64_t n) {
        vec all = zero();
        for (int64_t i = 0; i < n; i += LANES) all += load(x + i);
        return sum(all);
    }

    // Tiles and states

    void pack_keys(int64_t t, int n) {
        const Rows k = rows_of(c.k, c.narrow_features, c.k_strides, s.row, s.k_begin + t, head);
        pack.features(k, n, w.D, float(c.root_scale), m.k, w.Dp);
        pack.plain(rows_of(c.v, c.narrow_values, c.v_strides, s.row, s.k_begin + t, head), n, w.M, m.v, w.Mp);
        if (!centered) return;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < w.Mp; j += LANES) {
                float* v = m.v + i * w.Mp + j;
                store(v, load(v) - load(m.center + j));
            }
    }

    // And the gradients of their outputs.
    void pack_queries(int64_t t, int n, int64_t h) {
        const Rows q = rows_of(c.q, c.narrow_features, c.q_strides, s.row, s.q_begin + t, h);
        pack.features(q, n, w.D, float(c.root_scale), m.q, w.Dp);
        const Rows dout = rows_of(c.dout, c.narrow_values, c.dout_strides, s.row, s.q_begin + t, h);
        if (c.dout) pack.plain(dout, n, w.M, m.g, w.Mp);
        else clear(m.g, static_cast<int64_t>(n) * w.Mp);
    }

    void store_query_gradients(int64_t t, int n, int64_t h) {
        const Rows q = rows_of(c.q, c.narrow_features, c.q_strides, s.row, s.q_begin + t, h);
        const Rows dq = rows_in(c.dq, c.narrow_features, c.T, c.H, c.D, s.row, s.q_begin + t, h);
        pack.through_map(dq, q, n, w.D, float(c.root_scale), m.q, m.dq, w.Dp);
    }

    void store_key_gradients(int64_t t, int n) {
        const Rows k = rows_of(c.k, c.narrow_features, c.k_strides, s.row, s.k_begin + t, head);
        const Rows dk = rows_in(c.dk, c.narrow_features, c.U, c.K, c.D, s.row, s.k_begin + t, head);
        pack.through_map(dk, k, n, w.D, float(c.root_scale), m.k, m.dk, w.Dp);
        const Rows dv = rows_in(c.dv, c.narrow_values, c.U, c.K, c.M, s.row, s.k_begin + t, head);
        pack.unpack(dv, n, w.M, m.dv, w.Mp);
    }

    void load_state(const Border& to) const {
        clear(to.S, m.border);
        if (!c.kv) return;
        const int64_t at = s.state * c.K + head;
        for (int d = 0; d < w.D; d++)
            for (int j = 0; j < w.M; j++) {
                to.S[j * w.Dp + d] = c.kv[(at * w.D + d) * w.M + j];
                to.S_low[j * w.Dp + d] = c.kv_low[(at * w.D + d) * w.M + j];
            }
        if (!c.z) return;
        memcpy(to.z, c.z + at * w.D, w.D * sizeof(float));
        memcpy(to.z_low, c.z_low + at * w.D, w.D * sizeof(float));
    }

    void load_gradients() {
        clear(m.dS, w.sums());
        clear(m.dz, w.Dp);
        const int64_t at = s.state * c.K + head;
        for (int d = 0; c.dkv_out && d < w.D; d++)
            memcpy(m.dS + d * w.Mp, c.dkv_out + (at * w.D + d) * w.M, w.M * sizeof(float));
        if (c.dz_out) memcpy(m.dz, c.dz_out + at * w.D, w.D * sizeof(float));
        later = c.dkv_out || c.dz_out;
    }

    void store_gradients() const {
        const int64_t at = s.state * c.K + head;
        for (int d = 0; d < w.D; d++)
            memcpy(c.dkv + (at * w.D + d) * w.M, m.dS + d * w.Mp, w.M * sizeof(float));
        if (c.dz) memcpy(c.dz + at * w.D, m.dz, w.D * sizeof(float));
    }
};

}  // namespace

int64_t backward_scratch(const linattn_attention& call, int64_t longest) {
    float* const nothing = nullptr;
    return (Memory(Widths(call), nothing, longest).end - nothing) * static_cast<int64_t>(sizeof(float));
}

void backward(const linattn_attention& call, const Sequence& sequence, int head, float* scratch) {
    Head(call, sequence, head, scratch).run();
}

int64_t backward_shared(const linattn_attention& call, const Sequence& sequence, int64_t parts) {
    float* const nothing = nullptr;
    const Shared shared(call, Widths(call), sequence, parts, nothing);
    return (shared.end - nothing) * static_cast<int64_t>(sizeof(float));
}

void backward_part(const linattn_attention& call, const Sequence& sequence, int head, const Part& part,
                   float* scratch) {
    const Shared shared(call, Widths(call), sequence, part.parts, part.shared);
    Head(call, sequence, head, scratch).run_part(part, shared);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
