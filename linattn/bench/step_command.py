"""`python -m linattn.bench step`: the native step beside torch's, and beside what memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.bench import step as room
from linattn.bench.machine import environment
from linattn.bench.report import heading, save_json, seconds_in_words
from linattn.models import ImageModel, load
from linattn.ops import cpu


def step(
    quick: Annotated[bool, typer.Option("--quick", help="Short measurements, no rival that takes long.")] = False,
    weights: Annotated[str | None, typer.Option(help="A trained image model: its loss with narrow weights.")] = None,
    data: Annotated[str, typer.Option(help="The dataset whose test images that model is judged on.")] = "digits",
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Measure the native step: of the operator, and of the paper's MNIST and CIFAR-10 models.

    Beside it torch's step, the floor that memory sets at batch 1, and softmax with a static cache. Then the claims,
    each with PASS or MISS. About two minutes; the numbers go to <date>-<machine>-step.json.
    """
    about = environment()
    print(f"{heading(about)}\n{cpu.status()[1]}")
    report: dict[str, Any] = {"what": "step", "environment": about, "native": cpu.status()[1], "lines": []}
    for line in room.measure(quick):
        if isinstance(line, dict):
            report |= line
            print(f"copy: {line['copy bytes a second'] / 1e9:.1f} GB/s, read and written\n")
            continue
        report["lines"].append(line.to_json())
        _show(line)
    if weights is not None:
        report["bits per dimension"] = _losses(weights, data)
    print(f"\nwritten: {save_json(report, 'step-quick' if quick else 'step', out)}")


def _show(line: room.StepLine) -> None:
    print(f"{line.what}, B = {line.batch}")
    for name, seconds in line.seconds.items():
        floor = f"   {seconds / line.floors[name]:.2f} times the floor" if name in line.floors else ""
        print(f"  {name:<26}{seconds_in_words(seconds):>10}{floor}")
    for one in line.claims:
        print(f"  {one['outcome']}  {one['claim']}: {one['value']:.3g} (target {one['target']:g})")


def _losses(weights: str, data: str) -> dict[str, float]:
    from linattn.train.data import load as load_data

    model = load(weights)
    if not isinstance(model, ImageModel):
        raise typer.BadParameter(f"{weights} is a {type(model).__name__}: bits per dimension are those of images")
    made = room.losses(model, load_data(data, split="test").data)
    for name, bits in made.items():
        print(f"{name}: {bits:.5f} bits/dim ({bits - made['fp32']:+.5f})")
    return made
