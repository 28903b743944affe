"""What is to be run on a GPU is sound before there is one: plans are of runs, and a call leaves what it should."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from train_cases import tiny

from linattn.models import ImageConfig, build, preset
from linattn.train import load_run, override, train
from linattn.train.portable import shards

ROOT = Path(__file__).parents[1]


def module(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


runs, training = module("image_runs"), module("training")


@pytest.mark.parametrize("data", ["mnist", "cifar10"])
def test_the_recipes(data):
    """`paper` is the preset as it is; `best` has no more parameters, and the same images."""
    paper, best = load_run(data, "paper"), load_run(data, "best")
    assert load_run(data).changes == paper.changes == {} and paper.config() == preset(data)
    assert best.name == f"{data}-best" and best.data == data and best.config().shape == preset(data).shape  # type: ignore[union-attr]
    assert build(best.config()).num_parameters <= build(paper.config()).num_parameters
    assert all(run.minutes and run.steps is None and run.schedule == "cosine" for run in (paper, best))


def test_every_job_of_the_plan_is_a_run():
    names = [job.name for call in runs.CALLS.values() for job in call.jobs]
    assert len(set(names)) == len(names) > 15
    for call in runs.CALLS.values():
        for job in call.jobs:
            data, *told = job.told
            recipe = next((text.partition("=")[2] for text in told if text.startswith("recipe=")), None)
            run = override(load_run(data, recipe), [text for text in told if not text.startswith("recipe=")])
            assert run.minutes and run.minutes * 60 <= call.calls * (runs.CALL - runs.AFTER), job
    assert runs.CALL < 600
    for data, minutes in (("mnist", 5), ("cifar10", 10)):
        rivals = [runs.CALLS[f"{data}-{name}"].jobs[0] for name in ("linear", "softmax", "lsh-1", "lsh-4")]
        assert all(f"minutes={minutes}" in job.told for job in rivals)


def test_the_plan_is_printed(capsys):
    runs.plan()
    said = capsys.readouterr().out
    assert all(name in said for name in runs.CALLS) and "attention=reformer rounds=4" in said


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Commands are noted instead of run; trainings of 6 steps are made here, and the second is cut off after 3."""
    told: list[list[str]] = []

    class Process:
        def __init__(self, words):
            told.append(words)
            self.code = 130 if words[-1].endswith("cut") else 0
            if "--resume" in words:
                train(None, words[words.index("train") + 1], resume=True, quiet=True)
                return
            train(tiny(steps=6, checkpoint_every=3), words[-1], quiet=True)
            if self.code:
                (Path(words[-1]) / "checkpoint-00000006.safetensors").unlink()

        def poll(self):
            return self.code

        wait = poll

    monkeypatch.setattr(runs, "started", Process)
    monkeypatch.setattr(runs, "through", lambda words: told.append(list(words)))
    jobs = (runs.Job("whole", ("digits",)), runs.Job("cut", ("digits",)))
    monkeypatch.setitem(runs.CALLS, "both", runs.Call("a test", jobs))
    return told


def test_a_call_leaves_what_the_next_one_needs(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs.call("both", Path("out"), None, Path("runs"), 500.0)
    done = [words[3:5] for words in calls if words[3] != "train"]
    assert done == [["eval", "runs/whole"], ["pack", "runs/whole"]]
    assert len(shards(Path("out/cut"))) == 1 and len(list(Path("out").glob("*-images.json"))) == 1
    calls.clear()
    runs.call("both", Path("next"), Path("out"), Path("elsewhere"), 500.0)
    # "whole" was done, and is not begun again
    assert [words[3:5] for words in calls] == [
        ["train", "elsewhere/cut"],
        ["eval", "elsewhere/cut"],
        ["pack", "elsewhere/cut"],
    ]
    assert not list(Path("next").glob("*/portable*")) and (Path("elsewhere/cut") / "weights.safetensors").is_file()


def test_a_call_that_is_none(calls):
    with pytest.raises(runs.typer.BadParameter, match="no call 'nothing'"):
        runs.call("nothing", Path("out"))


def test_trainings_are_asked_to_stop_in_time():
    script = "import signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(130))\nprint(flush=True)\n"
    script += "time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    assert runs.ended([process], runs.time.monotonic()) == [130]
    process.stdout.close()
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="a training failed"):
        runs.ended([failed], runs.time.monotonic() + 20)


def test_the_bound_counts_what_the_paper_s_layer_moves():
    """77 W numbers a token and layer, and six operations for each weight of a matrix, besides the operator's."""
    config = preset("mnist")
    assert isinstance(config, ImageConfig)
    made = training.kernels(config.layer)
    assert sum(kernel.numbers for kernel in made) == 77 * 256
    products = sum(kernel.flops for kernel in made if not kernel.name.startswith("operator"))
    weights = sum(w.numel() for w in build(config).stack.blocks[0].parameters() if w.dim() == 2)  # type: ignore[union-attr]
    assert products == 6 * weights
    slow, fast = training.Rates(1e9, 1e30), training.Rates(1e30, 1e12)
    by_bytes = training.bound(config, 0, 1, 2, slow)
    assert by_bytes["seconds"] > 8 * 783 * 77 * 256 * 2 / 1e9
    assert training.bound(config, 0, 1, 2, fast)["seconds"] == pytest.approx(
        783 * training.flops_of_token(config) / 1e12
    )


def test_a_step_is_taken_apart():
    """The shares are parts of a whole, and each kind of work is found."""
    trainer = training.begun("mnist", "best", [*training.TINY, "device=cpu"])
    found = training.measure(trainer, 0.05)
    parts = found["shares"]
    assert sum(parts.values()) == pytest.approx(1) and all(share > 0.001 for share in parts.values())
    assert found["gpu_busy"] is None and 0 < found["of_the_bound"] < 1
    assert "tokens/s" in training.in_words(found)


def test_products_within_the_operator_are_its_own():
    class Event:
        def __init__(self, name, parent=None):
            self.name, self.cpu_parent = name, parent

    whole = Event("_Attention")
    events = [whole, Event("aten::mm", Event("aten::matmul", whole)), Event("aten::addmm"), Event("aten::relu")]
    operator, products = training.outermost(events)
    assert [event.name for event in (*operator, *products)] == ["_Attention", "aten::addmm"]
