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

#ifdef __cplusplus
}
#endif
#endif
