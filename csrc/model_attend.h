// One token of linear attention, for one row and key/value head: it enters the sums, and its queries read them.
//
//     S ← S + φ(k) vᵀ,  z ← z + φ(k)        out = φ(q) S / φ(q)·z
//
// Sums are pairs: what rounding takes from S goes to its low part and comes back with the next token (equation 12 of
// docs/mathematics.md), so a state can be handed to torch, and taken from it, after any token.
#ifndef LINATTN_MODEL_ATTEND_H
#define LINATTN_MODEL_ATTEND_H

#include "kernels.h"
#include "model_step.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

// (high, low) + x, and the new sum.
LINATTN_INLINE vec add_exactly(vec high, vec low, vec a, vec b, vec& left) {
    const vec x = fma(a, b, low), total = high + x;
    left = x - (total - high);
    return total;
}

// V vectors of values, or the last few numbers of them (FEW), for the first query of a head. S lies in rows of `stride`.
template <int V, bool FEW>
LINATTN_INLINE void update_and_read(float* sums, float* low, int64_t stride, const float* phi_k, const float* phi_q,
                                    int64_t features, const float* value, vec divisor, float* out, int n) {
    vec v[V], read[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
        v[i] = FEW ? load(value + i * LANES, n) : load(value + i * LANES);
        read[i] = zero();
    }
    for (int64_t c = 0; c < features; c++) {
        float *high_c = sums + c * stride, *low_c = low + c * stride;
        const vec k = splat(phi_k[c]), q = splat(phi_q[c]);
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            const vec high = FEW ? load(high_c + i * LANES, n) : load(high_c + i * LANES);
            vec left = FEW ? load(low_c + i * LANES, n) : load(low_c + i * LANES);
            const vec total = add_exactly(high, left, k, v[i], left);
            read[i] = fma(q, total, read[i]);
            if (FEW) {
                store(high_c + i * LANES, total, n);
                store(low_c + i * LANES, left, n);
            } else {
                store(high_c + i * LANES, total);
                store(low_c + i * LANES, left);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
        if (FEW) store(out + i * LANES, read[i] / divisor, n);
        else store(out + i * LANES, read[i] / divisor);
    }
}

// What a further query of the head reads.
static inline void only_read(const float* sums, int64_t values, const float* phi_q, int64_t features, vec divisor,
                             float* out) {
    for (int64_t m = 0; m < values; m += LANES) {
        const int n = static_cast<int>(values - m < LANES ? values - m : LANES);
        vec read = zero();
        for (int64_t c = 0; c < features; c++) {
            const float* row = sums + c * values + m;
            read = fma(splat(phi_q[c]), n == LANES ? load(row) : load(row, n), read);
        }
        if (n == LANES) store(out + m, read / divisor);
        else store(out + m, read / divisor, n);
    }
}

static inline void add_weights(float* z, float* low, const float* phi_k, int64_t features) {
    for (int64_t c = 0; c < features; c += LANES) {
        const int n = static_cast<int>(features - c < LANES ? features - c : LANES);
        if (n == LANES) {
            vec left = load(low + c);
            store(z + c, add_exactly(load(z + c), left, load(phi_k + c), splat(1.0f), left));
            store(low + c, left);
        } else {
            vec left = load(low + c, n);
            store(z + c, add_exactly(load(z + c, n), left, load(phi_k + c, n), splat(1.0f), left), n);
            store(low + c, left, n);
        }
    }
}

static inline float dot(const float* x, const float* y, int64_t n) {
    vec total = zero();
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) total = fma(load(x + i), load(y + i), total);
    if (i < n) total = fma(load(x + i, static_cast<int>(n - i)), load(y + i, static_cast<int>(n - i)), total);
    return sum(total);
}

// What a weighted sum is divided by: infinite where nothing was seen, so that 0 / it is 0.
static inline float divisor_of(float weight, float eps) {
    if (eps > 0) {
        const float size = weight < 0 ? -weight : weight;
        weight = (weight < 0 ? -1.0f : 1.0f) * (size < eps ? eps : size);
    }
    return weight == 0 ? INFINITY : weight;
}

// Pairs (x_i, x_{i + D/2}) turned by the angle whose cosine and sine are given.
static inline void turn(const float* x, float* y, const float* cosines, int64_t width) {
    const int64_t half = width / 2;
    const float* sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        const float left = x[i], right = x[i + half];
        y[i] = left * cosines[i] - right * sines[i];
        y[i + half] = left * sines[i] + right * cosines[i];
    }
}

// Numbers of working memory that `attend` needs.
static inline int64_t attend_scratch(const linattn_block& b) { return 2 * (b.heads / b.kv_heads + 1) * b.key_width; }

// q (H, D), k (K, D), v (K, M), out (H, M): this row's. row: its place in the state.
static void attend(const linattn_block& b, int64_t row, int64_t head, const float* q, const float* k, const float* v,
                   const float* cosines, float* out, float* work) {
    const int64_t groups = b.heads / b.kv_heads, width = b.key_width, values = b.value_width;
    q += head * groups * width;
    k += head * width;
    v += head * values;
    float *phi = work, *turned = work + (groups + 1) * width;  // queries, then the key
    if (b.rotary == LINATTN_ROTARY_BEFORE) {
        for (int64_t g = 0; g < groups; g++) turn(q + g * width, phi + g * width, cosines, width);
        turn(k, phi + groups * width, cosines, width);
        feature_map(b.map, b.root_scale, phi, phi, nullptr, (groups + 1) * width);
    } else {
        feature_map(b.map, b.root_scale, q, phi, nullptr, groups * width);
        feature_map(b.map, b.root_scale, k, phi + groups * width, nullptr, width);
    }
    const float* numerator = phi;
    if (b.rotary == LINATTN_ROTARY_AFTER) {
        for (int64_t g = 0; g <= groups; g++) turn(phi + g * width, turned + g * width, cosines, width);
        numerator = turned;
    }
    const int64_t state = row * b.kv_heads + head;
    float* z = b.z ? b.z + state * width : nullptr;
    if (z) add_weights(z, b.z_low + state * width, phi + groups * width, width);
    float *sums = b.kv + state * width * values, *low = b.kv_low + state * width * values;
    const float* phi_k = numerator + groups * width;
    for (int64_t g = 0; g < groups; g++) {
        const vec divisor = splat(z ? divisor_of(dot(phi + g * width, z, width), b.eps) : 1.0f);
        const float* phi_q = numerator + g * width;
        float* to = out + (head * groups + g) * values;
        if (g > 0) {
            only_read(sums, values, phi_q, width, divisor, to);
            continue;
        }
        int64_t m = 0;
        for (; m + 4 * LANES <= values; m += 4 * LANES)
            update_and_read<4, false>(sums + m, low + m, values, phi_k, phi_q, width, v + m, divisor, to + m, 0);
        for (; m + 2 * LANES <= values; m += 2 * LANES)
            update_and_read<2, false>(sums + m, low + m, values, phi_k, phi_q, width, v + m, divisor, to + m, 0);
        for (; m < values; m += LANES) {
            const int n = static_cast<int>(values - m < LANES ? values - m : LANES);
            update_and_read<1, true>(sums + m, low + m, values, phi_k, phi_q, width, v + m, divisor, to + m, n);
        }
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
