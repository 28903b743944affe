"""A step whose tensors stay where they are, so that a CUDA graph of it, sampling included, can be replayed.

What a step reads is copied into fixed buffers; its state is donated, and what still moved is copied back to its place.
Caches must be static ones. On a GPU the step is then one launch instead of some hundreds.

Axes:  N rows
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from linattn._typing import Float, Int, Tensor
from linattn.generate.steps import CachedStep
from linattn.ops.softmax import KVCache
from linattn.state import Value


class StaticStep:
    """A `CachedStep` in place. Its first call is an ordinary one, which settles the memory; the second is captured.

    It takes over the state of the first call. The one it returns is the same at each call, and changes with each: clone
    it to keep it.
    """

    def __init__(self, step: CachedStep, *, capture: bool, ragged: bool):
        """ragged: rows may end at different times, so `live` is read at every step. capture=False: without a graph."""
        self._step, self._capture, self._ragged = step, capture, ragged
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: dict[str, Tensor] = {}

    def __call__(
        self,
        state: Value,
        pending: Int[Tensor, " N"],
        uniforms: Float[Tensor, " N"],
        live: Int[Tensor, " N"] | None = None,
    ) -> tuple[Value, Int[Tensor, " N"]]:
        if not self._held:
            self._settle(state, pending, uniforms, live)
            return self._state, self._pending.clone()
        self._pending.copy_(pending)
        self._uniforms.copy_(uniforms)
        if self._live is not None and live is not None:
            self._live.copy_(live)
        if self._capture and self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._advance()  # recorded, not run
        if self._graph is None:
            self._advance()
        else:
            self._graph.replay()
        return self._state, self._pending.clone()

    def fold(self) -> None:
        """Let the state say all that was seen: a fused step keeps the last tokens beside it."""
        self._step.fold()

    def _settle(self, state: Value, pending: Tensor, uniforms: Tensor, live: Tensor | None) -> None:
        """The first step. Where its results lie, those of all later ones will."""
        self._uniforms = uniforms.clone()
        self._live = None if not self._ragged else torch.ones_like(pending) if live is None else live.clone()
        if self._capture:  # on a side stream, as a graph is captured on one: libraries set themselves up before that
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._state, values = self._step(state, pending, self._uniforms, self._live, donate=True)
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._state, values = self._step(state, pending, self._uniforms, self._live, donate=True)
        self._pending = values.clone()
        self._held = self._state.tensors()

    def _advance(self) -> None:
        state, values = self._step(self._state, self._pending, self._uniforms, self._live, donate=True)
        for name, x in state.tensors().items():
            if x is not self._held[name]:
                _put(state, name, self._held[name].copy_(x))
        self._state = state
        self._pending.copy_(values)


def is_static(state: Value) -> bool:
    """Whether all of the state's memory can stay in its place: no part of it is a cache that grows."""
    return all(getattr(part, "static", True) for part in _parts(state))


def is_growing(state: Value) -> bool:
    """Whether no part of it is a static cache, which is full at some length."""
    return not any(getattr(part, "static", False) for part in _parts(state))


def with_room(item: Any, capacity: int, static: bool) -> Any:
    """A copy of a state in which key/value caches are static with room for `capacity` values, or grow."""
    if isinstance(item, KVCache):
        more = capacity - item.capacity if static else 0
        k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (item.k, item.v))  # a negative number cuts off
        return KVCache(k, v, item.lengths.clone(), static=static)
    if isinstance(item, Value):
        parts = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}  # type: ignore[arg-type]
        return dataclasses.replace(item, **{name: with_room(x, capacity, static) for name, x in parts.items()})  # type: ignore[type-var]
    if isinstance(item, tuple):
        return tuple(with_room(x, capacity, static) for x in item)
    return item.clone() if isinstance(item, torch.Tensor) else item


def _parts(item: Any) -> Iterator[Value]:
    """A value, and all values in it."""
    if isinstance(item, Value):
        yield item
        for field in dataclasses.fields(item):  # type: ignore[arg-type]
            yield from _parts(getattr(item, field.name))
    elif isinstance(item, tuple):
        for x in item:
            yield from _parts(x)


def _put(state: Value, name: str, x: Tensor) -> None:
    """Make x the tensor of that dotted name."""
    *path, last = name.split(".")
    item: Any = state
    for part in path:
        item = item[int(part)] if isinstance(item, tuple) else getattr(item, part)
    assert not isinstance(item, tuple), f"{name} moved in a donated step"
    setattr(item, last, x)
