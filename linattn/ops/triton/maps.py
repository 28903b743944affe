"""Feature maps inside the kernels: φ, its derivative, and tiles that are mapped on the way from memory.

    elu          max(x, 0) + exp(min(x, 0))             φ' = min(φ, 1)
    relu         max(x, 0)                              φ' = [x > 0]
    squared_relu max(x, 0)²                             φ' = 2 max(x, 0)
    softplus     log(1 + exp(x))                        φ' = sigmoid(x)
    exp          exp(min(x, 20))                        φ' = φ [x ≤ 20]

The same functions as linattn/features/elementwise.py, in float32. Exponents stop where float32's smallest normal number
is: below it the GPU returns 0, and a positive map must stay positive.

Axes:  [T, D] a tile of T tokens and D numbers of each
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import device

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-87.33)  # just above the log of the smallest normal float32, which the fast exp2 must not miss
HIGHEST = tl.constexpr(20.0)  # linattn.features.base.MAX_EXPONENT


@device
def exp(x):
    return tl.exp2(x * LOG2E)


@device
def log1p(x):
    """log(1 + x) for 0 ≤ x ≤ 1 that keeps the digits of a small x: what rounding did to 1 + x is divided out again."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))


@device
def phi(x, MAP: tl.constexpr):
    """φ of a float32 tile."""
    if MAP == "elu":
        return tl.maximum(x, 0.0) + exp(tl.minimum(tl.maximum(x, LOWEST), 0.0))
    elif MAP == "relu":
        return tl.maximum(x, 0.0)
    elif MAP == "squared_relu":
        y = tl.maximum(x, 0.0)
        return y * y
    elif MAP == "softplus":
        x = tl.maximum(x, LOWEST)
        return tl.maximum(x, 0.0) + log1p(exp(tl.maximum(-tl.abs(x), LOWEST)))
    elif MAP == "exp":
        return exp(tl.minimum(tl.maximum(x, LOWEST), HIGHEST))
    else:
        tl.static_assert(MAP == "identity", "a map that the kernels do not know")
        return x


@device
def slope(x, MAP: tl.constexpr):
    """dφ/dx of a float32 tile."""
    if MAP == "elu":
        return exp(tl.minimum(tl.maximum(x, LOWEST), 0.0))
    elif MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    elif MAP == "squared_relu":
        return 2.0 * tl.maximum(x, 0.0)
    elif MAP == "softplus":
        return tl.where(x < LOWEST, 0.0, 1.0 / (1.0 + exp(-tl.maximum(x, LOWEST))))
    elif MAP == "exp":
        return tl.where((x >= LOWEST) & (x <= HIGHEST), exp(tl.minimum(tl.maximum(x, LOWEST), HIGHEST)), 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@device
def mapped(x, root, column, MAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """φ(root · x) in float32, 0 in the columns that only fill the block."""
    y = phi(x.to(tl.float32) * root, MAP)
    if WIDTH != BLOCK:
        y = tl.where(column[None, :] < WIDTH, y, 0.0)
    return y
