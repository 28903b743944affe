"""A short convolution along time, each channel by itself: what neighbours say to each other before attention.

    y_t = b + Σ_j w_j · x_{t-K+1+j}          j = 0 … K-1;   not causal: centred, x_{t-⌊K/2⌋+j}

Axes:  B batch   T time   W width   K taps
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from linattn._typing import Float, Tensor
from linattn.ops.checks import Lengths


class ShortConv(nn.Module):
    """y, state = conv(x, state). The state is the last K - 1 tokens of each row (B K-1 W)."""

    def __init__(self, width: int, taps: int, *, causal: bool = True):
        super().__init__()
        self.taps, self.causal = taps, causal
        self.conv = nn.Conv1d(width, width, taps, groups=width)

    def forward(
        self, x: Float[Tensor, "B T W"], state: Float[Tensor, "B K W"] | None = None, *, lengths: Lengths = None
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B K W"] | None]:
        """What stands behind `lengths` must be zeros; it reaches neither the state nor, where causal, the rest."""
        right = 0 if self.causal else self.taps - 1 - self.taps // 2
        before = x.new_zeros(len(x), self.taps - 1 - right, x.shape[2]) if state is None else state
        whole = F.pad(torch.cat([before, x], 1), (0, 0, 0, right))
        y = self.conv(whole.transpose(1, 2)).transpose(1, 2) if x.shape[1] else x
        return y, None if state is None else self._last(whole, x, lengths)

    def empty_state(self, batch: int) -> Float[Tensor, "B K W"]:
        weight = self.conv.weight
        return weight.new_zeros(batch, self.taps - 1, weight.shape[0])

    def _last(self, whole: Tensor, x: Tensor, lengths: Lengths) -> Tensor:
        """The tokens before each row's end."""
        if lengths is None:
            return whole[:, x.shape[1] :].clone()
        places = torch.as_tensor(lengths, device=x.device)[:, None] + torch.arange(self.taps - 1, device=x.device)
        return whole.gather(1, places[:, :, None].expand(-1, -1, whole.shape[2]))
