// The one product of small matrices that everything is made of, on packed fp32 tiles that lie in the cache.
#ifndef LINATTN_PRODUCT_H
#define LINATTN_PRODUCT_H

#include <stddef.h>

#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

// Causal tables are half zero. A block of rows i … i + n - 1 of c = a b needs
enum Reach {
    ALL,      // every term
    PAST,     // terms p < i + n: a is lower triangular
    FUTURE,   // terms p >= i: a is upper triangular
    TABLE,    // columns j < i + n: c itself is lower triangular (what is left of a vector beyond that is rubbish)
};

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
    const float* start = nullptr;  // NULL for zeros; may be c
};

void product(const Product& p);

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
