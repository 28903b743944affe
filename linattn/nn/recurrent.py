"""The rival without attention: a stack of LSTM layers under a Stack's call. Causal ones read in one direction and may
go on from a state; others read in both, and give 2 W numbers a frame.

Axes:  B batch   T time   W width   D depth
"""

from __future__ import annotations

from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.nn.nested import Nested
from linattn.state import value


@value
class RecurrentState(Nested):
    """What LSTM layers remember, (B, D, W) each."""

    hidden: Tensor
    cell: Tensor


class Recurrent(nn.Module):
    """y, state = recurrent(x, state)."""

    def __init__(self, width: int, depth: int, *, causal: bool, dropout: float = 0.0):
        super().__init__()
        self.causal, self.width, self.depth = causal, width, depth
        self.out_width = width if causal else 2 * width
        between = dropout if depth > 1 else 0.0  # a single layer has nothing between
        self.layers = nn.LSTM(width, width, depth, batch_first=True, bidirectional=not causal, dropout=between)

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        state: RecurrentState | None = None,
        *,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], RecurrentState | None]:
        if lengths is not None and state is not None:
            raise ValueError("rows of different lengths cannot go on from a state: give them one by one")
        if lengths is not None and not self.causal:
            return self._packed(x, lengths), None
        before = None if state is None else tuple(s.transpose(0, 1).contiguous() for s in (state.hidden, state.cell))
        out, (hidden, cell) = self.layers(x, before)
        if state is None:
            return out, None
        return out, RecurrentState(hidden.transpose(0, 1).clone(), cell.transpose(0, 1).clone())

    def empty_state(self, batch: int) -> RecurrentState:
        if not self.causal:
            raise ValueError("this LSTM reads both ways (causal=False) and cannot go on from a state")
        weight: Tensor = self.layers.weight_hh_l0  # type: ignore[assignment]
        zeros = weight.new_zeros(batch, self.depth, self.width)
        return RecurrentState(zeros, zeros.clone())

    def _packed(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The way back begins at each row's last token, so rows are packed; torch wants lengths of at least 1."""
        lengths = lengths.clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], True, total_length=x.shape[1])[0]
