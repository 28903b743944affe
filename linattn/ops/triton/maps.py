"""Feature maps inside the kernels: φ, its derivative, and tiles that are mapped on the way from memory.

    elu          max(min(e, 1), 1 + x)     e = exp(x)      φ' = min(e, 1)
    relu         max(x, 0)                                 φ' = [x > 0]
    squared_relu max(x, 0)²                                φ' = 2 max(x, 0)
    softplus     log(1 + exp(x))                           φ' = sigmoid(x)
    exp          exp(min(x, 20))                           φ' = φ [x ≤ 20]

The same functions as linattn/features/elementwise.py, in float32. Exponents stop where float32's smallest normal number
is: below it the GPU returns 0, and a positive map must stay positive. The kernels issue as many instructions as the
memory leaves time for, most of them here, so the common map is written for few: elu is what it is because e ≥ 1 + x,
its factor comes with the exponent and with 1 + x, and its derivative costs nothing beside it. NaN stays NaN.

Axes:  [T, D] a tile of T tokens and D numbers of each
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import device

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-87.33)  # just above the log of the smallest normal float32, which the fast exp2 must not miss
HIGHEST = tl.constexpr(20.0)  # linattn.features.base.MAX_EXPONENT
NAN = tl.constexpr(tl.PropagateNan.ALL)


@device
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=NAN)


@device
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=NAN)


@device
def exp(x, root):
    """exp(root · x), never 0."""
    return tl.exp2(larger(x * (root * LOG2E), LOWEST * LOG2E))


@device
def log1p(x):
    """log(1 + x) for 0 ≤ x ≤ 1 that keeps the digits of a small x: what rounding did to 1 + x is divided out again."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))


@device
def phi(x, root, MAP: tl.constexpr):
    """φ(root · x) of a float32 tile."""
    if MAP == "elu":
        return larger(smaller(exp(x, root), 1.0), x * root + 1.0)
    elif MAP == "relu":
        return larger(x * root, 0.0)
    elif MAP == "squared_relu":
        y = larger(x * root, 0.0)
        return y * y
    elif MAP == "softplus":
        return larger(x * root, 0.0) + log1p(exp(-tl.abs(x), root))
    elif MAP == "exp":
        return tl.exp2(smaller(larger(x * (root * LOG2E), LOWEST * LOG2E), HIGHEST * LOG2E))
    else:
        tl.static_assert(MAP == "identity", "a map that the kernels do not know")
        return x * root


@device
def slope(x, root, MAP: tl.constexpr):
    """dφ(root · x)/dx of a float32 tile."""
    if MAP == "elu":
        return smaller(exp(x, root), 1.0) * root
    elif MAP == "relu":
        return tl.where(x > 0, root, 0.0)
    elif MAP == "squared_relu":
        return 2.0 * root * larger(x * root, 0.0)
    elif MAP == "softplus":
        return tl.where(x * root < LOWEST, 0.0, root / (1.0 + exp(-x, root)))
    elif MAP == "exp":
        y = x * root
        return tl.where((y < LOWEST) | (y > HIGHEST), 0.0, exp(x, root)) * root
    else:
        return tl.zeros(x.shape, tl.float32) + root


@device
def mapped(x, root, column, MAP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """φ(root · x) in float32, 0 in the columns that only fill the block."""
    y = phi(x.to(tl.float32), root, MAP)
    if WIDTH != BLOCK:
        y = tl.where(column[None, :] < WIDTH, y, 0.0)
    return y
