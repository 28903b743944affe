// One call as its kernels see it: widths in whole vectors, rows of one head, and the divisor.
#ifndef LINATTN_CALL_H
#define LINATTN_CALL_H

#include "attention.h"
#include "linattn.h"
#include "product.h"
#include "sums.h"
#include "tiles.h"

namespace linattn {
namespace LINATTN_ISA {

// Hands out parts of the scratch memory, each beginning on a cache line.
struct Arena {
    float* next;
    float* take(int64_t n) {
        float* part = next;
        next += round_up(n, 16);
        return part;
    }
};

struct Widths {
    int D, M, Dp, Mp;  // features and values; the same in whole vectors
    explicit Widths(const linattn_attention& c)
        : D(static_cast<int>(c.D)), M(static_cast<int>(c.M)), Dp(static_cast<int>(round_up(c.D, LANES))),
          Mp(static_cast<int>(round_up(c.M, LANES))) {}
    int64_t sums() const { return static_cast<int64_t>(D) * Mp; }
};

// Where the first `part` of `parts` equal parts of n end.
LINATTN_INLINE int64_t share(int64_t n, int64_t part, int64_t parts) { return n * part / parts; }

// The same of `tokens`, in whole chunks.
LINATTN_INLINE int64_t cut(int64_t tokens, int64_t part, int64_t parts, int64_t chunk) {
    const int64_t at = share((tokens + chunk - 1) / chunk, part, parts) * chunk;
    return at < tokens ? at : tokens;
}

// The rows of one head from a token on; strides are those of batch, time and head.
LINATTN_INLINE Rows rows_of(const void* x, bool narrow, const int64_t* strides, int64_t row, int64_t time,
                            int64_t head) {
    const int64_t at = (row * strides[0] + time * strides[1] + head * strides[2]) * (narrow ? 2 : 4);
    return {const_cast<char*>(static_cast<const char*>(x)) + at, strides[1]};
}

// The same in a contiguous tensor (B, times, heads, width).
LINATTN_INLINE Rows rows_in(void* x, bool narrow, int64_t times, int64_t heads, int64_t width, int64_t row,
                            int64_t time, int64_t head) {
    const int64_t strides[3] = {times * heads * width, heads * width, width};
    return rows_of(x, narrow, strides, row, time, head);
}

// 1 / divisor (equation 4), and whether the divisor follows den.
LINATTN_INLINE float inverse_of(const linattn_attention& c, float den, bool* follows) {
    *follows = den != 0;
    if (c.eps >= 0) {
        const float least = static_cast<float>(c.eps);
        *follows = !(fabsf(den) < least);
        if (!*follows) den = den < 0 ? -least : least;
    }
    return den == 0 ? 0.0f : 1.0f / den;
}

// The same for rows at once.
LINATTN_INLINE vec inverse_of(const linattn_attention& c, vec den) {
    if (c.eps >= 0) {
        const vec least = splat(static_cast<float>(c.eps)), size = den < zero() ? -den : den;
        den = size < least ? (den < zero() ? -least : least) : den;
    }
    return den == zero() ? zero() : splat(1.0f) / den;
}

// Zeroes what a causal table must not hold, row i beyond column i, up to the end of the block that a product reads; the
// numbers of what is returned add up to the row's sum.
LINATTN_INLINE vec keep_past(float* row, int i, int columns) {
    vec total = zero();
    for (int j = 0; j < columns; j += LANES) {
        vec x = load(row + j);
        if (j + LANES > i + 1) {
            x = i + 1 > j ? keep_first(x, i + 1 - j) : zero();
            store(row + j, x);
        }
        total += x;
    }
    return total;
}

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
