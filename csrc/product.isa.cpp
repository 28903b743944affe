// Register blocks of ROWS x VECTORS sums: each vector of b serves ROWS rows, each number of a VECTORS columns.
#include "product.h"

#include "sums.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

template <int N, int V>
LINATTN_INLINE void add_terms(vec (&sums)[N][V], Operand a, const float* b, ptrdiff_t b_row, int from, int until) {
    const float* a_now = a.at + from * a.step;
    const float* b_now = b + from * b_row;
    for (int p = from; p < until; p++, a_now += a.step, b_now += b_row) {
        vec columns[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) columns[j] = load(b_now + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) {
            const vec row = splat(a_now[i * a.row]);
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) sums[i][j] = fma(row, columns[j], sums[i][j]);
        }
    }
}

// f(row, column, sum) for each vector of a block.
template <int N, int V, class F>
LINATTN_INLINE void each(const vec (&sums)[N][V], F f) {
#pragma GCC unroll 8
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int s = 0; s < V; s++) f(r, s * LANES, sums[r][s]);
}

template <int N, int V>
LINATTN_INLINE void finish(const Product& p, int i, int j, const vec (&sums)[N][V]) {
    const ptrdiff_t row = p.c_row, at = i * row + j;
    float* c = p.c + at;
    if (p.low) {
        float* low = p.low + at;
        each(sums, [=](int r, int s, vec x) { add_exactly(c + r * row + s, low + r * row + s, x); });
    } else if (p.past_caches) {
        const float* factors = p.factors + i;
        each(sums, [=](int r, int s, vec x) { store_past_caches(c + r * row + s, x * splat(factors[r])); });
    } else if (p.factors) {
        const float* factors = p.factors + i;
        each(sums, [=](int r, int s, vec x) { store(c + r * row + s, x * splat(factors[r])); });
    } else if (p.start) {
        // What there was is added last: were it first, each of the terms would be rounded to its size.
        const float* start = p.start + at;
        each(sums, [=](int r, int s, vec x) { store(c + r * row + s, load(start + r * row + s) + x); });
    } else {
        each(sums, [=](int r, int s, vec x) { store(c + r * row + s, x); });
    }
}

// The pair of numbers that the block will be added to: they rarely fit the first cache with all else.
template <int N, int V>
LINATTN_INLINE void call_for_pairs(const Product& p, int i, int j) {
    for (int r = 0; r < N; r++)
        for (int s = 0; s < V; s++) {
            const ptrdiff_t at = (i + r) * p.c_row + j + s * LANES;
            __builtin_prefetch(p.c + at);
            __builtin_prefetch(p.low + at);
        }
}

template <int N, int V>
void block(const Product& p, int i, int j) {
    if (p.low) call_for_pairs<N, V>(p, i, j);
    vec sums[N][V] = {};
    const int from = p.reach == FUTURE ? i : 0;
    const int until = p.reach == PAST && i + N < p.depth ? i + N : p.depth;
    const Operand a = {p.a.at + i * p.a.row, p.a.row, p.a.step};
    add_terms<N, V>(sums, a, p.b + j, p.b_row, from, until);
    if (p.depth2) {
        const Operand a2 = {p.a2.at + i * p.a2.row, p.a2.row, p.a2.step};
        add_terms<N, V>(sums, a2, p.b2 + j, p.b2_row, 0, p.depth2);
    }
    finish<N, V>(p, i, j, sums);
    if (p.ahead) p.ahead->some();
}

template <int N>
void rows(const Product& p, int i) {
    const int columns = p.reach == TABLE && i + N < p.columns ? i + N : p.columns;
    int j = 0;
    for (; j + (VECTORS - 1) * LANES < columns; j += VECTORS * LANES) block<N, VECTORS>(p, i, j);
    const int left = (columns - j + LANES - 1) / LANES;
    if (VECTORS > 3 && left == 3) block<N, (VECTORS > 3 ? 3 : 1)>(p, i, j);
    if (VECTORS > 2 && left == 2) block<N, (VECTORS > 2 ? 2 : 1)>(p, i, j);
    if (left == 1) block<N, 1>(p, i, j);
}

}  // namespace

void product(const Product& p) {
    int i = 0;
    for (; i + ROWS <= p.rows; i += ROWS) rows<ROWS>(p, i);
    if (ROWS > 4 && i + 4 <= p.rows) {
        rows<4>(p, i);
        i += 4;
    }
    if (i + 2 <= p.rows) {
        rows<2>(p, i);
        i += 2;
    }
    if (i < p.rows) rows<1>(p, i);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
