"""The step that stays in place: the same bytes as the ordinary one, at the same addresses, and so replayable.

Where there is no GPU, a graph is imitated: the calls of one step are written down with the tensors that they used, and
replayed on those. As with a real graph, nothing but memory then carries a step's result to the next; and as with a real
capture, the step that is written down has not happened.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from generate_cases import KINDS, image_model, language_model
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.generate import Snapshot, Stream, generate, stream
from linattn.generate.graph import StaticStep, is_growing, is_static, with_room
from linattn.generate.request import Request, start
from linattn.generate.steps import CachedStep
from linattn.generate.stream import _may_be_ragged

CUDA = torch.cuda.is_available()
PROMPTS = [[3], [5, 1, 5], [2] * 8]


class Tape(TorchDispatchMode):
    """Writes down every call of torch, and replays them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for x, y in zip(*((o if isinstance(o, (tuple, list)) else (o,)) for o in (out, again)), strict=True):
                if isinstance(x, torch.Tensor) and x.data_ptr() != y.data_ptr():
                    x.copy_(y)


@pytest.fixture
def imitated(monkeypatch):
    """torch.cuda's graphs on the CPU. Gives the tapes that were made."""
    tapes = []

    class Graph:
        def __init__(self):
            self.tape = Tape()
            tapes.append(self.tape)

        def replay(self):
            self.tape.replay()

    class Queue:
        def wait_stream(self, other):
            pass

    @contextmanager
    def capture(graph):
        step = StaticStep.latest  # type: ignore[attr-defined]
        memory = [*step._held.values(), step._pending]
        before = [x.clone() for x in memory]
        with graph.tape:
            yield
        for x, y in zip(memory, before, strict=True):
            x.copy_(y)

    made = StaticStep.__init__

    def remember(self, *args, **options):
        StaticStep.latest = self  # type: ignore[attr-defined]
        made(self, *args, **options)

    monkeypatch.setattr(StaticStep, "latest", None, raising=False)
    monkeypatch.setattr(StaticStep, "__init__", remember)
    for name, stand_in in {
        "CUDAGraph": Graph,
        "graph": capture,
        "Stream": Queue,
        "current_stream": Queue,
        "stream": lambda queue: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return tapes


def static_stream(model, prompt, capture: bool = False, **options) -> Stream:
    """A stream as it is on a GPU: with static caches, and a step in place."""
    begin = start(model, Request(prompt, **options))
    begin = replace(begin, state=with_room(begin.state, begin.length or 0, static=True))
    run = Stream(model, begin)
    run._step = StaticStep(CachedStep(model, run.sampling), capture=capture, ragged=_may_be_ragged(begin))
    return run


def values_of(run: Stream) -> torch.Tensor:
    return torch.stack(list(run), 1)


@pytest.mark.parametrize(("prompt", "options"), [([[3], [4]], {}), (PROMPTS, {"stop": (5, 9)})], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_values_in_place(kind, prompt, options):
    model = language_model(kind)
    ordinary = stream(model, prompt, length=14, seed=1, **options)
    run = static_stream(model, prompt, length=14, seed=1, **options)
    places = None
    while (values := next(ordinary, None)) is not None:
        assert torch.equal(next(run), values)
        held = {name: x.data_ptr() for name, x in run.stands().state.tensors().items()}
        assert places in (None, held)
        places = held
    assert next(run, None) is None
    assert torch.equal(run.counts, ordinary.counts) and torch.equal(run.finished, ordinary.finished)


@pytest.mark.parametrize("prompt", [[[3], [4]], PROMPTS], ids=["even", "ragged"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_can_be_replayed(kind, prompt, imitated):
    model = language_model(kind)
    whole = values_of(stream(model, prompt, length=14, seed=1, temperature=0.9, top_k=8))
    run = static_stream(model, prompt, capture=True, length=14, seed=1, temperature=0.9, top_k=8)
    assert torch.equal(values_of(run), whole)
    (tape,) = imitated
    assert len(tape.calls) > 50


def test_a_recorded_step_of_an_image_model(imitated):
    model = image_model("softmax")
    assert torch.equal(
        values_of(static_stream(model, None, capture=True, count=3, seed=1)), generate(model, count=3, seed=1).tensor
    )
    assert len(imitated) == 1


@pytest.mark.parametrize("kind", ["linear", "softmax", "favor"])
def test_a_stream_in_place_can_be_resumed_by_both(kind, tmp_path):
    """In place or not, longer than the static cache was made for, from a snapshot that stays as it is."""
    model = language_model(kind)
    whole = generate(model, PROMPTS, length=20, seed=1).tensor
    run = static_stream(model, PROMPTS, length=16, seed=1)
    for _ in range(4):
        next(run)
    taken = run.snapshot()
    next(run)
    taken.save(tmp_path / "half.safetensors")
    for again in (taken, Snapshot.load(tmp_path / "half.safetensors"), taken):
        rest = values_of(stream(model, snapshot=again, length=20))
        in_place = values_of(static_stream(model, None, snapshot=again, length=20))
        assert torch.equal(rest, in_place)
        assert torch.equal(rest[:, 0], whole[torch.arange(3), torch.tensor([5, 7, 12])])
        assert torch.equal(rest[0], whole[0, 5:])


def test_what_can_stay_in_place():
    linear, softmax, reformer = (language_model(kind) for kind in ("linear", "softmax", "reformer"))
    assert is_static(linear.empty_state(1)) and is_growing(linear.empty_state(1))
    assert not is_static(softmax.empty_state(1)) and is_growing(softmax.empty_state(1))
    static = softmax.empty_state(1, capacity=8, static=True)
    assert is_static(static) and not is_growing(static)
    assert not is_static(reformer.empty_state(1, capacity=8, static=True))


def test_room_is_added_and_cut_off():
    model = language_model("softmax")
    with torch.no_grad():
        _, state = model(torch.tensor([[1, 2, 3], [4, 5, 6]]), model.empty_state(2, capacity=4))
    for capacity, static in ((3, True), (9, True), (9, False)):
        other = with_room(state, capacity, static)
        cache = other.blocks[1].own.memory
        assert cache.static == static and cache.capacity == (capacity if static else 4)
        assert torch.equal(cache.k[:, :3], state.blocks[1].own.memory.k[:, :3])
        addresses = {x.data_ptr() for x in other.tensors().values()}
        assert addresses.isdisjoint(x.data_ptr() for x in state.tensors().values())


@pytest.mark.parametrize("device", ["cpu", "cuda"] if CUDA else ["cpu"])
@pytest.mark.parametrize("kind", ["linear", "softmax", "reformer"])
def test_devices_agree(kind, device):
    """In float64, whatever the step is: with a real graph where there is a GPU."""
    exact = generate(language_model(kind), PROMPTS, length=16, seed=1, stop=(5,), graph=False).values
    model = language_model(kind).to(device)
    for graph in ("auto", False) if device == "cpu" or kind == "reformer" else ("auto", False, True):
        made = generate(model, PROMPTS, length=16, seed=1, stop=(5,), graph=graph)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(made.values, exact, strict=True))
        assert {x.device.type for x in made.values} == {device}
