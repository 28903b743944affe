"""What makes one value out of those before it: a model with its state, or without one, over the whole prefix again.

    state, values = step(state, pending, uniforms)          pending: the last value of each row, not yet read

A step takes a state and returns one. It never writes to the one it takes (unless told that it may), so a step that is
broken off half-way has changed nothing.

Axes:  N rows   T values of a prefix   P parameters of a distribution
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.generate.snapshot import Sampling
from linattn.models import SequenceModel
from linattn.nn.heads.sampling import pick, reshaped
from linattn.state import Value, value

PIECE = 2048  # values of a prompt that are read at once: a long prompt must not need memory for all of it


@value
class Prefix(Value):
    """The state of a model that keeps none: all values so far (N, T), and how many each row has."""

    values: Int[Tensor, "N T"]
    lengths: Int[Tensor, " N"]


# step(state, pending, uniforms, live): `live` is 1 for rows that go on and 0 for those that have ended, which nothing
# moves; None: all go on
Step = Callable[..., tuple[Value, Tensor]]


class CachedStep:
    """One more value from the model's own state: sums, or a cache."""

    def __init__(self, model: SequenceModel, sampling: Sampling):
        self.model, self.sampling = model, sampling

    def __call__(
        self,
        state: Value,
        pending: Int[Tensor, " N"],
        uniforms: Float[Tensor, " N"],
        live: Int[Tensor, " N"] | None = None,
        donate: bool = False,
    ) -> tuple[Value, Int[Tensor, " N"]]:
        # Not donated on the CPU: new sums are computed in new memory anyway, and copying them back would cost time.
        params, after = self.model(pending[:, None], state, lengths=live, donate=donate)  # type: ignore[arg-type]
        assert after is not None
        return after, next_values(self.model, self.sampling, params[:, 0], pending, uniforms, live)

    def fold(self) -> None:
        """Let the state that was returned say all that was seen. Here it always does."""


class UncachedStep:
    """One more value from all values so far: what generation costs without a cache."""

    def __init__(self, model: SequenceModel, sampling: Sampling):
        self.model, self.sampling = model, sampling

    def __call__(
        self,
        state: Value,
        pending: Int[Tensor, " N"],
        uniforms: Float[Tensor, " N"],
        live: Int[Tensor, " N"] | None = None,
    ) -> tuple[Prefix, Int[Tensor, " N"]]:
        assert isinstance(state, Prefix)
        lengths = state.lengths + (1 if live is None else live)
        longest = int(lengths.max())
        values = F.pad(state.values, (0, longest - state.values.shape[1]))
        place = state.lengths.clamp_max(longest - 1).unsqueeze(1)
        entering = pending if live is None else torch.where(live > 0, pending, values.gather(1, place).squeeze(1))
        values = values.scatter(1, place, entering.unsqueeze(1))
        even = bool((lengths == longest).all())
        features, _ = self.model.features(values, lengths=None if even else lengths)
        last = (lengths - 1).clamp_min(0).view(-1, 1, 1)
        params = self.model.head(torch.take_along_dim(features, last, 1).squeeze(1))
        return Prefix(values, lengths), next_values(self.model, self.sampling, params, pending, uniforms, live)


def read(model: SequenceModel, state: Value, values: Int[Tensor, "N T"], lengths: Int[Tensor, " N"] | None) -> Value:
    """The state after these values too, of each row the first `lengths`: in parallel, a piece at a time."""
    for start in range(0, values.shape[1], PIECE):
        piece = values[:, start : start + PIECE]
        counts = None if lengths is None else (lengths - start).clamp(0, piece.shape[1])
        _, after = model.features(piece, state, lengths=counts)  # type: ignore[arg-type]
        assert after is not None
        state = after
    return state


def first_values(model: SequenceModel, sampling: Sampling, uniforms: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Values to begin with, from the model's counts of first values."""
    if sampling.temperature == 1 and sampling.top_k is None and sampling.top_p is None:
        return model.first.sample(len(uniforms), uniforms=uniforms)
    p = model.first.probabilities.expand(len(uniforms), -1)
    if sampling.temperature == 0:
        return p.argmax(-1)
    return pick(reshaped(p.log(), sampling.temperature, sampling.top_k, sampling.top_p), uniforms)[0]


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model as in `eval` mode: generation draws values, it does not drop features."""
    modules = [module for module in model.modules() if module.training] if model.training else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def next_values(
    model: SequenceModel,
    sampling: Sampling,
    params: Float[Tensor, "N P"],
    pending: Int[Tensor, " N"],
    uniforms: Float[Tensor, " N"],
    live: Int[Tensor, " N"] | None,
) -> Int[Tensor, " N"]:
    """Values drawn from the parameters; rows that have ended keep the one they have."""
    values = model.head.sample(
        params, uniforms=uniforms, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    return values if live is None else torch.where(live > 0, values, pending)
