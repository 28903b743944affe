"""What is computed, apart from the tensors: the options that every implementation of the operator reads.

Axes:  B batch   P sequences packed end to end
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from linattn._typing import Bool, Float, Int, Tensor
from linattn.features import ElementwiseMap, FeatureMap


@dataclass(frozen=True)
class Form:
    """One linear attention: its feature map, and how weights are summed and normalised."""

    feature_map: FeatureMap
    scale: float = 1.0
    causal: bool = True
    normalize: bool = True
    eps: float | None = None

    def scaled(self, x: Float[Tensor, "*axes D"]) -> Float[Tensor, "*axes D"]:
        """x in the dtype of the sums, times √scale: queries and keys together get `scale`."""
        x = x.to(sum_dtype(x.dtype))
        return x if self.scale == 1.0 else x * math.sqrt(self.scale)

    def features(self, x: Float[Tensor, "*axes D"]) -> Float[Tensor, "*axes C"]:
        """φ(√scale · x) in fp32, or fp64 for fp64."""
        return self.feature_map(self.scaled(x))

    def derivative(self, x: Tensor, phi: Tensor) -> Tensor:
        """dφ/dx of an elementwise map, from its scaled input and its output."""
        assert isinstance(self.feature_map, ElementwiseMap), "only elementwise maps are fused"
        return self.feature_map.derivative(x, phi)

    def divisor(self, den: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """What the weighted sum is divided by (equation 4): infinite where nothing was seen, so that 0 / it is 0."""
        if self.eps is not None:
            den = torch.where(den < 0, -1.0, 1.0) * den.abs().clamp_min(self.eps)
        return den.masked_fill(den.logical_not(), torch.inf)  # not `== 0`: half the time, which a short call sees


@dataclass(frozen=True)
class Batch:
    """Which tokens are real, and where sequences begin: at most one of lengths and cu_seqlens; None means all."""

    lengths: Int[Tensor, " B"] | None = None
    q_lengths: Int[Tensor, " B"] | None = None
    cu_seqlens: Int[Tensor, " P1"] | None = None
    cu_seqlens_q: Int[Tensor, " P1"] | None = None

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def num_rows(self, k: Tensor) -> int:
        """How many states there are: one for each row, or for each packed sequence."""
        return k.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums run in fp32, and in fp64 for fp64: a bf16 sum of ones stalls at 256."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def live_tokens(lengths: Tensor | None, time: int) -> Bool[Tensor, "B T"] | None:
    """Which tokens are real, from each row's length; None where all are."""
    if lengths is None:
        return None
    return torch.arange(time, device=lengths.device) < lengths[:, None]
