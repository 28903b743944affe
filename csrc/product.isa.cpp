// Register blocks of ROWS x VECTORS sums: each vector of b serves ROWS rows, each number of a VECTORS columns.
#include "product.h"

namespace linattn {
namespace LINATTN_ISA {
namespace {

// Sums that stay in registers: 24 of 32 with AVX-512 and NEON, 12 of 16 with AVX2, 8 of 16 without fused products.
#if LINATTN_LANES == 8
constexpr int ROWS = 6, VECTORS = 2;
#elif LINATTN_LANES == 16 || defined(__aarch64__)
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif

template <int N, int V>
LINATTN_INLINE void add_terms(vec (&sums)[N][V], Operand a, const float* b, ptrdiff_t b_row, int from, int until) {
    const float* a_now = a.at + from * a.step;
    const float* b_now = b + from * b_row;
    for (int p = from; p < until; p++, a_now += a.step, b_now += b_row) {
        vec columns[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) columns[j] = load(b_now + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < N; i++) {
            const vec row = splat(a_now[i * a.row]);
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) sums[i][j] = fma(row, columns[j], sums[i][j]);
        }
    }
}

template <int N, int V>
void block(const Product& p, int i, int j) {
    vec sums[N][V] = {};
    const int from = p.reach == FUTURE ? i : 0;
    const int until = p.reach == PAST && i + N < p.depth ? i + N : p.depth;
    const Operand a = {p.a.at + i * p.a.row, p.a.row, p.a.step};
    add_terms<N, V>(sums, a, p.b + j, p.b_row, from, until);
    if (p.depth2) {
        const Operand a2 = {p.a2.at + i * p.a2.row, p.a2.row, p.a2.step};
        add_terms<N, V>(sums, a2, p.b2 + j, p.b2_row, 0, p.depth2);
    }
    // What there was is added last: were it first, each of the terms would be rounded to its size.
    const float* start = p.start ? p.start + i * p.c_row + j : nullptr;
    float* c = p.c + i * p.c_row + j;
#pragma GCC unroll 6
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int s = 0; s < V; s++) {
            const ptrdiff_t at = r * p.c_row + s * LANES;
            store(c + at, start ? load(start + at) + sums[r][s] : sums[r][s]);
        }
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
