"""The generation benchmark: what an image costs, in the paper's architectures, for each kind of attention.

A step at place t costs c(t): constant for linear attention, growing for all others. c is measured at some places, and
an image costs their integral by trapezoids,

    Σ_{t=0}^{L-2} c(t)        c piecewise linear between the measured places        (the first value is drawn, not made)

Where a batch of images then takes no more than a minute it is made in full, and that time counts; else the integral
does, marked "≈". At each place all methods are measured in one race. The best batch is searched among some sizes, until
a larger one makes no more images a second.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from linattn.bench import roofline
from linattn.bench.machine import available_memory
from linattn.bench.measure import Effort, Run, race
from linattn.generate import generate
from linattn.generate.fused import FusedStep, step_for
from linattn.generate.graph import StaticStep, is_static
from linattn.generate.native import NativeStep, Plan, why_not
from linattn.generate.snapshot import Sampling
from linattn.generate.steps import CachedStep, Prefix, UncachedStep, read
from linattn.models import ImageModel, build, preset
from linattn.state import Value

MEMORY_SHARE = 0.4  # of the available memory for states: there is more than one of them while a batch is prepared
SPARE = 512  # steps that a race may take beyond the last place before a cache must grow, which would count
BETTER = 1.05  # images a second of a larger batch over those of a smaller one, below which the search ends


@dataclass(frozen=True, eq=False)
class Method:
    """One kind of attention in a preset's architecture, with a cache or over the whole prefix at each step."""

    name: str
    changes: dict[str, Any]
    cached: bool
    narrow: bool = False  # the sums are read from a bfloat16 copy (on a GPU; see docs/decisions.md)


METHODS = (
    Method("linear", {}, True),
    Method("softmax, cached", {"attention": "softmax"}, True),
    Method("softmax", {"attention": "softmax"}, False),
    Method("LSH-1", {"attention": "reformer", "rounds": 1}, False),
    Method("LSH-4", {"attention": "reformer", "rounds": 4}, False),
)


ON_A_GPU = (METHODS[0], Method("linear, narrow", {}, True, narrow=True), *METHODS[1:])


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long. `changes` are for the presets, `batches` the candidates for the best one.

    methods: names of those to measure, all where there are none.
    """

    presets: tuple[str, ...] = ("mnist", "cifar10")
    changes: dict[str, Any] = field(default_factory=dict)
    places: int = 6
    batches: tuple[int, ...] = (4, 16, 64)
    cuda_batches: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    cuda_dtype: str = "bfloat16"  # of the models there
    methods: tuple[str, ...] = ()
    effort: Effort = field(default_factory=lambda: Effort(budget=0.25, least=2, once=0.5))
    longest_step: float = 2.0  # seconds: no batch is tried whose step would take longer
    whole: float = 60.0  # seconds: a batch of images that takes longer is extrapolated


QUICK = Settings(places=3, batches=(16,), effort=Effort(budget=0.05, least=1, once=0.1), longest_step=0.7, whole=3.0)


@dataclass(frozen=True)
class Line:
    """A batch of images by one method: seconds for all of them, and of a step by its place."""

    preset: str
    length: int
    depth: int
    device: str
    method: str
    batch: int
    seconds: float
    extrapolated: bool
    state_bytes: int
    steps: dict[int, float]
    floor: float | None = None  # seconds of an image that bytes and products alone take, on a GPU

    @property
    def images_per_second(self) -> float:
        return self.batch / self.seconds

    def to_json(self) -> dict[str, Any]:
        plain = {**dataclasses.asdict(self), "images_per_second": self.images_per_second}
        return plain | {"steps": [{"place": place, "seconds": seconds} for place, seconds in self.steps.items()]}


def measure(
    settings: Settings, device: str, tell: Callable[[str], None] = lambda what: None
) -> Iterator[tuple[Line, Line]]:
    """Of each preset and method: one image, and the best batch (which may be one image, too). `tell` hears what is
    being measured."""
    for name in settings.presets:
        models = {method: _model(name, method, settings, device) for method in methods(settings, device)}
        tell(f"{name}: steps of all methods at {settings.places} places")
        ones = estimates({method: (model, 1) for method, model in models.items()}, settings, device)
        floor = roofline.floor(models) if device == "cuda" else {}
        for method, model in models.items():
            tell(f"{name}: {method.name}, one image and the best batch")
            one = _in_full(_line(name, method, model, 1, ones[method], device), method, model, settings)
            best = _best_batch(name, method, model, ones[method], settings, device)
            best = one if best is None else _in_full(best, method, model, settings)
            best = max(one, best, key=lambda line: line.images_per_second)
            one, best = (dataclasses.replace(line, floor=floor.get(method.name)) for line in (one, best))
            yield one, one if best.batch == one.batch else best


def methods(settings: Settings, device: str) -> list[Method]:
    """Those to measure on this device."""
    known = ON_A_GPU if device == "cuda" else METHODS
    unknown = set(settings.methods) - {method.name for method in ON_A_GPU}
    if unknown:
        names = ", ".join(repr(method.name) for method in ON_A_GPU)
        raise ValueError(f"unknown method {unknown.pop()!r}: there are {names}")
    return [method for method in known if not settings.methods or method.name in settings.methods]


def estimates(
    entered: dict[Method, tuple[ImageModel, int]], settings: Settings, device: str
) -> dict[Method, dict[int, float]]:
    """Seconds of a step at each place, for models and batch sizes; all methods of a place in one race."""
    (length,) = {model.config.length for model, _ in entered.values()}
    steps: dict[Method, dict[int, float]] = {method: {} for method in entered}
    for place in places(length, settings.places):
        runs = {method.name: prepare(method, *entered[method], place) for method in entered}
        cells = race(runs, settings.effort, device)
        for method in entered:
            steps[method][place] = cells[method.name].seconds
    return steps


def places(length: int, count: int) -> list[int]:
    """How many values have been read before the measured steps: from 0 to those before the last one."""
    return sorted({round(x) for x in np.linspace(0, length - 2, count)})


def integral(steps: dict[int, float], length: int) -> float:
    """Seconds of all L - 1 steps, linear between the measured ones."""
    return float(np.interp(np.arange(length - 1), sorted(steps), [steps[place] for place in sorted(steps)]).sum())


@torch.no_grad()
def prepare(method: Method, model: ImageModel, batch: int, place: int) -> Run:
    """One step after `place` values. Each call goes on from where the last one ended."""
    generator = torch.Generator().manual_seed(place)
    values = torch.randint(256, (1, place + 1), generator=generator).to(model.device)
    copies = torch.zeros(batch, dtype=torch.int64)
    step: Callable[..., tuple[Value, torch.Tensor]]
    if method.cached:
        static = model.device.type == "cuda"
        room = 0 if static else SPARE  # a static cache is read whole, so it must not be larger than for an image
        empty = model.empty_state(1, capacity=model.config.length + room, static=static)
        state: Value = read(model, empty, values[:, :place], None).select(copies)
        step = _step(method, model, state, static)
    else:
        state = Prefix(values[:, :place], torch.tensor([place], device=model.device)).select(copies)
        step = UncachedStep(model, Sampling())
    now = [state, values[0, -1:].expand(batch).clone()]
    uniforms = torch.rand(batch, generator=generator, dtype=torch.float64).to(model.device)

    @torch.no_grad()
    def run() -> None:
        now[0], now[1] = step(now[0], now[1], uniforms)

    return run


def _step(method: Method, model: ImageModel, state: Value, static: bool) -> Callable[..., tuple[Value, torch.Tensor]]:
    """As `generate` makes it on that device; or with narrow sums."""
    if not (static and is_static(state)):
        natively = model.device.type == "cpu" and why_not(model) is None
        return _native_step(model) if natively else CachedStep(model, Sampling())
    length = model.config.length + SPARE  # a race goes on behind the last place
    narrow = method.narrow and FusedStep(model, Sampling(), length, narrow=True)
    return StaticStep(narrow or step_for(model, Sampling(), state, length), capture=True, ragged=False)


def _native_step(model: ImageModel) -> Callable[..., tuple[Value, torch.Tensor]]:
    """What `generate` takes on a CPU, one step at a time."""
    made = NativeStep(Plan(model), Sampling())

    def step(state, pending, uniforms):
        one = made.slice(state, pending, uniforms[None], torch.ones_like(pending))
        one.run()
        return one.state, one.pending

    return step


def _model(name: str, method: Method, settings: Settings, device: str) -> ImageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(preset(name, **method.changes, **settings.changes)).to(device).eval()
    if device == "cuda":
        model = model.to(getattr(torch, settings.cuda_dtype))
    assert isinstance(model, ImageModel)
    return model


def _best_batch(
    name: str, method: Method, model: ImageModel, one: dict[int, float], settings: Settings, device: str
) -> Line | None:
    """The batch with the most images a second by the integral; None where no batch beats a single image."""
    best, best_line = _line(name, method, model, 1, one, device), None
    room = MEMORY_SHARE * available_memory(device)
    for batch in settings.cuda_batches if device == "cuda" else settings.batches:
        slowest = batch / best.batch * max(best.steps.values())  # if a larger batch saved nothing
        if slowest > settings.longest_step or batch * best.state_bytes > room:
            break
        steps = estimates({method: (model, batch)}, dataclasses.replace(settings, places=3), device)[method]
        line = _line(name, method, model, batch, steps, device)
        if line.images_per_second < BETTER * best.images_per_second:
            break
        best = best_line = line
    return best_line


def _line(name: str, method: Method, model: ImageModel, batch: int, steps: dict[int, float], device: str) -> Line:
    length = model.config.length
    seconds = integral(steps, length)
    held = model.empty_state(1, capacity=length).nbytes if method.cached else 8 * length
    return Line(name, length, model.config.depth, device, method.name, batch, seconds, True, held, steps)


def _in_full(line: Line, method: Method, model: ImageModel, settings: Settings) -> Line:
    """The line with the time of whole images, where they take no longer than `whole`."""
    if line.seconds > settings.whole or method.narrow:  # `generate` has no narrow sums
        return line
    begin = time.perf_counter()
    made = generate(model, count=line.batch, seed=0, cache=method.cached, progress=False)
    assert bool((made.tensor >= 0).all())  # also waits for a GPU
    if made.interrupted:
        raise KeyboardInterrupt
    return dataclasses.replace(line, seconds=time.perf_counter() - begin, extrapolated=False)
