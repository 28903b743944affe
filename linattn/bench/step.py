"""The native step beside torch's: of the operator, and of whole models, with the floor that memory sets.

A step must read all weights, and read and write the state, so at batch 1 it takes at least

    floor = (bytes of the packed weights + 2 · bytes of the state) / bandwidth

The bandwidth is that of torch's copy between two buffers of 256 MB, bytes read and bytes written, measured in the same
run. Weights that fit the last cache are read faster than that, so a step can lie below its floor.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from linattn import State, linear_attention
from linattn.bench.generation import Settings, integral
from linattn.bench.measure import Effort, Run, race, time_calls
from linattn.generate import generate
from linattn.generate.graph import StaticStep
from linattn.generate.native import NativeStep, Plan
from linattn.generate.snapshot import Sampling
from linattn.generate.steps import CachedStep, read
from linattn.models import ImageModel, build, preset
from linattn.ops import Step
from linattn.ops.parts import WEIGHTS, rounded
from linattn.state import Value

COPIED = 2**26  # fp32 numbers
SLICE = 16  # steps of a native call that is raced: as `generate` makes them


@dataclass(frozen=True)
class StepLine:
    """One comparison: seconds of each contestant, and the claims that rest on them."""

    what: str
    batch: int
    seconds: dict[str, float]
    floors: dict[str, float] = field(default_factory=dict)
    claims: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def claim(text: str, value: float, target: float, least: bool = True) -> dict[str, Any]:
    """What was to be reached: at least `target`, or at most."""
    met = value >= target if least else value <= target
    return {"claim": text, "value": value, "target": target, "outcome": "PASS" if met else "MISS"}


def bandwidth(effort: Effort) -> float:
    """Bytes a second that a copy moves, read and written."""
    x, y = torch.zeros(COPIED), torch.zeros(COPIED)
    seconds = race({"copy": lambda: y.copy_(x)}, effort)["copy"].seconds
    return 2 * 4 * COPIED / seconds


@torch.no_grad()
def operator_step(effort: Effort) -> StepLine:
    """B = 1, H = 8, D = 64: the function, torch's handle, and the native handle."""
    q, k, v = torch.randn(3, 1, 8, 64, generator=torch.Generator().manual_seed(0))
    held = [State.empty(1, 8, 64, 64)]
    rows = [x[:, None] for x in (q, k, v)]

    @torch.no_grad()
    def eager() -> None:
        _, held[0] = linear_attention(*rows, state=held[0], return_state=True, donate=True)

    by_torch, natively = (Step(State.empty(1, 8, 64, 64), impl=impl) for impl in ("torch", "native"))
    runs: dict[str, Run] = {
        "linear_attention": eager,
        "torch handle": lambda: by_torch(q, k, v),
        "native handle": lambda: natively(q, k, v),
    }
    seconds = {name: cell.seconds for name, cell in race(runs, effort).items()}
    ratio = seconds["linear_attention"] / seconds["native handle"]
    return StepLine("operator", 1, seconds, claims=[claim("native handle: times as fast as torch eager", ratio, 8.0)])


def model_step(name: str, batch: int, speed: float, effort: Effort) -> StepLine:
    """One step of a preset's model at place 0: by torch, and natively with each kind of weights."""
    model = _model(name)
    uniforms = torch.rand(SLICE, batch, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    runs: dict[str, Run] = {"torch": _by_torch(model, model.empty_state(batch), uniforms[0])}
    for weights in WEIGHTS:
        runs[weights] = _natively(model, weights, uniforms)
    seconds = {what: cell.seconds / (1 if what == "torch" else SLICE) for what, cell in race(runs, effort).items()}
    moved = 2 * model.empty_state(batch).nbytes
    floors = {weights: (Plan(model, weights).nbytes + moved) / speed for weights in WEIGHTS}
    claims = []
    if batch == 1:
        target = {"mnist": 5.0, "cifar10": 3.0}[name]
        claims = [
            claim("fp32: times as fast as the torch step", seconds["torch"] / seconds["fp32"], target),
            claim("fp32: times the floor", seconds["fp32"] / floors["fp32"], 2.0, least=False),
        ]
    return StepLine(name, batch, seconds, floors, claims)


def image(name: str, weights: str) -> StepLine:
    """A whole image at batch 1, made by `generate`."""
    model = _model(name)
    generate(model, length=2, seed=0, progress=False, impl="native", weights=weights)  # loads, starts threads
    seconds = min(_timed(model, 1, weights) for _ in range(3))
    target = 1.0 if weights == "fp32" else 0.5
    return StepLine(
        f"{name}, an image", 1, {weights: seconds}, claims=[claim(f"{weights}: seconds", seconds, target, least=False)]
    )


def images(name: str, batch: int) -> StepLine:
    """A batch of images natively, and by softmax with a static cache: its steps at some places, integrated."""
    seconds = _timed(_model(name), batch, "fp32")
    model = _model(name, attention="softmax")
    length = model.config.length
    uniforms, steps = torch.rand(batch, dtype=torch.float64), {}
    for place in (0, length // 2, length - 4):  # three steps each, and then the cache is full
        before = torch.zeros(batch, place, dtype=torch.int64)
        state = read(model, model.empty_state(batch, capacity=length, static=True), before, None)
        run = _by_torch(model, state, uniforms, static=True)
        run()
        steps[place] = time_calls(run, 2)
    rival = integral(steps, length)
    made = {"native fp32": seconds, "softmax, static cache ≈": rival}
    return StepLine(f"{name}, images", batch, made, claims=[claim("times the images/s", rival / seconds, 5.0)])


def measure(quick: bool = False) -> Iterator[StepLine | dict[str, float]]:
    """The bandwidth first, as {"copy bytes a second": …}; then line by line."""
    effort = Effort(budget=0.1, least=1, once=0.2) if quick else Effort(budget=1.0, least=5, once=2.0)
    speed = bandwidth(effort)
    yield {"copy bytes a second": speed}
    yield operator_step(effort)
    for name in Settings().presets:
        for batch in (1, 64):
            yield model_step(name, batch, speed, effort)
    for weights in WEIGHTS:
        yield image("mnist", weights)
    if not quick:
        yield images("mnist", 64)


@torch.no_grad()
def losses(model: ImageModel, data: torch.Tensor) -> dict[str, float]:
    """Bits per dimension (values 2 … L) of images, with each kind of weights: torch's sums over the rounded weights."""
    made = {}
    for weights in WEIGHTS:
        narrow = copy.deepcopy(model)
        for module in narrow.modules():
            if isinstance(module, torch.nn.Linear) and module.weight is not None:
                module.weight.copy_(rounded(module.weight, weights))
        made[weights] = float(narrow.bits_per_dim(data)[0].mean())
    return made


def _by_torch(model: ImageModel, state: Value, uniforms: torch.Tensor, static: bool = False) -> Run:
    """A step by torch, from where the last one ended."""
    step: Any = CachedStep(model, Sampling())
    if static:
        step = StaticStep(step, capture=False, ragged=False)
    now = [state, torch.zeros(len(uniforms), dtype=torch.int64)]

    @torch.no_grad()
    def run() -> None:
        now[0], now[1] = step(now[0], now[1], uniforms)

    return run


def _natively(model: ImageModel, weights: str, uniforms: torch.Tensor) -> Run:
    """Native steps, as many as there are rows of uniforms."""
    step, batch = NativeStep(Plan(model, weights), Sampling()), uniforms.shape[1]
    state, pending = model.empty_state(batch), torch.zeros(batch, dtype=torch.int64)
    left = torch.full((batch,), len(uniforms))

    def run() -> None:
        step.slice(state, pending, uniforms, left).run()

    return run


def _timed(model: ImageModel, count: int, weights: str) -> float:
    begin = time.perf_counter()
    generate(model, count=count, seed=0, progress=False, impl="native", weights=weights)
    return time.perf_counter() - begin


def _model(name: str, **changes: Any) -> ImageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(preset(name, **changes)).eval()
    assert isinstance(model, ImageModel)
    return model
