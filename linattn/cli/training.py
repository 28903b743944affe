"""`linattn train`: run an experiment, by name or file, with fields overridden."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from linattn.cli.sampling import samples
from linattn.cli.show import say


def train(
    run: Annotated[str, typer.Argument(help="An experiment by name or Python file; with --resume, a run's folder.")],
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, any field of the run or its model.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the run is kept. Default: runs/NAME-NUMBER.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of a run.")] = False,
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

    Interrupted, or killed? It goes on where its newest checkpoint stands:

        linattn train runs/digits-1 --resume

    All fields, and what they are:

        linattn train digits --show
    """
    from linattn.train import load_run, override
    from linattn.train import train as run_training
    from linattn.train.run_folder import read_run

    if resume:
        if folder is not None:
            raise ValueError(f"--resume goes on in the folder of the run, {run}: drop --folder {folder}")
        folder = Path(run)
        chosen = override(read_run(folder)[0], changes) if changes else None
    else:
        chosen = override(load_run(run), changes or [])
    if show:
        fields = dataclasses.asdict(chosen or read_run(Path(run))[0])
        say("\n".join(f"{name}={value}" for name, value in fields.items()))
        return
    result = run_training(chosen, folder, resume=resume, sample=samples)
    if result.interrupted:
        raise typer.Exit(130)
    say(f"use it:  linattn generate {result.folder}")


def register(app: typer.Typer) -> None:
    app.command()(train)
