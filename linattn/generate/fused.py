"""The step for GPUs: embedding, layers and drawing in few launches and in place, so that a graph takes it whole.

`FusedStep` is a `CachedStep` for models whose stack the kernels know (linattn/nn/fused.py). Its state is the model's,
at fixed places; but the last few tokens of each row lie beside it, until `fold` lets the state say all.

Axes:  N rows   W width of a token   L values of a complete row
"""

from __future__ import annotations

import math

import torch

from linattn._typing import Float, Int, Tensor
from linattn.generate.snapshot import Sampling
from linattn.generate.steps import CachedStep, next_values
from linattn.models import SequenceModel
from linattn.nn.fused import FusedStack
from linattn.nn.fused import why_not as stack_why_not
from linattn.nn.heads import MixtureOfLogistics
from linattn.nn.heads.logistics import FARTHEST, MAX_LOG_SCALE, MIN_LOG_SCALE
from linattn.nn.transformer import StackState
from linattn.state import State, Value

TABLE_NUMBERS = 2**28  # of the places of one row: a gigabyte in float32
DRAWN = 64  # rows that a program draws for


def step_for(model: SequenceModel, sampling: Sampling, state: Value, length: int | None) -> CachedStep:
    """The fused step where there is one for this model and state, else the ordinary one."""
    fits = why_not(model, state, length) is None
    return FusedStep(model, sampling, length) if fits and length is not None else CachedStep(model, sampling)


def why_not(model: SequenceModel, state: Value, length: int | None) -> str | None:
    """What keeps the step of this model from being fused; None where nothing does."""
    if length is None or length * model.stack.norm.weight.shape[0] > TABLE_NUMBERS:
        return "positions are a table, so the rows need a length, and not one of millions"
    if not isinstance(state, StackState) or not all(isinstance(b.own.memory, State) for b in state.blocks):
        return "the state is not that of linear attention"
    return stack_why_not(model.stack)


class FusedStep(CachedStep):
    """Its first call takes the state over; the one it returns is the same at each call, and changes with each."""

    def __init__(self, model: SequenceModel, sampling: Sampling, length: int, *, narrow: bool = False):
        """length: values of a complete row. narrow: see `Memory`; what is drawn may then differ in rare places."""
        super().__init__(model, sampling)
        self._narrow = narrow
        self._table = table_of(model, length)
        self._stack: FusedStack | None = None

    def __call__(
        self,
        state: Value,
        pending: Int[Tensor, " N"],
        uniforms: Float[Tensor, " N"],
        live: Int[Tensor, " N"] | None = None,
        donate: bool = False,
    ) -> tuple[Value, Int[Tensor, " N"]]:
        assert isinstance(state, StackState)
        if self._stack is None:
            self._stack = FusedStack(self.model.stack, state, narrow=self._narrow)
        stack = self._stack
        places = stack.seen.clone() if stack.layer.rotary == "before" else stack.seen
        features = stack(self._embedded(pending, live), places, live)
        params = self.model.head(features)
        return stack.state, self._drawn(params, pending, uniforms, live)

    def fold(self) -> None:
        if self._stack is not None:
            self._stack.fold()

    def _embedded(self, pending: Tensor, live: Tensor | None) -> Float[Tensor, "N W"]:
        from linattn.ops.triton.block import embed
        from linattn.ops.triton.launch import block, launch

        stack, weight, (places, W) = self._stack, self.model.embedding.weight, self._table.shape
        assert stack is not None
        memory, rows = stack.memory, len(pending)
        x = torch.empty(rows, W, dtype=torch.float32 if stack.thin else weight.dtype, device=weight.device)
        masks = (stack.seen, memory.counts, memory.counts if live is None else live)
        constants = (W, weight.shape[1], block(W), places, memory.fold_after, live is not None)
        launch(embed, rows, (pending, weight.detach(), self._table, *masks, x), constants, 1)
        return x

    def _drawn(self, params: Tensor, pending: Tensor, uniforms: Tensor, live: Tensor | None) -> Int[Tensor, " N"]:
        head, sampling = self.model.head, self.sampling
        plain = sampling.temperature == 1 and sampling.top_k is None and sampling.top_p is None
        if not (plain and isinstance(head, MixtureOfLogistics)):
            return next_values(self.model, sampling, params, pending, uniforms, live)
        from linattn.ops.triton.draw import draw_logistics
        from linattn.ops.triton.launch import block, launch

        values = torch.empty_like(pending)
        arguments = (params, uniforms, pending, pending if live is None else live, values, len(pending))
        V = head.num_values
        constants = (head.mixtures, block(head.mixtures), V, MIN_LOG_SCALE, MAX_LOG_SCALE, FARTHEST)
        constants += (math.log((V - 1) / 2), live is not None, DRAWN)
        launch(draw_logistics, -(-len(pending) // DRAWN), arguments, constants, 4)
        return values


@torch.no_grad()
def table_of(model: SequenceModel, length: int) -> Float[Tensor, "L W"]:
    """What a position adds to [embedding, zeros], for the places that are read: all positions only add."""
    weight = model.embedding.weight
    zeros = weight.new_zeros(1, max(1, length - 1), weight.shape[1])
    return model.position(zeros, torch.arange(zeros.shape[1], device=weight.device))[0].contiguous()
