// The one product of small matrices that everything is made of, on packed fp32 tiles that lie in the cache.
#ifndef LINATTN_PRODUCT_H
#define LINATTN_PRODUCT_H

#include <stddef.h>

#include "simd.h"
#include "tiles.h"

namespace linattn {
namespace LINATTN_ISA {

// Register blocks: sums that stay in registers, 16 of 32 with AVX-512, 24 with NEON, 12 of 16 with AVX2, 8 of 16 without
// fused products. With AVX-512 blocks of 8 rows divide its chunks, and two vectors of columns keep both units busy.
#if LINATTN_LANES == 16
constexpr int ROWS = 8, VECTORS = 2;
#elif LINATTN_LANES == 8
constexpr int ROWS = 6, VECTORS = 2;
#elif defined(__aarch64__)
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr int ROWS = 4, VECTORS = 2;
#endif

// Causal tables are half zero. A block of rows i … i + n - 1 of c = a b needs
enum Reach {
    ALL,      // every term
    PAST,     // terms p < i + n: a is lower triangular
    FUTURE,   // terms p >= i: a is upper triangular
    TABLE,    // columns j < i + n: c itself is lower triangular (what is left of a vector beyond that is rubbish)
};

// Where the columns end that a block reads of row i of a table (PAST): none of its blocks goes further.
LINATTN_INLINE int reach(int i, int columns) {
    const int needed = static_cast<int>(round_up((i / ROWS + 1) * ROWS, LANES));
    return needed < columns ? needed : columns;
}

struct Operand {
    const float* at;
    ptrdiff_t row, step;  // element (i, p) lies at at[i * row + p * step]
};

// c[i, j] = start[i, j] + Σ_p a[i, p] b[p, j] + Σ_p a2[i, p] b2[p, j]
// Columns are computed up to a whole vector: rows of b, b2, start and c are that long.
struct Product {
    int rows, columns;
    float* c;
    ptrdiff_t c_row;
    Operand a;
    const float* b;
    ptrdiff_t b_row;
    int depth;
    Reach reach = ALL;
    Operand a2 = {nullptr, 0, 0};
    const float* b2 = nullptr;
    ptrdiff_t b2_row = 0;
    int depth2 = 0;
    const float* start = nullptr;    // NULL for zeros; may be c
    float* low = nullptr;            // c + low += the sums instead, exactly (sums.h); `low` lies like c
    const float* factors = nullptr;  // c = the sums times factors[i] instead
    bool past_caches = false;        // and c, on whole cache lines, will not be read soon
    Ahead* ahead = nullptr;          // called for between blocks
};

void product(const Product& p);

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
