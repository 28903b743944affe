"""Speech recognition: frames of features in, CTC over labels out.

    frames → subsampling → positions → blocks (or LSTM layers) → log p of the blank and the labels

A model of encoder layers reads whole utterances; one of causal layers transcribes as the audio arrives, and its memory
never grows.

Axes:  B batch   T frames   U frames after subsampling   F features of a frame   W width   P labels and the blank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.audio.front import FrontEnd
from linattn.features.base import check_count
from linattn.nn.attention import read_tokens
from linattn.nn.heads import CTCHead
from linattn.nn.heads.ctc import read_lengths
from linattn.nn.layer import Layer
from linattn.nn.nested import Nested
from linattn.nn.positions import make_position
from linattn.nn.recurrent import Recurrent, RecurrentState
from linattn.nn.subsample import FACTORS, Subsample
from linattn.nn.transformer import Stack, StackState
from linattn.ops.checks import Lengths
from linattn.state import value

BODIES = ("transformer", "lstm")


@dataclass(frozen=True)
class SpeechConfig:
    """A recogniser of `num_labels` labels (without the blank) from frames of `num_features` numbers.

    body          "transformer": `depth` layers; "lstm": as many LSTM layers of the layer's width, the rival
    attentions    of each layer by name where they differ (a hybrid): ("linear", "linear", "softmax"); (): the layer's
    subsample     frames that become one before the first layer: 1, 2, 4 or 8
    labels        what the labels are called, in turn; () where that is not known
    front         how sound becomes frames; None where that is not known
    """

    layer: Layer
    depth: int
    num_labels: int
    num_features: int = 40
    position: str = "sine_add"
    position_options: Mapping[str, Any] = field(default_factory=dict)
    body: str = "transformer"
    attentions: tuple[str, ...] = ()
    subsample: int = 1
    labels: tuple[str, ...] = ()
    front: FrontEnd | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "num_labels", "num_features"):
            check_count(name, getattr(self, name))
        for name, choices in (("body", BODIES), ("subsample", FACTORS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}")
        if self.attentions and (len(self.attentions) != self.depth or self.body == "lstm"):
            raise ValueError(
                f"attentions names the attention of each of {self.depth} transformer layers, got {self.attentions!r}"
            )
        if self.labels and len(self.labels) != self.num_labels:
            raise ValueError(f"{self.num_labels} labels have as many names, got {len(self.labels)}")
        if self.front is not None and self.front.bins != self.num_features:
            raise ValueError(f"the front end makes {self.front.bins} features a frame, not {self.num_features}")

    @property
    def layers(self) -> list[Layer]:
        """Each layer: all the same, or a hybrid."""
        names = self.attentions or (self.layer.attention,) * self.depth
        return [dataclasses.replace(self.layer, attention=name) for name in names]


@value
class SpeechState(Nested):
    """What a recogniser remembers: frames not yet subsampled, its layers' states, and the frames seen of each row."""

    pending: tuple[Tensor, ...]
    stack: StackState | RecurrentState
    seen: Tensor


AnyState = SpeechState | StackState


class SpeechModel(nn.Module):
    """log_probs, state = model(frames, state): streaming where the layers are causal."""

    def __init__(self, config: SpeechConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        layer = config.layer
        self.config = config
        self.position = make_position(config.position, layer.width, **config.position_options)
        enter_width = self.position.value_width
        self.subsample = Subsample(config.num_features, enter_width, config.subsample, causal=layer.causal)
        self.enter = nn.Linear(self.subsample.width, enter_width)
        self.stack: Any
        if config.body == "lstm":
            self.stack = Recurrent(layer.width, config.depth, causal=layer.causal, dropout=layer.dropout)
        else:
            self.stack = Stack(config.layers, generator=generator)
        self.head = CTCHead(layer.width if isinstance(self.stack, Stack) else self.stack.out_width, config.num_labels)

    def forward(
        self,
        frames: Float[Tensor, "B T F"],
        state: AnyState | None = None,
        *,
        lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B U P"], AnyState | None]:
        """Log-probabilities of the blank (0) and the labels, of ⌈T/subsample⌉ frames; in a stream, of those whole."""
        features, state = self.features(frames, state, lengths=lengths, donate=donate)
        return self.head(features), state

    def features(
        self,
        frames: Float[Tensor, "B T F"],
        state: AnyState | None = None,
        *,
        lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B U W"], AnyState | None]:
        """What the head reads."""
        self._check_state(state, lengths)
        frames = read_tokens(frames, lengths, self.config.num_features, "frames").to(self.enter.weight.dtype)
        frames_of = None if lengths is None else torch.as_tensor(lengths, device=frames.device)
        before = state.pending if isinstance(state, SpeechState) else None if state is None else ()
        x, pending = self.subsample(frames, before, frames_of)
        tokens_of = None if frames_of is None else self.subsample.lengths(frames_of)
        stack: Any = state.stack if isinstance(state, SpeechState) else state
        if x.shape[1]:
            x, stack = self._through(self.enter(x), stack, state, tokens_of, donate)
        else:
            x = x.new_zeros(len(x), 0, self.head.width)
        if not isinstance(state, SpeechState):
            return x, stack
        assert pending is not None and stack is not None
        seen = state.seen + (frames.shape[1] if frames_of is None else frames_of)
        return x, SpeechState(pending, stack, seen)

    def nats(
        self,
        frames: Float[Tensor, "B T F"],
        labels: Shaped[Tensor, "B S"],
        lengths: Lengths = None,
        label_lengths: Lengths = None,
    ) -> Float[Tensor, " B"]:
        """-log p(labels) of each utterance (see CTCHead.loss for utterances too short for their labels)."""
        features, _ = self.features(frames, lengths=lengths)
        return self.head.loss(features, labels, self.out_lengths(frames, lengths), label_lengths)

    def out_lengths(self, frames: Float[Tensor, "B T F"], lengths: Lengths = None) -> Int[Tensor, " B"]:
        """How many log-probabilities of each row are real."""
        return self.subsample.lengths(read_lengths("lengths", lengths, frames))

    def text(self, labels: Sequence[int]) -> str:
        """Labels as text: characters side by side, anything longer with spaces between."""
        names = self.config.labels or tuple(str(i) for i in range(1, 1 + self.config.num_labels))
        return self.separator.join(names[label - 1] for label in labels)

    @property
    def separator(self) -> str:
        return "" if self.config.labels and all(len(name) == 1 for name in self.config.labels) else " "

    def empty_state(self, batch: int, *, capacity: int = 64, static: bool = False) -> AnyState:
        """The state before any frame: the stack's own where there is nothing else to remember."""
        if isinstance(self.stack, Stack):
            stack: Any = self.stack.empty_state(batch, capacity=capacity, static=static)
            if self.config.subsample == 1:
                return stack
        else:
            stack = self.stack.empty_state(batch)
        pending = self.subsample.empty_state(batch) if self.config.subsample > 1 else ()
        return SpeechState(pending, stack, torch.zeros(batch, dtype=torch.int64, device=self.device))

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.head.linear.weight.device

    def _through(
        self, x: Tensor, before: Any, state: AnyState | None, lengths: Tensor | None, donate: bool
    ) -> tuple[Tensor, Any]:
        places = torch.arange(x.shape[1], device=x.device)
        if state is not None:
            places = self.subsample.lengths(state.seen)[:, None] + places
        x = self.position(x, places)
        if isinstance(self.stack, Recurrent):
            return self.stack(x, before, lengths=lengths)
        return self.stack(x, before, lengths=lengths, donate=donate)

    def _check_state(self, state: AnyState | None, lengths: Lengths) -> None:
        if state is None:
            return
        if not self.config.layer.causal:
            raise ValueError("this model reads whole utterances (causal=False) and cannot go on from a state")
        if lengths is not None and self.config.subsample > 1:
            raise ValueError(
                f"rows of different lengths cannot go on from a state where {self.config.subsample} frames become one: "
                f"give them one by one, and join the states with cat where they are in step"
            )
