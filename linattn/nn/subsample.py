"""Fewer, richer frames: convolutions of three frames and stride two, as many as halvings. Whole or as frames arrive.

    y_u = relu(A x_{2u-2} + B x_{2u-1} + C x_{2u} + b)        causal: output u is there as soon as frame 2u is
    y_u = relu(A x_{2u-1} + B x_{2u}   + C x_{2u+1} + b)      otherwise

⌈T/2⌉ frames are made of T; before the first frame, and after the last, there are zeros.

Axes:  B batch   T frames   F features of a frame   W width
"""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from linattn._typing import Float, Int, Tensor

FACTORS = (1, 2, 4, 8)
TAPS, STRIDE = 3, 2
Pending = tuple[Tensor, ...]


class Subsample(nn.Module):
    """frames (B T F) to (B ⌈T/factor⌉ W); with factor 1 as they are."""

    def __init__(self, num_features: int, width: int, factor: int, *, causal: bool = True):
        super().__init__()
        if factor not in FACTORS:
            raise ValueError(f"subsample must be one of {', '.join(map(str, FACTORS))}, got {factor!r}")
        self.factor, self.causal = factor, causal
        halvings = FACTORS.index(factor)
        widths = [num_features, *[width] * halvings]
        self.stages = nn.ModuleList(nn.Conv1d(a, b, TAPS, STRIDE) for a, b in itertools.pairwise(widths))
        self.width = widths[-1]

    def forward(
        self, x: Float[Tensor, "B T F"], state: Pending | None = None, lengths: Int[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "B U W"], Pending | None]:
        """`state`: for each stage the frames (B, 1 or 2, …) that its next output still needs; see `empty_state`."""
        left = []
        for i, stage in enumerate(self.stages):
            x = torch.cat([x[:, :0].new_zeros(len(x), TAPS - 1, x.shape[2]), x], 1) if self._begins(state) else x
            x = x if state is None else torch.cat([state[i], x], 1)
            x = x if self.causal else F.pad(x, (0, 0, 1, 1))
            count = max(0, (x.shape[1] - TAPS) // STRIDE + 1)
            left.append(x[:, STRIDE * count :].clone())
            x = self._convolved(stage, x, count)
            if lengths is not None:  # what stands behind a row's last frame is no zero any more
                lengths = -(-lengths // STRIDE)
                real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
                x = x.where(real[..., None], 0)
        return x, None if state is None else tuple(left)

    def empty_state(self, batch: int) -> Pending:
        """The zeros before the first frame."""
        if not self.causal:
            raise ValueError("this subsampling looks one frame ahead (causal=False) and cannot go on from a state")
        weights = [stage.weight for stage in self.stages]
        return tuple(w.new_zeros(batch, TAPS - 1, w.shape[1]) for w in weights)  # type: ignore[misc, operator, union-attr]

    def lengths(self, lengths: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """Frames that are made of so many."""
        return -(-lengths // self.factor)

    def _begins(self, state: Pending | None) -> bool:
        return state is None and self.causal

    @staticmethod
    def _convolved(stage: nn.Module, x: Float[Tensor, "B T F"], count: int) -> Float[Tensor, "B U W"]:
        if not count:
            return x.new_zeros(len(x), 0, stage.out_channels)  # type: ignore[call-overload]
        return stage(x[:, : STRIDE * count + 1].transpose(1, 2)).relu().transpose(1, 2)

    def extra_repr(self) -> str:
        return f"factor={self.factor}, causal={self.causal}"
