"""`linattn train`: run an experiment, by name or file, with fields overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn.cli.show import complain, say
from linattn.cli.sampling import sheet_sampler


def train(
    run: Annotated[str, typer.Argument(help="An experiment by name (digits, mnist, cifar10, …) or a Python file.")],
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, any field of the run or its model.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the run is kept. Default: runs/<name>-<number>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --folder.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the run's fields and their values, and stop.")] = False,
) -> None:
    """Train a model.

    Needs no download, two minutes on two CPU cores:

        linattn train digits

    The paper's model of MNIST, and the same with softmax attention:

        linattn train mnist
        linattn train mnist attention=softmax batch=32

    Your own text, or your own folder of images:

        linattn train text data=notes.txt
        linattn train folder data=photos size=32 minutes=30

    Interrupted, or killed? The run goes on where its last checkpoint stands:

        linattn train digits --folder runs/digits-1 --resume
    """
    from linattn.train import load_run, override, train as run_training

    chosen = override(load_run(run), changes or [])
    if show:
        say(str(chosen))
        return
    summary = run_training(chosen, folder, resume=resume, sample=sheet_sampler())
    if summary.interrupted:
        complain(f"interrupted: go on with  linattn train {run} --folder {summary.folder} --resume")
        raise typer.Exit(130)
    say(f"generate from it:  linattn generate {summary.folder}")


def register(app: typer.Typer) -> None:
    app.command()(train)
