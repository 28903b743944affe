"""Values as they come: an iterator over steps. Its memory is the model's state, and nothing that it has handed out.

Axes:  N rows   A rows that are still in the state
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from linattn._typing import Bool, Int, Tensor
from linattn.generate import native
from linattn.generate.fused import step_for
from linattn.generate.graph import StaticStep, is_static
from linattn.generate.prompts import Prompt
from linattn.generate.request import Request, generating, start, wants_graph, wants_native
from linattn.generate.snapshot import Snapshot
from linattn.generate.steps import CachedStep, Prefix, Step, UncachedStep, evaluated, first_values
from linattn.generate.uniforms import Uniforms
from linattn.models import Model, SequenceModel
from linattn.state import Value

ENDED = -1


def stream(
    model: Model | SequenceModel,
    prompt: Prompt | None = None,
    *,
    count: int = 1,
    length: int | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] | None = None,
    first_row: int = 0,
    snapshot: Snapshot | None = None,
    cache: bool = True,
    graph: bool | str = "auto",
    impl: str = "auto",
    weights: str = "fp32",
) -> Stream:
    """Values as they are made: at each step one of every row, (N,) int64, and -1 for a row that has ended.

    The arguments are those of `generate`, but that a language model needs no `length`: its stream goes on without end,
    and a linear model needs no more time or memory for the millionth value than for the first.

    >>> from linattn.models import build, preset
    >>> model = build(preset("text", width=16, num_heads=2, depth=1))
    >>> text = b"Once upon a time"
    >>> for values in stream(model, text, length=24, seed=1):
    ...     text += bytes(values.tolist())
    >>> len(text)
    24
    """
    model = generating(model)
    options = (length, seed, temperature, top_k, top_p, stop, first_row, snapshot, cache, graph, impl, weights)
    request = Request(prompt, count, *options)
    return begun_stream(model, request, start(model, request))


def begun_stream(model: SequenceModel, request: Request, begun: Snapshot) -> Stream:
    """The stream that a request asks for, from where it starts."""
    plan = wants_native(model, request, begun.state)
    return Stream(model, begun, wants_graph(model, request) and request.graph, plan)


class Stream(Iterator[Tensor]):
    """What `stream` returns: an iterator that knows where it stands."""

    def __init__(
        self, model: SequenceModel, start: Snapshot, graph: bool | str = False, plan: native.Plan | None = None
    ):
        """From `start` on, whose values are not kept.

        graph: False, "auto" (if the state allows it) or True. plan: of the native step, which then makes the values.
        """
        self.model, self.seed, self.length, self.sampling = model, start.seed, start.length, start.sampling
        self._prompts, self._rows = start.prompts, start.rows
        counts, stopped = start.counts.numpy(force=True), start.stopped.numpy(force=True)
        state = start.state if plan is None else native.owned(start.state)  # type: ignore[arg-type]
        self._now = Now(state, start.pending, np.arange(len(counts)), counts, stopped, made=0)
        self._uniforms = Uniforms(start.seed, start.rows.tolist(), counts.tolist(), model.device)
        self._step = self._make_step(start, graph)
        self._native = None if plan is None else native.NativeStep(plan, start.sampling)
        self._slice: native.Slice | None = None
        self._unread = torch.empty(0, len(counts), dtype=torch.int64)
        self._failure: str | None = None

    def __next__(self) -> Int[Tensor, " N"]:
        made = self.take(1)
        if not len(made):
            raise StopIteration
        return made[0]

    def take(self, most: int) -> Int[Tensor, "S N"]:
        """The next values, none when all rows have ended: of one step, or natively of up to `most` in one call.

        With most=0 only what a call before this one made but, being interrupted, did not return.
        """
        self._settle()
        live = self._live()
        if most and live.any() and not len(self._unread):
            if self._native is None or self._now.counts[0] == 0:
                return self._one(live)[None]
            self._several(most, live)
        made, self._unread = self._unread, self._unread[:0]
        return made

    def _several(self, most: int, live: np.ndarray) -> None:
        """Up to `most` steps in one native call. An interruption finds it done or not begun; `_settle` takes it in."""
        assert self._native is not None
        if self._failure is not None:
            raise ValueError(self._failure)
        self._now = now = self._now.without_stopped()
        left = np.full(len(live), most) if self.length is None else np.minimum(most, self.length - now.counts)
        left = torch.from_numpy(np.where(live, left, 0)[now.active])
        uniforms = self._uniforms.between(now.made, int(left.max()))[:, torch.from_numpy(now.active)]
        self._slice = self._native.slice(now.state, now.pending, uniforms, left)  # type: ignore[arg-type]
        self._slice.run()
        self._settle()
        if self._failure is not None and not len(self._unread):
            raise ValueError(self._failure)

    def _settle(self) -> None:
        """Take in what a native call has made."""
        made = self._slice
        if made is None:
            return
        now = self._now
        out = torch.full((made.done, len(now.counts)), ENDED)
        out[:, torch.from_numpy(now.active)] = made.made
        counts = now.counts + (out >= 0).sum(0).numpy()
        stopped = now.stopped
        if self.sampling.stop:
            stopped = stopped | np.isin(out.numpy(), self.sampling.stop).any(0)
        after = Now(made.state, made.pending, now.active, counts, stopped, now.made + made.done)
        self._failure = made.failure
        self._unread, self._now, self._slice = torch.cat([self._unread, out]), after, None

    def _one(self, live: np.ndarray) -> Int[Tensor, " N"]:
        now = self._now
        if not isinstance(self._step, StaticStep):
            now = now.without_stopped()
        here = live[now.active]
        mask = None if here.all() else torch.from_numpy(here.astype(np.int64)).to(now.pending.device)
        uniforms = self._uniforms.at(now.made)
        if len(now.active) < len(live):
            uniforms = uniforms[now.active]
        with torch.no_grad(), evaluated(self.model):
            if now.counts[0] == 0:
                state, values = now.state, first_values(self.model, self.sampling, uniforms)
            else:
                state, values = self._step(now.state, now.pending, uniforms, mask)
        self._now = now.after(state, values, live, self.sampling.stop)
        return _handed_out(values, now.active, live)

    @property
    def counts(self) -> Int[Tensor, " N"]:
        """How many values each row has by now, its prompt among them."""
        return torch.from_numpy(self._now.counts.copy())

    @property
    def finished(self) -> Bool[Tensor, " N"]:
        """Which rows have ended, at a stop value or complete."""
        return torch.from_numpy(~self._live())

    def snapshot(self) -> Snapshot:
        """Where this stream stands, as a value of its own, for `stream(model, snapshot=…)`."""
        return self.stands().clone()

    def stands(self) -> Snapshot:
        """The same without a copy: it may change when the stream goes on."""
        self._settle()
        if self._failure is not None:
            raise ValueError(f"{self._failure}, so this stream has no state to go on from")
        now = self._now
        if isinstance(self._step, StaticStep):
            self._step.fold()
        state, pending = now.state, now.pending
        if len(now.active) < len(now.counts):
            place = np.zeros_like(now.counts)
            place[now.active] = np.arange(len(now.active))  # a stopped row is given any state: it needs none
            state, pending = state.select(torch.from_numpy(place)), pending[torch.from_numpy(place)]
        counts, stopped = torch.from_numpy(now.counts), torch.from_numpy(now.stopped)
        about = (self.seed, self.length, self.sampling)
        return Snapshot(counts, self._prompts, stopped, self._rows, pending, None, state, *about)

    def _live(self) -> np.ndarray:
        now, length = self._now, self.length
        return ~now.stopped if length is None else ~now.stopped & (now.counts < length)

    def _make_step(self, start: Snapshot, graph: bool | str) -> Step:
        if isinstance(start.state, Prefix):
            return UncachedStep(self.model, start.sampling)
        if graph is True and not is_static(start.state):
            raise ValueError(
                "graph=True makes the step a CUDA graph, and this state has a cache that grows: give a length, or for "
                "attention that has no static cache (Reformer) pass graph='auto'"
            )
        if graph is False or not is_static(start.state):
            return CachedStep(self.model, start.sampling)
        step = step_for(self.model, start.sampling, start.state, start.length)
        return StaticStep(step, capture=True, ragged=_may_be_ragged(start))


@dataclass(frozen=True)
class Now:
    """All that changes. A step makes a new one and puts it in place at once: it has happened whole, or not at all."""

    state: Value
    pending: Int[Tensor, " A"]
    active: np.ndarray  # (A,) the rows that are in the state
    counts: np.ndarray  # (N,)
    stopped: np.ndarray  # (N,)
    made: int

    def after(self, state: Value, values: Tensor, live: np.ndarray, stop: Sequence[int]) -> Now:
        stopped = self.stopped
        if stop:
            stopped = stopped.copy()
            stopped[self.active] |= np.isin(values.numpy(force=True), stop) & live[self.active]
        return Now(state, values, self.active, self.counts + live, stopped, self.made + 1)

    def without_stopped(self) -> Now:
        """Rows that have stopped leave the state when they are half of it: a copy, but not at every stop."""
        gone = self.stopped[self.active]
        if 2 * gone.sum() < len(gone):
            return self
        kept = torch.from_numpy(np.flatnonzero(~gone))
        return replace(self, state=self.state.select(kept), pending=self.pending[kept], active=self.active[~gone])


def _may_be_ragged(start: Snapshot) -> bool:
    """Whether rows may end at different times."""
    return bool(start.sampling.stop) or bool((start.counts != start.counts[0]).any()) or bool(start.stopped.any())


def _handed_out(values: Int[Tensor, " A"], active: np.ndarray, live: np.ndarray) -> Int[Tensor, " N"]:
    """The values in the places of their rows, ENDED in all others. A copy: the next step reads `values`."""
    if live.all():
        return values.clone()
    out = torch.full((len(live),), ENDED, device=values.device)
    here = torch.from_numpy(np.flatnonzero(live[active])).to(values.device)
    out[torch.from_numpy(active).to(values.device)[here]] = values[here]
    return out
