// The sums S and z, each a pair of numbers whose error does not grow with the number of terms (equation 12).
#ifndef LINATTN_SUMS_H
#define LINATTN_SUMS_H

#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

// high + low += x
LINATTN_INLINE void add_exactly(float* high, float* low, vec x) {
    const vec term = load(low) + x, before = load(high), after = before + term;
    store(low, term - (after - before));
    store(high, after);
}

// The same for n numbers (a multiple of LANES).
LINATTN_INLINE void add_exactly(float* high, float* low, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) add_exactly(high + i, low + i, load(x + i));
}

// high + low += more + more_low, each number within the rounding of low: more may be as large as high.
LINATTN_INLINE void add_pairs(float* high, float* low, const float* more, const float* more_low, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const vec x = load(high + i), y = load(more + i), total = x + y, of_y = total - x;
        const vec lost = (x - (total - of_y)) + (y - of_y);
        const vec rest = load(low + i) + load(more_low + i) + lost, after = total + rest;
        store(low + i, rest - (after - total));
        store(high + i, after);
    }
}

// to[i] += the sum of n rows of `width` numbers (a multiple of LANES).
LINATTN_INLINE void add_rows(float* to, const float* rows, int64_t row, int n, int64_t width) {
    for (int64_t w = 0; w < width; w += LANES) {
        vec even = zero(), odd = zero();  // two sums: each addition waits for the one before
        int i = 0;
        for (; i + 2 <= n; i += 2) {
            even += load(rows + i * row + w);
            odd += load(rows + (i + 1) * row + w);
        }
        if (i < n) even += load(rows + i * row + w);
        store(to + w, load(to + w) + (even + odd));
    }
}

// x·y as a vector whose numbers add up to it.
LINATTN_INLINE vec dot_parts(const float* x, const float* y, int64_t n) {
    vec total = zero();
    for (int64_t i = 0; i < n; i += LANES) total = fma(load(x + i), load(y + i), total);
    return total;
}

LINATTN_INLINE float dot(const float* x, const float* y, int64_t n) { return sum(dot_parts(x, y, n)); }

LINATTN_INLINE void clear(float* x, int64_t n) { memset(x, 0, n * sizeof(float)); }

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
