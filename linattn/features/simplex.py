"""Maps that mix the D numbers of a row, without parameters: `softmax` and `dpfp`.

Axes:  D key width   C features   *S whatever stands before
"""

import torch

from linattn._typing import Float, Tensor
from linattn.features.base import FeatureMap, check_count, widen


def positive_softmax(x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
    """softmax over the last axis, never below the smallest normal number (there the gradient is 0)."""
    return x.softmax(-1).clamp_min(torch.finfo(x.dtype).tiny)


class Softmax(FeatureMap):
    """φ(x) = softmax(x) over the D features of a row: each row shares one unit of weight among its features.

    Positive features; scale 1, since a coordinate does not grow with D. The query map of Efficient Attention
    (Shen et al. 2018, arXiv 1812.01243), used here for keys too: their softmax over positions would see the future.
    """

    name = "softmax"
    kind = "positive_features"

    def num_features(self, dim: int) -> int:
        return dim

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S D"]:
        return positive_softmax(widen(x))


class DPFP(FeatureMap):
    """φ(x)_{ij} = r_j r_{j+i} with r = relu([x, -x]), i = 1 … nu and j + i modulo 2D: C = 2 D nu sparse products.

    Nonnegative features, which can all be zero (as when one coordinate alone is not); scale 1, since any scale
    cancels in the normaliser. "Deterministic parameter-free projection": Schlag, Irie, Schmidhuber 2021
    (arXiv 2102.11174).
    """

    name = "dpfp"
    kind = "nonnegative_kernel"

    def __init__(self, nu: int = 1) -> None:
        super().__init__()
        self.nu = check_count("nu", nu)

    def num_features(self, dim: int) -> int:
        # a shift by 2D is no shift, and repeats the squares
        if self.nu >= 2 * dim:
            raise ValueError(f"nu must be below twice the width: got nu={self.nu} for width {dim}")
        return 2 * dim * self.nu

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        self.num_features(x.shape[-1])
        x = widen(x)
        r = torch.cat([x, -x], -1).relu()
        width = r.shape[-1]
        r_r = torch.cat([r, r[..., : self.nu]], -1)
        return torch.cat([r * r_r[..., i : i + width] for i in range(1, self.nu + 1)], -1)

    def extra_repr(self) -> str:
        return f"nu={self.nu}"
