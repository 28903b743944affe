/* The single-token step of a whole model as one call: what linattn/generate/native.py describes and calls with ctypes.
 *
 *     token, place → x;   blocks: x ← norm(x + attention(x)), x ← norm(x + ff(x)) (or pre-norm), before them where the
 *     block has one a short convolution, x ← norm(x + b + Σ_j w_j x_{t-K+1+j});   head;   next token
 *
 * All is plain data and belongs to the caller: nothing is kept between two calls. Sizes are checked there, not here.
 * A weight (outputs, inputs) lies in panels of PANEL outputs, [panel][input][output in the panel], so that a product
 * reads it once and in order; the last panel is filled up with zeros, and so are scales and biases.
 *
 * Axes:  B rows   S steps   W width   H heads   K key/value heads, or taps   D key width = features C   M value width
 */
#ifndef LINATTN_MODEL_STEP_H
#define LINATTN_MODEL_STEP_H

#include "linattn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { LINATTN_PANEL = 64 };
enum { LINATTN_FP32, LINATTN_BF16, LINATTN_INT8 };
enum { LINATTN_LAYER_NORM, LINATTN_RMS_NORM };
enum { LINATTN_LINEAR, LINATTN_RELU_UNIT, LINATTN_GELU, LINATTN_SWIGLU };
enum { LINATTN_NO_ROTARY, LINATTN_ROTARY_BEFORE, LINATTN_ROTARY_AFTER };
enum { LINATTN_NO_PLACE, LINATTN_SINE_CONCAT, LINATTN_SINE_ADD, LINATTN_LEARNED, LINATTN_ROW_COLUMN_CHANNEL };
enum { LINATTN_PARAMS, LINATTN_LOG_SOFTMAX, LINATTN_CATEGORICAL, LINATTN_LOGISTICS };

/* y = x Aᵀ + b. With LINATTN_SWIGLU a panel of gates and one of values take turns, and `outputs` are those of one. */
typedef struct {
    const void* weight;
    const float* scale; /* int8 only: of each output */
    const float* bias;  /* or NULL */
    int64_t inputs, outputs;
    int32_t kind, activation;
} linattn_product;

typedef struct {
    const float* weight;
    const float* bias; /* or NULL */
    int32_t kind;
    float eps;
} linattn_norm;

typedef struct {
    linattn_norm norm[2];
    linattn_product qkv, out, enter, leave; /* qkv: outputs q (H, D), k (K, D), v (K, M) */
    float *kv, *kv_low;                     /* (B, K, D, M): sums, and what rounding took from them */
    float *z, *z_low;                       /* (B, K, D), or NULL */
    int64_t heads, kv_heads, key_width, value_width;
    int32_t map, rotary, norm_first;
    float root_scale, eps; /* eps: the least size of the divisor, 0 for none */
    linattn_norm conv_norm;
    const float *conv, *conv_bias; /* (K, W) the oldest token's first, and (W,) */
    float* recent;                 /* (B, K - 1, W): the last tokens as the convolution read them */
    int64_t taps;                  /* K, 0 for none */
} linattn_block;

typedef struct {
    const linattn_block* blocks;
    int64_t num_blocks, width;
    const float* embedding; /* (values, embedded), or NULL: the model reads frames, by `enter` */
    linattn_product enter;
    int64_t values, embedded;
    const double* angles;    /* of sines and cosines: θ_i */
    const float* tables[3];  /* learned places: one, or rows, columns and channels */
    int64_t places, columns, channels;
    const double* rotary_angles; /* (D / 2,), or NULL */
    linattn_norm norm;
    linattn_product head;
    int32_t position, head_kind;
    int64_t mixtures;
} linattn_model;

typedef struct {
    int64_t rows, steps;
    int64_t* pending;        /* (B,) the last token of each row, in and out */
    int64_t** seen;          /* num_seen times (B,): tokens read so far, all alike, in and out */
    int64_t num_seen;
    int64_t* left;           /* (B,) how many tokens each row may still make, in and out: 0 at a stop token */
    const double* uniforms;  /* (S, B) */
    const float* frames;     /* (B, features of a frame): one step */
    float* params;           /* (B, parameters) of the last step, or NULL */
    int64_t* made;           /* (S, B) tokens, -1 for a row that has ended; NULL: nothing is drawn */
    const int64_t* stop;
    int64_t num_stop;
    double temperature, top_p; /* top_k 0, top_p 1: all values */
    int64_t top_k;
    int64_t done;       /* out: steps that have happened whole */
    int64_t not_finite; /* out: how many parameters of the step after those were not finite numbers: nothing was drawn */
} linattn_run;

/* `run->steps` steps, or fewer where all rows have ended. -1 where memory ran out: then nothing has happened. */
LINATTN_API int32_t linattn_model_run(const linattn_model* model, linattn_run* run, int32_t threads);

/* One token of one attention without rotary positions: q (B, H, D), k (B, K, D), v (B, K, M) → out (B, H, M). */
LINATTN_API int32_t linattn_attend(const linattn_block* block, int64_t rows, const float* q, const float* k,
                                   const float* v, float* out, int32_t threads);

/* Sizes of the structures above, so that a caller who lays them out by hand can tell that it does so rightly. */
LINATTN_API int64_t linattn_model_sizes(int32_t which);

#ifdef __cplusplus
}
#endif
#endif
