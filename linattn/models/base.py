"""What image and language models share: values in, the distribution of the next value out.

    x_1 … x_T  →  parameters of p(x_2), …, p(x_{T+1})          params, state = model(values, state)

Axes:  B batch   T time   W width   P parameters of a distribution   V values
"""

from __future__ import annotations

import torch
from torch import nn

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.nn.checks import check_range
from linattn.nn.heads import FirstValue
from linattn.nn.heads.base import Head
from linattn.nn.positions import Position
from linattn.nn.transformer import Stack, StackState
from linattn.ops.checks import Lengths


class SequenceModel(nn.Module):
    """Embed, place, a causal stack, a head. Subclasses build the parts from their config."""

    def __init__(self, config, embedding: nn.Embedding, position: Position, stack: Stack, head: Head):
        super().__init__()
        self.config = config
        self.embedding, self.position, self.stack, self.head = embedding, position, stack, head
        self.first = FirstValue(embedding.num_embeddings)

    def forward(
        self,
        values: Shaped[Tensor, "B T"],
        state: StackState | None = None,
        *,
        lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T P"], StackState | None]:
        """The parameters of each next value's distribution (for `head`), and the state after the last value."""
        features, state = self.features(values, state, lengths=lengths, donate=donate)
        return self.head(features), state

    def features(
        self,
        values: Shaped[Tensor, "B T"],
        state: StackState | None = None,
        *,
        lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T W"], StackState | None]:
        """What the head reads."""
        self._check_values(values)
        places = torch.arange(values.shape[1], device=values.device)
        if state is not None:
            places = state.seen[:, None] + places
        x = self.position(self.embedding(values.long()), places)
        return self.stack(x, state, lengths=lengths, donate=donate)

    def nats(
        self, values: Shaped[Tensor, "B T"], state: StackState | None = None
    ) -> tuple[Float[Tensor, "B N"], StackState | None]:
        """-log p of values 2 … T, each given those before it: what is trained on."""
        params, state = self(values[:, :-1], state)
        return -self.head.log_prob(params, values[:, 1:]), state

    def empty_state(self, batch: int, *, capacity: int = 64, static: bool = False) -> StackState:
        return self.stack.empty_state(batch, capacity=capacity, static=static)

    def sequences(self, data: Tensor) -> Int[Tensor, "B T"]:
        """Examples as a dataset holds them, as sequences of values."""
        return data.flatten(1).long()

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def _check_values(self, values: Tensor) -> None:
        if values.dim() != 2 or values.dtype.is_floating_point or values.dtype == torch.bool:
            raise ValueError(
                f"{type(self).__name__} reads integers (batch, time), got {values.dtype} {tuple(values.shape)}"
            )
        most = self.embedding.num_embeddings - 1
        if values.dtype != torch.uint8 or most < 255:
            check_range("values", values, 0, most, "the model's config says how many there are")
