// The fused feature maps and their derivatives (linattn/features/elementwise.py), as functions of a vector.
#ifndef LINATTN_MAPS_H
#define LINATTN_MAPS_H

#include "linattn.h"
#include "simd.h"

namespace linattn {
namespace LINATTN_ISA {

constexpr float MAX_EXPONENT = 20.0f;  // features/base.py: exp is bounded there, so that sums stay within fp32

// V is vec, or several of them.
template <int MAP, class V>
LINATTN_INLINE V feature(V x) {
    const vec nothing = zero();
    if (MAP == LINATTN_ELU) return exp_bounded(smallest(x, nothing)) + largest(x, nothing);
    if (MAP == LINATTN_RELU) return largest(x, nothing);
    if (MAP == LINATTN_SQUARED_RELU) {
        const V kept = largest(x, nothing);
        return kept * kept;
    }
    // max(x, 0) + log(1 + exp(-|x|)): nothing overflows, nothing cancels
    if (MAP == LINATTN_SOFTPLUS) return largest(x, nothing) + log_one_plus(exp_bounded(smallest(x, x * splat(-1.0f))));
    if (MAP == LINATTN_EXP) return exp_bounded(smallest(x, splat(MAX_EXPONENT)));
    return x;
}

// df/dx from x and y = f(x).
template <int MAP>
LINATTN_INLINE vec slope(vec x, vec y) {
    const vec nothing = zero(), one = splat(1.0f);
    if (MAP == LINATTN_ELU) return smallest(y, one);
    if (MAP == LINATTN_RELU) return x > nothing ? one : nothing;
    if (MAP == LINATTN_SQUARED_RELU) return splat(2.0f) * largest(x, nothing);
    if (MAP == LINATTN_SOFTPLUS) {
        const vec e = exp_bounded(x < nothing ? x : -x);  // of -|x|
        return (x < nothing ? e : one) / (one + e);
    }
    if (MAP == LINATTN_EXP) return x <= splat(MAX_EXPONENT) ? y : nothing;
    return one;
}

// Calls f<MAP>::run(arguments...) for a map known at run time.
template <template <int> class F, class... Arguments>
static inline auto with_map(int map, Arguments... arguments) {
    switch (map) {
        case LINATTN_ELU: return F<LINATTN_ELU>::run(arguments...);
        case LINATTN_RELU: return F<LINATTN_RELU>::run(arguments...);
        case LINATTN_SQUARED_RELU: return F<LINATTN_SQUARED_RELU>::run(arguments...);
        case LINATTN_SOFTPLUS: return F<LINATTN_SOFTPLUS>::run(arguments...);
        case LINATTN_EXP: return F<LINATTN_EXP>::run(arguments...);
        default: return F<LINATTN_IDENTITY>::run(arguments...);
    }
}

}  // namespace LINATTN_ISA
}  // namespace linattn
#endif
