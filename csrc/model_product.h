// y = activation(x Aᵀ + b) for a few rows: each weight is read once, from panels of PANEL outputs (model_step.h).
//
// A tile is R rows by V vectors of outputs, held in registers over all inputs. Each output is one sum, over the inputs in
// their order, whatever R, V and the number of threads are: a row gives the same bits alone and in any batch.
#ifndef LINATTN_MODEL_PRODUCT_H
#define LINATTN_MODEL_PRODUCT_H

#include "model_step.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr int PANEL = LINATTN_PANEL;
constexpr int MOST_ROWS = 6;  // of a tile
// Vectors of a tile: as many as the registers hold, with R · V sums, V weights and one number of x.
#if LINATTN_LANES == 16 || defined(__aarch64__)
constexpr int TILE_VECTORS = 4;
#else
constexpr int TILE_VECTORS = 2;
#endif
// For one row the sums are few, and there must be enough of them to hide the latency of an addition.
constexpr int ROW_VECTORS = LANES == 16 ? 4 : 8;

LINATTN_INLINE vec weights_at(const float* p) { return load(p); }
LINATTN_INLINE vec weights_at(const bf16* p) { return load(p); }
#if LINATTN_LANES == 16  // gcc 12 takes the general form apart into single numbers
LINATTN_INLINE vec weights_at(const int8_t* p) {
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#elif LINATTN_LANES == 8
LINATTN_INLINE vec weights_at(const int8_t* p) {
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#else
typedef int8_t qvec __attribute__((vector_size(4)));
LINATTN_INLINE vec weights_at(const int8_t* p) {
    qvec narrow;
    memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, ivec), vec);
}
#endif

// x for x <= 0: -0.5 x erfc(|x| / √2), with erfc(a) = exp(-a²) Q(1 / (1 + 0.36 a)); Q is fitted to 4e-7, relative.
// Unlike 1 + erf this keeps its digits for negative x.
LINATTN_INLINE vec gelu(vec x) {
    const vec size = x < zero() ? -x : x;
    const vec t = splat(1.0f) / (splat(1.0f) + splat(0.36f * 0.70710678f) * size);
    vec q = splat(-1.662983261e-01f);
    q = q * t + splat(5.767422346e-01f);
    q = q * t + splat(-3.793462690e-01f);
    q = q * t + splat(4.515609248e-01f);
    q = q * t + splat(9.572356446e-02f);
    q = q * t + splat(2.197370579e-01f);
    q = q * t + splat(2.018811658e-01f);
    const vec tail = splat(0.5f) * size * (q * t) * exp(splat(-0.5f) * size * size);
    return largest(x, zero()) - tail;
}

LINATTN_INLINE vec silu(vec x) { return x / (splat(1.0f) + exp(-x)); }

// One product on its way: rows of x and y, and how far apart they lie.
struct Product {
    const linattn_product* of;
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
    int64_t rows;
};

// The sums of R rows and V vectors of outputs, from column `column` of a panel on.
template <int R, int V, class W>
LINATTN_INLINE void tile(const W* panel, const float* x, int64_t x_stride, int64_t inputs, vec (&sums)[R][V]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = zero();
    for (int64_t k = 0; k < inputs; k++) {
        vec w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) w[v] = weights_at(panel + k * PANEL + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const vec number = splat(x[r * x_stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = fma(number, w[v], sums[r][v]);
        }
    }
}

LINATTN_INLINE vec finished(const linattn_product& of, vec sum, int64_t column) {
    if (of.scale) sum = sum * load(of.scale + column);
    return of.bias ? sum + load(of.bias + column) : sum;
}

// R rows of one strip: V vectors of outputs from `column` on, of the packed weight. Gates stand one panel before values.
template <int R, int V, class W>
static void strip(const Product& p, int64_t row, int64_t column) {
    const linattn_product& of = *p.of;
    const float* x = p.x + row * p.x_stride;
    const bool gated = of.activation == LINATTN_SWIGLU;
    const int64_t panel = column / PANEL, within = column % PANEL, size = of.inputs * PANEL;
    const W* weight = static_cast<const W*>(of.weight) + (gated ? 2 * panel : panel) * size + within;
    vec sums[R][V], values[R][V];
    tile<R, V>(weight, x, p.x_stride, of.inputs, sums);
    if (gated) tile<R, V>(weight + size, x, p.x_stride, of.inputs, values);
    const int64_t packed = gated ? 2 * panel * PANEL + within : column;
    for (int r = 0; r < R; r++) {
        float* y = p.y + (row + r) * p.y_stride + column;
        for (int v = 0; v < V; v++) {
            vec sum = finished(of, sums[r][v], packed + v * LANES);
            if (gated) sum = silu(sum) * finished(of, values[r][v], packed + PANEL + v * LANES);
            else if (of.activation == LINATTN_RELU_UNIT) sum = largest(sum, zero());
            else if (of.activation == LINATTN_GELU) sum = gelu(sum);
            store(y + v * LANES, sum);
        }
    }
}

template <class W>
static void strips(const Product& p, int index, int count) {
    const int width = (p.rows == 1 ? ROW_VECTORS : TILE_VECTORS) * LANES;
    const int64_t all = round_up(p.of->outputs, PANEL) / width, tiles = (p.rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t s = all * index / count; s < all * (index + 1) / count; s++) {
        const int64_t column = s * width;
        if (p.rows == 1) {
            strip<1, ROW_VECTORS, W>(p, 0, column);
            continue;
        }
        for (int64_t t = 0; t < tiles; t++) {  // of almost one size: 7 rows are 4 and 3
            const int64_t row = p.rows * t / tiles;
            switch (p.rows * (t + 1) / tiles - row) {
                case 1: strip<1, TILE_VECTORS, W>(p, row, column); break;
                case 2: strip<2, TILE_VECTORS, W>(p, row, column); break;
                case 3: strip<3, TILE_VECTORS, W>(p, row, column); break;
                case 4: strip<4, TILE_VECTORS, W>(p, row, column); break;
                case 5: strip<5, TILE_VECTORS, W>(p, row, column); break;
                default: strip<6, TILE_VECTORS, W>(p, row, column);
            }
        }
    }
}

// This thread's share of the outputs, for all rows.
static void product(const Product& p, int index, int count) {
    if (p.of->kind == LINATTN_BF16) strips<bf16>(p, index, count);
    else if (p.of->kind == LINATTN_INT8) strips<int8_t>(p, index, count);
    else strips<float>(p, index, count);
}

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
