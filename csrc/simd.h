// Vectors of LANES fp32 numbers, in the compiler's own vector types, for files compiled once per instruction set.
//
// The build passes LINATTN_ISA (scalar, avx2, avx512, neon: a namespace) and LINATTN_LANES. Everything here lives in
// that namespace: an inline function shared between instruction sets would be compiled for one of them and run on all.
// "scalar" is four lanes of whatever the plain target has: SSE2 on x86-64, single numbers where there is nothing.
//
// Contraction is on (-ffp-contract=fast), so a * b + c is a fused multiply-add where the machine has one. Nothing else
// of fast-math is: sums keep their order, NaN stays NaN.
#ifndef LINATTN_SIMD_H
#define LINATTN_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if LINATTN_LANES == 16 || LINATTN_LANES == 8
#include <immintrin.h>
#endif

#define LINATTN_INLINE static inline __attribute__((always_inline))

namespace linattn {
namespace LINATTN_ISA {

constexpr int LANES = LINATTN_LANES;
typedef float vec __attribute__((vector_size(4 * LINATTN_LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LINATTN_LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LINATTN_LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LINATTN_LANES)));
struct bf16 {
    uint16_t bits;
};

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

LINATTN_INLINE vec splat(float x) { return x - vec{}; }
LINATTN_INLINE vec zero() { return vec{}; }

// memory

LINATTN_INLINE vec load(const float* p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

LINATTN_INLINE void store(float* p, vec x) { memcpy(p, &x, sizeof x); }

// For whole cache lines that will not be read soon: they are not read before they are written. Other threads see them
// after all_stored.
#if LINATTN_LANES == 16
constexpr bool CAN_STORE_PAST_CACHES = true;
LINATTN_INLINE void store_past_caches(float* p, vec x) { _mm512_stream_ps(p, (__m512)x); }
LINATTN_INLINE void all_stored() { _mm_sfence(); }
#else
constexpr bool CAN_STORE_PAST_CACHES = false;
LINATTN_INLINE void store_past_caches(float* p, vec x) { store(p, x); }
LINATTN_INLINE void all_stored() {}
#endif

// bf16 is the upper half of an fp32 number.
LINATTN_INLINE vec load(const bf16* p) {
    hvec half;
    memcpy(&half, p, sizeof half);
    uvec wide = __builtin_convertvector(half, uvec) << 16;
    return (vec)wide;
}

LINATTN_INLINE hvec to_bf16(vec x) {
    const uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    rounded = x == x ? rounded : (bits >> 16) | 0x40u;           // rounding could turn a NaN into infinity
    return __builtin_convertvector(rounded, hvec);
}

LINATTN_INLINE void store(bf16* p, vec x) {
    const hvec half = to_bf16(x);
    memcpy(p, &half, sizeof half);
}

// The first n < LANES numbers; the others are 0.
#if LINATTN_LANES == 16
LINATTN_INLINE vec load(const float* p, int n) { return (vec)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
LINATTN_INLINE void store(float* p, vec x, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)x); }
LINATTN_INLINE vec load(const bf16* p, int n) {
    const hvec half = (hvec)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
    return (vec)(__builtin_convertvector(half, uvec) << 16);
}
LINATTN_INLINE void store(bf16* p, vec x, int n) {
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), (__m256i)to_bf16(x));
}
#else
template <class T>
LINATTN_INLINE vec load_few(const T* p, int n) {
    T few[LANES] = {};
    for (int i = 0; i < n; i++) few[i] = p[i];
    return load(few);
}
template <class T>
LINATTN_INLINE void store_few(T* p, vec x, int n) {
    T few[LANES];
    store(few, x);
    for (int i = 0; i < n; i++) p[i] = few[i];
}
LINATTN_INLINE vec load(const bf16* p, int n) { return load_few(p, n); }
LINATTN_INLINE void store(bf16* p, vec x, int n) { store_few(p, x, n); }
#if LINATTN_LANES == 8
LINATTN_INLINE ivec first(int n) { return ivec{0, 1, 2, 3, 4, 5, 6, 7} < (ivec{} + n); }
LINATTN_INLINE vec load(const float* p, int n) { return (vec)_mm256_maskload_ps(p, (__m256i)first(n)); }
LINATTN_INLINE void store(float* p, vec x, int n) { _mm256_maskstore_ps(p, (__m256i)first(n), (__m256)x); }
#else
LINATTN_INLINE vec load(const float* p, int n) { return load_few(p, n); }
LINATTN_INLINE void store(float* p, vec x, int n) { store_few(p, x, n); }
#endif
#endif

// arithmetic

LINATTN_INLINE vec fma(vec a, vec b, vec c) { return a * b + c; }

// NaN in x stays. These instructions return their second operand where one is NaN; of a comparison and a choice the
// compiler makes two.
#if LINATTN_LANES == 16
LINATTN_INLINE vec largest(vec x, vec y) { return (vec)_mm512_max_ps((__m512)y, (__m512)x); }
LINATTN_INLINE vec smallest(vec x, vec y) { return (vec)_mm512_min_ps((__m512)y, (__m512)x); }
#elif LINATTN_LANES == 8
LINATTN_INLINE vec largest(vec x, vec y) { return (vec)_mm256_max_ps((__m256)y, (__m256)x); }
LINATTN_INLINE vec smallest(vec x, vec y) { return (vec)_mm256_min_ps((__m256)y, (__m256)x); }
#else
LINATTN_INLINE vec largest(vec x, vec y) { return x < y ? y : x; }
LINATTN_INLINE vec smallest(vec x, vec y) { return x > y ? y : x; }
#endif

// The first n numbers, and 0 for the others.
LINATTN_INLINE vec keep_first(vec x, int n) {
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < ivec{} + n ? x : zero();
}

LINATTN_INLINE float sum(vec x) {
    float each[LANES];
    store(each, x);
    for (int width = LANES / 2; width >= 1; width /= 2)  // in pairs: as exact as it is quick
        for (int i = 0; i < width; i++) each[i] += each[i + width];
    return each[0];
}

// x · 2^n, where n stands in the low bits of `shifted`; both x and the result are normal numbers.
LINATTN_INLINE vec times_power(vec x, vec shifted) { return (vec)((uvec)x + ((uvec)shifted << 23)); }

constexpr float LOWEST_EXPONENT = -87.3365f;  // features/base.py: exp of it is just above the smallest normal number
constexpr float HIGHEST_EXPONENT = 88.0f;

// Several vectors in step: the steps of one wait for each other, those of the others do not. What is written for `vec`
// below is for both.
template <int K>
struct Vecs {
    vec at[K];
};

#define LINATTN_IN_STEP(name, operation)                              \
    template <int K>                                                  \
    LINATTN_INLINE Vecs<K> name(const Vecs<K>& x, const Vecs<K>& y) { \
        Vecs<K> made;                                                 \
        for (int k = 0; k < K; k++) made.at[k] = operation;           \
        return made;                                                  \
    }                                                                 \
    template <int K>                                                  \
    LINATTN_INLINE Vecs<K> name(const Vecs<K>& x, vec of_all) {       \
        Vecs<K> y;                                                    \
        for (int k = 0; k < K; k++) y.at[k] = of_all;                 \
        return name(x, y);                                            \
    }
LINATTN_IN_STEP(operator+, x.at[k] + y.at[k])
LINATTN_IN_STEP(operator-, x.at[k] - y.at[k])
LINATTN_IN_STEP(operator*, x.at[k] * y.at[k])
LINATTN_IN_STEP(operator/, x.at[k] / y.at[k])
LINATTN_IN_STEP(largest, largest(x.at[k], y.at[k]))
LINATTN_IN_STEP(smallest, smallest(x.at[k], y.at[k]))
LINATTN_IN_STEP(times_power, times_power(x.at[k], y.at[k]))
#undef LINATTN_IN_STEP

// exp(x) for x <= HIGHEST_EXPONENT, relative error below 2e-7; x is held above LOWEST_EXPONENT, NaN stays.
// x = n ln 2 + r, |r| <= ln 2 / 2, and the polynomial of degree 5 in r with the smallest relative error (1.05e-7).
template <class V>
LINATTN_INLINE V exp_bounded(V x) {
    x = largest(x, splat(LOWEST_EXPONENT));
    const vec shift = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer, which stands in the low bits
    const V shifted = x * splat(1.44269504f) + shift;
    const V n = shifted - shift;
    const V r = n * splat(-1.42860677e-6f) + (n * splat(-0.693145752f) + x);
    V p = r * splat(8.312501013e-3f) + splat(4.189033061e-2f);
    p = p * r + splat(1.666711569e-1f);
    p = p * r + splat(0.499992311f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    return times_power(p, shifted);
}

// The same for all x.
LINATTN_INLINE vec exp(vec x) { return exp_bounded(smallest(x, splat(HIGHEST_EXPONENT))); }

// log(1 + x) for 0 <= x <= 1, relative error below 3e-7: 2 atanh(s), s = x / (2 + x) <= 1/3.
template <class V>
LINATTN_INLINE V log_one_plus(V x) {
    const V s = x / (x + splat(2.0f)), s2 = s * s;
    V p = s2 * splat(1.0f / 15) + splat(1.0f / 13);
    p = p * s2 + splat(1.0f / 11);
    p = p * s2 + splat(1.0f / 9);
    p = p * s2 + splat(1.0f / 7);
    p = p * s2 + splat(1.0f / 5);
    p = p * s2 + splat(1.0f / 3);
    return ((p * s2) * s + s) * splat(2.0f);
}

// shuffles

template <int STEP>
LINATTN_INLINE void exchange(vec& a, vec& b) {
    ivec low, high;
    for (int i = 0; i < LANES; i++) {
        low[i] = (i & STEP) ? LANES + i - STEP : i;
        high[i] = (i & STEP) ? LANES + i : i + STEP;
    }
#if defined(__clang__)
    vec x, y;
    for (int i = 0; i < LANES; i++) {  // clang makes shuffles of it
        x[i] = low[i] < LANES ? a[low[i]] : b[low[i] - LANES];
        y[i] = high[i] < LANES ? a[high[i]] : b[high[i] - LANES];
    }
#else
    const vec x = __builtin_shuffle(a, b, low), y = __builtin_shuffle(a, b, high);
#endif
    a = x;
    b = y;
}

template <int STEP>
LINATTN_INLINE void transpose_step(vec* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) exchange<STEP>(rows[i], rows[i + STEP]);
}

template <int STEP>
LINATTN_INLINE void fold(vec* rows) {
#pragma GCC unroll 16
    for (int i = 0; i < STEP; i++) {
        exchange<STEP>(rows[i], rows[i + STEP]);
        rows[i] += rows[i + STEP];
    }
}

// The sum of each of LANES vectors, as one vector.
LINATTN_INLINE vec sums_of(vec* rows) {
#if LINATTN_LANES >= 16
    fold<8>(rows);
#endif
#if LINATTN_LANES >= 8
    fold<4>(rows);
#endif
    fold<2>(rows);
    fold<1>(rows);
    return rows[0];
}

// LANES vectors as a square, in place: swaps halves, quarters, …, single numbers across the diagonal.
LINATTN_INLINE void transpose(vec* rows) {
#if LINATTN_LANES >= 16
    transpose_step<8>(rows);
#endif
#if LINATTN_LANES >= 8
    transpose_step<4>(rows);
#endif
    transpose_step<2>(rows);
    transpose_step<1>(rows);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
