"""What is kept of trained image models: a few numbers and curves of each run, as JSON beside the other measurements.

    linattn eval runs/mnist-1 --check 256 --record        eval-test.json in the run's folder
    linattn report images runs/mnist-1 runs/mnist-2       benchmarks/results/<date>-<machine>-images.json, and the page

A run is one of the paper's methods: linear, softmax (with a cache or without it is one model), LSH-1, LSH-4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linattn.bench.machine import environment
from linattn.bench.report import save_json
from linattn.models import ImageConfig, ImageModel, build
from linattn.models.files import IN_A_RUN, record_of
from linattn.train.metrics import FILE, read_lines
from linattn.train.run_folder import read_run

EVALUATED = "eval-{split}.json"
POINTS = 200  # of a curve that is kept, about


@dataclass(frozen=True)
class ImageRun:
    """One trained model.

    curve      evaluations on held-out images: (seconds, epochs, bits/dim)
    training   the same of training batches, thinned
    test       what `linattn eval` found on the test set; None: it was not asked
    """

    name: str
    data: str
    method: str
    minutes: int | float | None
    seconds: int | float
    step: int
    epochs: int | float
    parameters: int
    tokens_per_second: int | float
    machine: str
    run: dict[str, Any]
    curve: list[list[Any]]
    training: list[list[Any]]
    test: dict[str, Any] | None

    @property
    def bits(self) -> float | None:
        """The headline: bits/dim of the test set, values 2 … L."""
        return None if self.test is None else self.test["bits"]


def gathered(folder: Path) -> ImageRun:
    """What a run's folder says."""
    run, config = read_run(folder)
    if not isinstance(config, ImageConfig):
        raise ValueError(f"{folder} is the run of a {type(config).__name__}: this report is of image models")
    model = build(config)
    assert isinstance(model, ImageModel)
    lines = read_lines(folder / FILE)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    training = [line for line in lines if line["kind"] == "train"]
    if not evaluations:
        raise ValueError(f"{folder} has no evaluation yet, so there is nothing to report of it")
    evaluated = folder / EVALUATED.format(split="test")
    made = record_of(folder / IN_A_RUN)["machine"]
    speeds = sorted(line["tokens_per_second"] for line in training) or [0]
    return ImageRun(
        name=run.name,
        data=run.data,
        method=method_of(config),
        minutes=run.minutes,
        seconds=evaluations[-1]["seconds"],
        step=evaluations[-1]["step"],
        epochs=evaluations[-1].get("epoch", 0.0),
        parameters=model.num_parameters,
        tokens_per_second=speeds[len(speeds) // 2],
        machine=made["gpu"] or made["system"],
        run=run.to_json(),
        curve=points(evaluations),
        training=points(training),
        test=json.loads(evaluated.read_text()) if evaluated.is_file() else None,
    )


def method_of(config: ImageConfig) -> str:
    layer = config.layer
    return f"LSH-{layer.rounds}" if layer.attention == "reformer" else layer.attention


def points(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """(seconds, epochs, bits) of some of the lines, the last one among them."""
    every = max(1, len(lines) // POINTS)
    kept = [*lines[::every], *(lines[-1:] if lines and (len(lines) - 1) % every else [])]
    return [[line["seconds"], line.get("epoch", 0.0), round(line["bits"], 5)] for line in kept]


def record(folders: Iterable[Path], out: Path | None = None) -> Path:
    """Keep what the folders say, as JSON."""
    runs = [asdict(gathered(folder)) for folder in folders]
    return save_json({"what": "images", "environment": environment(), "runs": runs}, "images", out)


def recorded(results: Path) -> list[ImageRun]:
    """The runs in all files of a results folder; of the same run the newest."""
    made: dict[tuple[Any, ...], ImageRun] = {}
    for data in measurements(results, "images"):
        for form in data["runs"]:
            run = ImageRun(**form)
            made[run.data, run.name, run.method, run.minutes, run.run["seed"]] = run
    return list(made.values())


def measurements(results: Path, what: str) -> list[dict[str, Any]]:
    """The files of a kind, oldest first."""
    files = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    of_kind = [data for data in files if str(data.get("what", "")).startswith(what) and not data.get("interrupted")]
    return sorted(of_kind, key=lambda data: data["environment"]["date"])
