"""Speech recognition: frames of features in, CTC over labels out.

A model of encoder layers reads whole utterances; one of causal layers transcribes as the audio arrives, and its memory
never grows.

Axes:  B batch   T frames   F features of a frame   W width   P labels and the blank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linattn._typing import Float, Shaped, Tensor
from linattn.features.base import check_count
from linattn.nn.attention import read_tokens
from linattn.nn.heads import CTCHead
from linattn.nn.layer import Layer
from linattn.nn.positions import make_position
from linattn.nn.transformer import Stack, StackState
from linattn.ops.checks import Lengths


@dataclass(frozen=True)
class SpeechConfig:
    """A recogniser of `num_labels` labels (without the blank) from frames of `num_features` numbers."""

    layer: Layer
    depth: int
    num_labels: int
    num_features: int = 40
    position: str = "sine_add"
    position_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("depth", "num_labels", "num_features"):
            check_count(name, getattr(self, name))


class SpeechModel(nn.Module):
    """log_probs, state = model(frames, state): streaming where the layers are causal."""

    def __init__(self, config: SpeechConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        width = config.layer.width
        self.config = config
        self.position = make_position(config.position, width, **config.position_options)
        self.enter = nn.Linear(config.num_features, self.position.value_width)
        self.stack = Stack(config.layer, config.depth, generator=generator)
        self.head = CTCHead(width, config.num_labels)

    def forward(
        self,
        frames: Float[Tensor, "B T F"],
        state: StackState | None = None,
        *,
        lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T P"], StackState | None]:
        """Log-probabilities of the blank (0) and the labels at each frame."""
        features, state = self.features(frames, state, lengths=lengths, donate=donate)
        return self.head(features), state

    def features(
        self,
        frames: Float[Tensor, "B T F"],
        state: StackState | None = None,
        *,
        lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T W"], StackState | None]:
        if state is not None and not self.config.layer.causal:
            raise ValueError("this model reads whole utterances (causal=False) and cannot go on from a state")
        frames = read_tokens(frames, lengths, self.config.num_features, "frames")
        places = torch.arange(frames.shape[1], device=frames.device)
        if state is not None:
            places = state.seen[:, None] + places
        return self.stack(self.position(self.enter(frames), places), state, lengths=lengths, donate=donate)

    def nats(
        self,
        frames: Float[Tensor, "B T F"],
        labels: Shaped[Tensor, "B S"],
        lengths: Lengths = None,
        label_lengths: Lengths = None,
    ) -> Float[Tensor, " B"]:
        """-log p(labels) of each utterance (see CTCHead.loss for utterances too short for their labels)."""
        features, _ = self.features(frames, lengths=lengths)
        return self.head.loss(features, labels, lengths, label_lengths)

    def empty_state(self, batch: int, *, capacity: int = 64, static: bool = False) -> StackState:
        return self.stack.empty_state(batch, capacity=capacity, static=static)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())
