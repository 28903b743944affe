"""The generation benchmark: what is measured is what is meant. No test asserts a time: costs are made up."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_cases import BRIEF
from typer.testing import CliRunner

from linattn.bench import __main__ as command
from linattn.bench import generation, generation_command, roofline
from linattn.bench.generation import METHODS, Line, Method, Settings, integral, places, prepare
from linattn.bench.generation_table import PAPER, head, table_line
from linattn.bench.measure import Cell
from linattn.generate.fused import FusedStep
from linattn.generate.graph import StaticStep
from linattn.models import ImageModel, build, preset
from linattn.ops import gpu

SMALL = {"depth": 1, "width": 16, "num_heads": 2, "shape": (4, 2, 1)}
TINY = Settings(("mnist",), SMALL, places=3, batches=(2, 3), effort=BRIEF)


def method(name: str) -> Method:
    return next(m for m in METHODS if m.name == name)


def model_of(name: str, settings: Settings = TINY) -> ImageModel:
    return generation._model("mnist", method(name), settings, "cpu")


def made_up(
    length: int = 784, preset: str = "mnist", name: str = "linear", batch: int = 1, seconds: float = 2.0, about=False
):
    return Line(preset, length, 8, "cpu", name, batch, seconds, about, 540_680, {0: 0.1})


def test_an_image_costs_the_integral_of_its_steps():
    length, t = 784, np.arange(783)
    for cost in (lambda t: 0.01 + 0 * t, lambda t: 0.01 + 0.003 * t):  # trapezoids are exact
        measured = {place: float(cost(place)) for place in places(length, 3)}
        assert integral(measured, length) == pytest.approx(cost(t).sum(), rel=1e-12)
    quadratic = {place: float(place) ** 2 for place in places(length, 6)}
    exact = float((t.astype(float) ** 2).sum())
    assert (
        exact < integral(quadratic, length) < 1.03 * exact
    )  # not the last step times 783, which is three times as much
    assert integral(dict(reversed(quadratic.items())), length) == integral(quadratic, length)


def test_places_go_from_the_first_step_to_the_last():
    assert places(784, 6) == [0, 156, 313, 469, 626, 782] and places(3072, 2) == [0, 3070]
    assert places(4, 6) == [0, 1, 2] and places(2, 6) == [0]


@pytest.mark.parametrize("name", [m.name for m in METHODS])
def test_a_run_is_one_step_at_its_place(name, monkeypatch):
    model, seen = model_of(name), []
    features = model.features

    def spy(values, state=None, **options):
        made = features(values, state, **options)
        seen.append((tuple(values.shape), None if state is None else state.seen.tolist()))
        return made

    monkeypatch.setattr(model, "features", spy)
    monkeypatch.setattr("linattn.bench.generation.why_not", lambda _: "so that torch's steps are seen")
    run = prepare(method(name), model, batch=3, place=5)
    seen.clear()
    run()
    run()
    if method(name).cached:
        assert seen == [((3, 1), [5] * 3), ((3, 1), [6] * 3)]
    else:
        assert seen == [((3, 6), None), ((3, 7), None)]


def test_the_methods_are_the_papers():
    layers = {m.name: model_of(m.name, Settings()).config.layer for m in METHODS}
    kinds = {
        name: (layer.attention, layer.rounds if layer.attention == "reformer" else 0) for name, layer in layers.items()
    }
    assert kinds == {
        "linear": ("linear", 0),
        "softmax, cached": ("softmax", 0),
        "softmax": ("softmax", 0),
        "LSH-1": ("reformer", 1),
        "LSH-4": ("reformer", 4),
    }
    assert {(layer.width, layer.num_heads, layer.hidden) for layer in layers.values()} == {(256, 8, 1024)}
    assert [m.name for m in METHODS if m.cached] == ["linear", "softmax, cached"]
    assert all(list(table) == [m.name for m in METHODS] for table in PAPER.values()) and list(PAPER) == [
        "mnist",
        "cifar10",
    ]


@pytest.fixture
def costs(monkeypatch):
    """Steps cost what `step(name, batch, place)` says; `made` lists the batches that were made in full."""
    given = SimpleNamespace(step=lambda name, batch, place: 1.0, made=[], raced=[])
    monkeypatch.setattr(generation, "prepare", lambda method, model, batch, place: (method.name, batch, place))

    def race(runs, effort, device):
        given.raced.append(list(runs))
        return {name: Cell(given.step(*run), 3) for name, run in runs.items()}

    def generate(model, count, cache, **options):
        given.made.append((model.config.layer.attention, count, cache))
        return SimpleNamespace(tensor=torch.zeros(1), interrupted=False)

    monkeypatch.setattr(generation, "race", race)
    monkeypatch.setattr(generation, "generate", generate)
    return given


def test_short_runs_are_made_and_long_ones_extrapolated(costs):
    """Eight values: seven steps. The uncached methods cost ten seconds a step, the others one."""
    costs.step = lambda name, batch, place: 1.0 if name in ("linear", "softmax, cached") else 10.0
    settings = dataclasses.replace(TINY, batches=(), whole=60.0)
    told = []
    lines = {one.method: one for one, best in generation.measure(settings, "cpu", told.append)}
    assert told[0] == "mnist: steps of all methods at 3 places" and len(told) == 1 + len(METHODS)
    assert costs.made == [("linear", 1, True), ("softmax", 1, True)]
    assert costs.raced == [[m.name for m in METHODS]] * 3  # together at each place
    assert [line.extrapolated for line in lines.values()] == [False, False, True, True, True]
    assert lines["LSH-4"].seconds == 70.0 and lines["LSH-4"].steps == {0: 10.0, 3: 10.0, 6: 10.0}
    assert 0 < lines["linear"].seconds < 7.0  # the clock's, not the integral


def test_the_best_batch_is_the_last_that_pays(costs):
    """A step of b rows costs 1 + b / 20, up to the rows of `full`, and then b / full times as much."""
    full = {"linear": 16, "softmax, cached": 4}
    costs.step = lambda name, b, place: 1e-3 * ((1 + b / 20) if b <= full.get(name, 0) else b)
    settings = dataclasses.replace(TINY, batches=(4, 16, 64), whole=0.0)
    best = {one.method: best for one, best in generation.measure(settings, "cpu")}
    assert {name: line.batch for name, line in best.items()} == {
        "linear": 16, "softmax, cached": 4, "softmax": 1, "LSH-1": 1, "LSH-4": 1,
    }  # fmt: skip
    assert best["linear"].seconds == pytest.approx(7e-3 * 1.8) and best["linear"].images_per_second == pytest.approx(
        16 / (7e-3 * 1.8)
    )
    assert costs.made == []


@pytest.mark.parametrize(("limit", "most"), [("none", 16), ("time", 2), ("memory", 2)])
def test_batches_that_are_too_much_are_not_tried(costs, monkeypatch, limit, most):
    """A step costs a millisecond whatever the batch; sixteen rows are feared to cost eight times that of two."""
    tried = []
    costs.step = lambda name, batch, place: tried.append(batch) or 1e-3
    longest = 7.9e-3 if limit == "time" else 8.1e-3
    monkeypatch.setattr(generation, "METHODS", (method("linear"),))
    if limit == "memory":
        held = model_of("linear").empty_state(1).nbytes
        monkeypatch.setattr(generation, "available_memory", lambda device: 15 * held / generation.MEMORY_SHARE)
    settings = dataclasses.replace(TINY, batches=(2, 16), whole=0.0, longest_step=longest)
    ((_, best),) = generation.measure(settings, "cpu")
    assert max(tried) == best.batch == most


def test_states_are_counted_as_they_are_held():
    lines = {m.name: generation._line("mnist", m, model_of(m.name), 1, {0: 1.0}, "cpu") for m in METHODS}
    # Sums of 2 heads × 8 × 8 and 8, each a pair of float32; keys and values of 8 tokens; what is counted besides
    assert lines["linear"].state_bytes == 2 * (8 * 8 + 8) * 2 * 4 + 8
    assert lines["softmax, cached"].state_bytes == 2 * 8 * 16 * 4 + 8 + 8
    assert lines["softmax"].state_bytes == 8 * 8


def test_the_table_in_print():
    linear = made_up(seconds=1.75, batch=64)
    one = made_up(name="softmax", seconds=61.34, about=True)
    title, above, names = head(linear).splitlines()
    first = table_line(made_up(seconds=0.0204), linear, linear)
    last = table_line(one, dataclasses.replace(one, preset="mnist"), linear)
    assert title == "mnist: 8 layers, 784 values an image (cpu, float32)"
    assert len(above) == len(names) == len(first) == len(last)
    assert first.split() == ["linear", "20.4", "ms", "0.54", "64", "36.6", "1", "5.5", "143"]
    assert last.split() == ["softmax", "≈", "61.3", "s", "0.54", "1", "≈", "0.0163", "2,243", "72.6", "0.45"]
    gpu = dataclasses.replace(one, device="cuda", preset="cifar10")
    assert table_line(gpu, gpu, None).split()[-3:] == ["-", "300", "0.004"]


def invoke(*arguments: object):
    return CliRunner().invoke(command.app, ["generate", *map(str, arguments)])


def test_the_command_prints_and_keeps_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(generation_command, "QUICK", TINY)
    run = invoke("--quick", "--device", "cpu", "--out", tmp_path)
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.glob("*-generation-quick.json")
    kept = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {line["method"] for line in kept["lines"]} == {m.name for m in METHODS} and not kept["interrupted"]
    assert kept["settings"]["batches"] == [2, 3] and {"machine", "versions", "commit"} <= kept["environment"].keys()
    for line in kept["lines"]:
        assert [step["place"] for step in line["steps"]] == [0, 3, 6] and line["seconds"] > 0
        assert not line["extrapolated"] and line["images_per_second"] == line["batch"] / line["seconds"]
        assert line["method"] in run.output
    assert "4 layers" not in run.output and "mnist: 1 layers, 8 values" in run.output and str(path) in run.output


def test_an_interrupted_run_keeps_what_was_measured(tmp_path, monkeypatch):
    def interrupted(*_):
        yield made_up(), made_up(batch=4)
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "measure", interrupted)
    run = invoke("--device", "cpu", "--out", tmp_path)
    assert run.exit_code == 130 and "interrupted" in run.output
    (path,) = tmp_path.glob("*-generation-partial.json")
    kept = json.loads(path.read_text())
    assert kept["interrupted"] and [line["batch"] for line in kept["lines"]] == [1, 4]


def test_one_preset_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(generation_command, "QUICK", dataclasses.replace(TINY, presets=("mnist", "cifar10")))
    measured = []
    monkeypatch.setattr(generation, "measure", lambda settings, *_: measured.append(settings.presets) or [])
    assert invoke("--quick", "--preset", "cifar10", "--device", "cpu", "--out", tmp_path).exit_code == 0
    assert invoke("--quick", "--device", "cpu", "--out", tmp_path).exit_code == 0
    assert measured == [("cifar10",), ("mnist", "cifar10")]
    assert sorted(path.stem.partition("generation")[2] for path in tmp_path.iterdir()) == ["-cifar10-quick", "-quick"]
    run = invoke("--quick", "--preset", "digits")
    assert run.exit_code == 2 and "'mnist', 'cifar10'" in run.output


def test_a_wrong_device_is_told_the_right_ones():
    run = invoke("--quick", "--device", "tpu")
    assert run.exit_code == 2 and "tpu" in run.output and "'cpu'" in run.output


def test_the_floor_is_bytes_and_products():
    """Of the paper's models at 4.28 TB/s and 790 TFLOP/s; both rates are measured where it is used."""
    floors = {}
    for name in ("mnist", "cifar10"):
        with torch.device("meta"):
            model = build(preset(name))
        assert isinstance(model, ImageModel)
        floors[name] = 1 / roofline.floor_seconds(model, 4.28e12, 790e12)
    assert floors["mnist"] == pytest.approx(8965, rel=0.01) and floors["cifar10"] == pytest.approx(1144, rel=0.01)
    assert roofline.bandwidth_of_copy("cpu", 2**12) > 0 and roofline.rate_of_products("cpu", 16) > 0
    line = dataclasses.replace(made_up(batch=4), floor=0.25)
    assert table_line(line, line, None).endswith("50% of its floor")


def test_methods_by_name():
    names = [m.name for m in generation.methods(Settings(), "cuda")]
    assert names[:2] == ["linear", "linear, narrow"] and names[2:] == [m.name for m in METHODS[1:]]
    chosen = Settings(methods=("softmax", "linear"))
    assert [m.name for m in generation.methods(chosen, "cpu")] == ["linear", "softmax"]
    with pytest.raises(ValueError, match=r"unknown method 'softmx': there are 'linear', 'linear, narrow'"):
        generation.methods(Settings(methods=("softmx",)), "cpu")


@pytest.mark.skipif(not gpu.interpreted(), reason="with a GPU the benchmark itself does this")
def test_a_step_on_a_gpu_is_fused():
    model = build(preset("mnist", width=16, num_heads=2, depth=1, shape=(4, 2, 1)))
    assert isinstance(model, ImageModel)
    for wanted in generation.ON_A_GPU[:2]:
        step = generation._step(wanted, model, model.empty_state(1), static=True)
        assert isinstance(step, StaticStep) and isinstance(step._step, FusedStep)
        assert step._step._narrow == wanted.narrow
        step._capture = False
        with torch.no_grad():
            state, values = step(model.empty_state(1), torch.tensor([3]), torch.tensor([0.5], dtype=torch.float64))
        assert int(state.seen) == 1 and 0 <= int(values) < 256
