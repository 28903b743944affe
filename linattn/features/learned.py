"""Learned maps: a linear layer before the map, one for all heads or one for each.

    h = x W_n + b_n      for head n,       φ(x) = f(h)

Axes:  H heads   N sets of weights   G heads that share one   D key width   W width of h   C features
       *S, *T whatever stands before
"""

import math
from typing import Literal

import torch
from torch import nn

from linattn._typing import Float, Tensor
from linattn.features.base import (
    LARGEST,
    FeatureMap,
    bounded_exp,
    check_count,
    check_width,
    elu_plus_one,
    widen,
    without_autocast,
)
from linattn.features.simplex import positive_softmax


class LearnedMap(FeatureMap):
    """The linear layer: `weight` (N, D, W), at first the identity, and `bias` (N, W), at first zero.

    With N = 1 it serves inputs (*S, D) of any heads. With N > 1 inputs are (*S, H, D) and H is a multiple of N:
    head h uses the weights h // (H / N), so one map made for the key heads also serves grouped query heads.
    Inputs beyond ±1e15 count as ±1e15.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        width: int | None = None,
        num_heads: int = 1,
        *,
        bias: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = check_count("dim", dim)
        self.width = self.dim if width is None else check_count("width", width)
        self.num_heads = check_count("num_heads", num_heads)
        self.weight = nn.Parameter(torch.empty(self.num_heads, self.dim, self.width))
        self.register_parameter("bias", nn.Parameter(torch.empty(self.num_heads, self.width)) if bias else None)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The weights of an untrained map, and no bias; the generator is for a map that starts at random."""
        self.weight.copy_(self.initial_weight(generator))
        if self.bias is not None:
            self.bias.zero_()

    def initial_weight(self, generator: torch.Generator | None) -> Float[Tensor, "*N D W"]:
        """The identity; where W ≠ D, ones on the diagonal."""
        return torch.eye(self.dim, self.width)

    def num_features(self, dim: int) -> int:
        check_width(self, self.dim, dim)
        return self.width

    def project(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S W"]:
        """h, in the dtype that `forward` returns."""
        check_width(self, self.dim, x.shape[-1])
        x = widen(x).clamp(-LARGEST, LARGEST)
        weight, shared = self.weight.to(x.dtype), self.num_heads == 1
        with without_autocast(x):
            h = x @ weight[0] if shared else torch.einsum("...ngd,ndw->...ngw", self.split_heads(x), weight)
        if self.bias is not None:
            bias = self.bias.to(x.dtype)
            h = h + (bias[0] if shared else bias.unsqueeze(1))
        return h.reshape(*x.shape[:-1], self.width)

    def split_heads(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*T N G D"]:
        """The heads that share weights beside each other: (*S, H, D) to (*S, N, G, D) with H = N G."""
        if x.ndim < 2 or x.shape[-2] % self.num_heads:
            raise ValueError(
                f"this {type(self).__name__} has weights for {self.num_heads} heads: expected (..., H, {self.dim}) "
                f"with H a multiple of {self.num_heads}, got {tuple(x.shape)}; num_heads=1 serves any number of heads"
            )
        return x.unflatten(-2, (self.num_heads, -1))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, width={self.width}, num_heads={self.num_heads}, bias={self.bias is not None}"


class LearnedElu(LearnedMap):
    """φ(x) = elu(h) + 1: the library's default map after a linear layer, equal to `Elu` before training.

    Positive features; scale 1, as for `Elu`, since the layer learns any other. C = W, D unless told otherwise.
    """

    name = "learned_elu"
    kind = "positive_features"

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        return elu_plus_one(self.project(x))


class T2R(LearnedMap):
    """φ(x) = relu(h), weights uniform in ±√(6 / D) before training (He et al. 2015, for a ReLU).

    Nonnegative features, which can all be zero; scale 1, since the layer learns any other. C = W, D unless told
    otherwise. "Transformer to RNN": Kasai et al. 2021 (arXiv 2103.13076).
    """

    name = "t2r"
    kind = "nonnegative_kernel"

    def initial_weight(self, generator: torch.Generator | None) -> Float[Tensor, "*N D W"]:
        device = torch.device("cpu") if generator is None else generator.device
        uniform = torch.rand(self.weight.shape, generator=generator, device=device)
        return (2 * uniform - 1) * math.sqrt(6 / self.dim)

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        return self.project(x).relu()


class Hedgehog(LearnedMap):
    """φ(x) = [softmax(h), softmax(-h)], or with form="exp" the [exp(h), exp(-h)] of the paper's equations.

    Positive features: exponents are held at or below 20, results at or above the smallest normal number, with
    gradient 0 outside. Scale D^-½, as in the softmax attention it is trained to mimic. C = 2W, W = D unless told
    otherwise. Zhang, Bhatia, Kumbong, Ré 2024 (arXiv 2402.04347), whose released code takes the two softmaxes over
    the features, as the default here does.
    """

    name = "hedgehog"
    kind = "positive_features"

    def __init__(
        self,
        dim: int,
        width: int | None = None,
        num_heads: int = 1,
        *,
        bias: bool = True,
        form: Literal["softmax", "exp"] = "softmax",
        generator: torch.Generator | None = None,
    ) -> None:
        if form not in ("softmax", "exp"):
            raise ValueError(f"form must be 'softmax' or 'exp', got {form!r}")
        super().__init__(dim, width, num_heads, bias=bias, generator=generator)
        self.form = form

    def num_features(self, dim: int) -> int:
        return 2 * super().num_features(dim)

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        h = self.project(x)
        f = positive_softmax if self.form == "softmax" else bounded_exp
        return torch.cat([f(h), f(-h)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form!r}"
