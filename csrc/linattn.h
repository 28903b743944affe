/* The C interface of linattn's native library: plain C types, no torch and no Python in it.
 *
 * linattn/ops/cpu.py loads it with ctypes and checks sizes and strides before each call: nothing here checks them.
 * Functions may be called from several threads at once. They return 0, or -1 where memory ran out.
 */
#ifndef LINATTN_H
#define LINATTN_H

#include <stdint.h>

#if defined(_WIN32)
#define LINATTN_API __declspec(dllexport)
#else
#define LINATTN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised with every change that a caller could notice; cpu.py refuses another one. */
#define LINATTN_ABI_VERSION 1

/* Feature maps that are fused, as linattn/features/elementwise.py defines them. */
enum { LINATTN_ELU, LINATTN_RELU, LINATTN_SQUARED_RELU, LINATTN_SOFTPLUS, LINATTN_EXP, LINATTN_IDENTITY };

LINATTN_API int32_t linattn_abi_version(void);

/* The instruction sets that this processor and its system can run, best first, separated by spaces. */
LINATTN_API const char* linattn_available(void);

/* Choose one of them by name ("" is the best): 0, or -1 where it is not available. Not while other calls run. */
LINATTN_API int32_t linattn_choose(const char* name);

/* The one that is used. */
LINATTN_API const char* linattn_isa(void);

/* y = f(root_scale * x) for n numbers, and slope = df/dx of them where it is not NULL. */
LINATTN_API int32_t linattn_feature_map(int32_t map, float root_scale, const float* x, float* y, float* slope,
                                        int64_t n, int32_t threads);

/* One call of the operator (linattn/ops/attention.py). All fields are 8 bytes wide: Python packs them in one go.
 *
 * Axes: B batch  T queries  U keys  H heads  K key/value heads  D features  M values  R states: one a row or sequence.
 * q, k, v and dout have any strides but 1 in their last axis; everything else is contiguous. NULL is what there is not.
 * Outputs and gradients of tokens outside of all lengths or sequences are not written.
 */
typedef struct linattn_attention {
    int64_t B, T, U, H, K, D, M, R;
    int64_t q_strides[3], k_strides[3], v_strides[3], dout_strides[3]; /* batch, time, head; in numbers */
    int64_t map, causal, normalize, threads;
    int64_t narrow_features, narrow_values; /* q, k, dq, dk and v, out, dout, dv are bf16, not fp32 */
    double root_scale, eps;                                            /* eps < 0: none */
    const void *q, *k, *v;                                             /* (B, T, H, D)  (B, U, K, D)  (B, U, K, M) */
    const float *kv, *z, *kv_low, *z_low;                              /* (R, K, D, M)  (R, K, D) */
    const int64_t *lengths, *q_lengths;                                /* (B,) */
    const int64_t *cu_seqlens, *cu_seqlens_q;                          /* (R + 1,) */
    void* out;                                                         /* (B, T, H, M) */
    float *kv_out, *z_out, *kv_low_out, *z_low_out;                    /* the state after the last key */
    /* backward only */
    const void* dout;
    const float *dkv_out, *dz_out; /* gradients of the state that was returned */
    void *dq, *dk, *dv;
    float *dkv, *dz; /* gradients of the state that was given */
} linattn_attention;

LINATTN_API int32_t linattn_attention_forward(const linattn_attention* call);
LINATTN_API int32_t linattn_attention_backward(const linattn_attention* call);

#ifdef __cplusplus
}
#endif
#endif
