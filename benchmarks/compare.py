"""Trained runs side by side, on held-out data: what each kind of attention reached with the same budget.

What    Bits per value of each run on a split that none of them was trained on, with what its training took.
Why     A rival is one word away, `linattn train text attention=softmax`; the figures that come of it belong together,
        with the machine and the versions.
How     python benchmarks/compare.py runs/text-1 runs/text-2 [--split test]
Out     A table, and all numbers as JSON in benchmarks/results/ (<date>-<machine>-compare-<name of the data>.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.bench.machine import environment
from linattn.bench.report import heading, save_json
from linattn.models import SequenceModel, load
from linattn.models.files import record_of
from linattn.train import evaluate, training_data

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
HEAD = f"{'attention':<16}{'parameters':>12}{'steps':>8}{'seconds':>9}{'bits dev':>10}{'bits':>10}   run"


@app.command()
def main(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, trained on the same data.")],
    split: Annotated[str, typer.Option(help="test, dev or train.")] = "test",
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Evaluate runs on the same held-out data, as they were trained to read it."""
    about = environment()
    print(f"{heading(about)}\n\n{split} split\n{HEAD}")
    lines = [line(run, split) for run in runs]
    data = {"what": "compare", "environment": about, "split": split, "runs": lines}
    names = {one["data"]["name"] for one in lines}
    if len(names) > 1:
        raise ValueError(f"these runs were trained on different data and cannot be compared: {', '.join(names)}")
    print(f"\nwritten: {save_json(json.loads(json.dumps(data)), f'compare {names.pop()}', out)}")


def line(run: Path, split: str) -> dict[str, Any]:
    """A run's figures, printed as they come."""
    model, record = load(run), record_of(run)
    assert isinstance(model, SequenceModel)
    how = record["run"]
    options = {"window": how["window"], "carry": how["stateful"], "batch": how["batch"]}
    found = evaluate(model, training_data(record, split), **options)
    layer = model.config.layer
    attention = layer.attention + (f", conv {layer.conv}" if layer.conv else "")
    dev = record["evaluation"]["bits"]
    sizes = f"{attention:<16}{model.num_parameters:>12,}{record['step']:>8,}{record['seconds']:>9,.0f}"
    print(f"{sizes}{dev:>10.4f}{found['bits']:>10.4f}   {run}", flush=True)
    kept = {name: record[name] for name in ("step", "seconds", "evaluation", "data", "machine", "versions", "run")}
    return {"attention": attention, "parameters": model.num_parameters, split: found, **kept}


if __name__ == "__main__":
    app()
