"""Maps on each number alone: φ(x)_c = f(x_c), so C = D. The kernels fuse these; here is their definition.

Scale 1 for all of them: f sees one coordinate, whose size does not grow with D.

Axes:  D key width   *S whatever stands before
"""

import torch
from torch.nn import functional as F

from linattn._typing import Float, Tensor
from linattn.features.base import MAX_EXPONENT, ElementwiseMap, bounded_exp, elu_plus_one, lowest_exponent, widen


class Elu(ElementwiseMap):
    """φ(x) = x + 1 for x > 0, exp(x) otherwise: the library's default.

    Positive features, scale 1. Katharopoulos, Vyas, Pappas, Fleuret 2020 (arXiv 2006.16236), written so that it
    keeps its digits for negative x, where `F.elu(x) + 1` cancels. Not below the smallest normal number.
    """

    name = "elu"
    kind = "positive_features"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        return elu_plus_one(widen(x))

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return y.clamp_max(1.0)


class Relu(ElementwiseMap):
    """φ(x) = max(x, 0).

    Nonnegative features, which can all be zero; scale 1 (any scale cancels in the normaliser). One of the
    generalised kernels of Choromanski et al. 2021 (arXiv 2009.14794).
    """

    name = "relu"
    kind = "nonnegative_kernel"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        return widen(x).relu()

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return y.sign()


class SquaredRelu(ElementwiseMap):
    """φ(x) = max(x, 0)².

    Nonnegative features, which can all be zero; scale 1 (any scale cancels in the normaliser). The activation of
    Primer (So et al. 2021, arXiv 2109.08668) as a feature map.
    """

    name = "squared_relu"
    kind = "nonnegative_kernel"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        return widen(x).relu().square()

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return x.relu() * 2.0


class Softplus(ElementwiseMap):
    """φ(x) = log(1 + exp(x)), which tends to exp(x) for negative x and to x for positive x.

    Positive features, scale 1. Not below the smallest normal number (there the gradient is 0).
    """

    name = "softplus"
    kind = "positive_features"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        x = widen(x)
        # from x = 40 on softplus is x to the last digit of float64; torch's own threshold of 20 is float32's
        return F.softplus(x.clamp_min(lowest_exponent(x.dtype)), threshold=40.0)

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return x.sigmoid()


class Exp(ElementwiseMap):
    """φ(x) = exp(min(x, 20)), kernel Σ_c exp(q_c + k_c).

    Positive features, scale 1. This is not the exp(q·k) of softmax attention: see `Favor` and `Hedgehog`. The
    gradient is 0 above 20 and below the smallest normal number.
    """

    name = "exp"
    kind = "positive_features"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        return bounded_exp(widen(x))

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return y * (x <= MAX_EXPONENT)


class Identity(ElementwiseMap):
    """φ(x) = x, kernel q·k: linear attention without a map.

    Signed, scale 1: normalising by it needs an eps.
    """

    name = "identity"
    kind = "signed"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        return widen(x)

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        return torch.ones_like(y)
