"""`python -m linattn.bench generate`: what an image costs on this machine, with each kind of attention."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from linattn.bench import generation
from linattn.bench.choices import devices
from linattn.bench.generation import QUICK, Line, Settings
from linattn.bench.generation_table import NOTE, head, table_line
from linattn.bench.machine import environment
from linattn.bench.report import heading, save_json


def generate(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: few places and batches, most extrapolated.")
    ] = False,
    preset: Annotated[str, typer.Option(help="mnist, cifar10, or all.")] = "all",
    device: Annotated[str, typer.Option(help="cpu, cuda, or all: the CPU, and a GPU where one is found.")] = "all",
    methods: Annotated[str, typer.Option(help="Of the first column, separated by semicolons; or all.")] = "all",
    whole: Annotated[float | None, typer.Option(help="Seconds up to which a batch is made in full.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Measure image generation: seconds of one image, and images a second at the best batch.

    The paper's MNIST and CIFAR-10 architectures, with linear attention, softmax with a cache and without, and Reformer
    with one and four hash rounds. "≈" marks what would take more than a minute: steps are measured at several places
    and integrated. Beside it stands what the paper measured. On a GPU models are bfloat16, steps are CUDA graphs, the
    rivals' too, and "of its floor" is the share of what bytes and products alone allow, by rates measured in that run.

    About five minutes on two cores; leave the machine alone meanwhile. Ctrl-C keeps what was measured. The numbers go
    to benchmarks/results/ in a checkout, to the current folder elsewhere: DATE-MACHINE-generation.json.
    """
    if threads:
        torch.set_num_threads(threads)
    settings, about = QUICK if quick else Settings(), environment()
    settings = dataclasses.replace(settings, presets=chosen(preset, settings.presets))
    if methods != "all":
        settings = dataclasses.replace(settings, methods=tuple(name.strip() for name in methods.split(";")))
    if whole is not None:
        settings = dataclasses.replace(settings, whole=whole)
    print(heading(about))
    lines: list[Line] = []
    interrupted = False
    try:
        for place in devices(device):
            _print_and_keep(settings, place, lines)
    except KeyboardInterrupt:
        interrupted = True
        print("\ninterrupted: what was measured until now is kept")
    print(f"\n{NOTE}")
    what = (
        "generation"
        + ("" if preset == "all" else f"-{preset}")
        + ("-quick" if quick else "")
        + ("-partial" if interrupted else "")
    )
    plain = json.loads(json.dumps(dataclasses.asdict(settings)))
    data: dict[str, Any] = {"what": what, "environment": about, "settings": plain, "interrupted": interrupted}
    data["lines"] = [line.to_json() for line in lines]
    print(f"written: {save_json(data, what, out)}")
    if interrupted:
        raise typer.Exit(130)


def chosen(preset: str, presets: tuple[str, ...]) -> tuple[str, ...]:
    if preset != "all" and preset not in presets:
        raise typer.BadParameter(f"no preset {preset!r} here: choose 'all' or one of {', '.join(map(repr, presets))}")
    return presets if preset == "all" else (preset,)


def tell(what: str) -> None:
    """What is being measured, on a terminal: one line, rewritten."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _print_and_keep(settings: Settings, device: str, lines: list[Line]) -> None:
    """The table, line by line as it is measured."""
    linear = None
    for one, best in generation.measure(settings, device, tell):
        tell("")
        if linear is None or linear.preset != one.preset:
            linear = best  # the first method
            print(f"\n{head(one)}")
        print(table_line(one, best, linear), flush=True)
        lines += [one] if best is one else [one, best]
