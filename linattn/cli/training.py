"""`linattn train`: run an experiment, by name or file, with fields overridden."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linattn.cli.sampling import samples
from linattn.cli.show import say
from linattn.models import SpeechConfig

if TYPE_CHECKING:
    from linattn.train import Run


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

    The paper's model of MNIST, the same with softmax attention for five minutes, and the recipe of our own:

        linattn train mnist
        linattn train mnist attention=softmax minutes=5
        linattn train mnist recipe=best

    Your own text, or your own folder of images:

        linattn train text data=notes.txt
        linattn train folder data=photos size=32 minutes=30

    Interrupted, or killed? It goes on where its newest checkpoint stands, or a packed one (see `linattn pack`):

        linattn train runs/digits-1 --resume

    All fields of the run and of its model, and their values:

        linattn train digits --show
    """
    from linattn.train import load_run, override
    from linattn.train import train as run_training
    from linattn.train.portable import unpack
    from linattn.train.run_folder import read_run

    if resume:
        if folder is not None:
            raise ValueError(f"--resume goes on in the folder of the run, {run}: drop --folder {folder}")
        folder = Path(run)
        unpack(folder)
        chosen = override(read_run(folder)[0], changes) if changes else None
    else:
        recipe, changes = _recipe(changes or [])
        chosen = override(load_run(run, recipe), changes)
    if show:
        _show(chosen or read_run(Path(run))[0])
        return
    result = run_training(chosen, folder, resume=resume, sample=samples)
    if result.interrupted:
        raise typer.Exit(130)
    say(f"use it:  {_use(chosen or read_run(result.folder)[0])} {result.folder}")


def _recipe(changes: list[str]) -> tuple[str | None, list[str]]:
    """What recipe=NAME says, and the other settings: it chooses the fields that these change."""
    named = [text.partition("=")[2] for text in changes if text.startswith("recipe=")]
    return (named[-1] if named else None), [text for text in changes if not text.startswith("recipe=")]


def _use(run: Run) -> str:
    return "linattn transcribe FILE --model" if isinstance(run.config(), SpeechConfig) else "linattn generate"


def _show(run: Run) -> None:
    """Every field that can be set, and what it is; an image model takes its shape from the data."""
    fields = dataclasses.asdict(run)
    model = dataclasses.asdict(run.config())
    layer = model.pop("layer")
    for key in ("changes", "data_options"):
        del fields[key]
    for title, group in (("the run", fields), ("its data", run.data_options), ("its model", model | layer)):
        if group:
            say(f"{title}\n" + "\n".join(f"  {name}={_in_words(value)}" for name, value in group.items()))


def _in_words(value: Any) -> str:
    """As `key=value` takes it."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    plain = value is None or isinstance(value, (bool, dict))
    return json.dumps(value).replace("null", "none") if plain else str(value)


def register(app: typer.Typer) -> None:
    app.command()(train)
