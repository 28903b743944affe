"""Where runs come from, and where they are kept.

    load_run("digits")            a name of linattn/experiments
    load_run("mnist", "best")     one of its RECIPES, {name: Run(...)}, where it has several; the first is its RUN
    load_run("my_run.py")         a Python file that sets RUN = Run(...)
    load_run("runs/digits-1")     the folder of a run, as it was begun

    runs/digits-1/run.json              the run and its model, complete
    runs/digits-1/metrics.jsonl         see metrics.py
    runs/digits-1/samples/              sheets
    runs/digits-1/weights.safetensors   the trained model, with its record

What cannot be written is a ValueError that says what to do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from linattn.models import Config
from linattn.models.files import from_json, to_json
from linattn.state import write_atomically
from linattn.train.config import Run, run_from_json

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
RUN_FILE, LOCK = "run.json", ".lock"


def load_run(name: str | Path, recipe: str | None = None) -> Run:
    """The RUN of a Python file, of the file of that name in linattn/experiments, or of a run's folder.

    A name of an experiment means that one, whatever folders lie around: ./digits is a folder. With `recipe`, that one
    of the file's RECIPES; its run is called after both.
    """
    path = EXPERIMENTS / f"{name}.py"
    if os.sep in str(name) or not path.is_file():
        path = Path(name).expanduser()
    if (path / RUN_FILE).is_file():
        if recipe is not None:
            raise ValueError(f"recipe={recipe} chooses among those of an experiment, {name} is the folder of a run")
        return read_run(path)[0]
    if not path.is_file() or path.suffix != ".py":
        known = ", ".join(sorted(file.stem for file in EXPERIMENTS.glob("[!_]*.py")))
        raise ValueError(
            f"no run {str(name)!r}: it is neither a Python file, nor the folder of a run, nor one of {known}"
        )
    return _run_of_file(path, recipe)


def _run_of_file(path: Path, recipe: str | None) -> Run:
    defined = runpy.run_path(str(path))
    recipes: dict[str, Any] = defined.get("RECIPES", {})
    if recipe is not None and recipe not in recipes:
        there = f"its recipes are {', '.join(recipes)}" if recipes else "it has one recipe: leave recipe= out"
        raise ValueError(f"{path.stem} has no recipe {recipe!r}: {there}")
    run = defined.get("RUN") if recipe is None else recipes[recipe]
    if not isinstance(run, Run):
        raise ValueError(f"{path} defines no run: it must set RUN = Run(...), and RUN is a {type(run).__name__}")
    if run.name:
        return run
    return dataclasses.replace(run, name=path.stem if recipe is None else f"{path.stem}-{recipe}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says when it cannot write, as a ValueError with the way out."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}. Nothing was overwritten. Make room or give permission, "
            f"and resume; or choose another folder"
        ) from error


def new_folder(root: Path, name: str) -> Path:
    """Make root/name-n for the first n that is not taken, also by a run that begins at this moment."""
    n = 1
    while not _made(root / f"{name}-{n}"):
        n += 1
    return root / f"{name}-{n}"


def _made(folder: Path) -> bool:
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            return False
    return True


def begin(folder: Path) -> None:
    """Make the folder of a new run. One that holds a run already is refused."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: a run needs a folder, choose another name")
    if any(path.name == RUN_FILE or path.suffix in (".jsonl", ".safetensors") for path in folder.glob("[!.]*")):
        raise ValueError(f"{folder} holds a run already: resume it, or choose another folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def remove_unbegun(folder: Path) -> None:
    """Take away the folder of a run that failed before it began, as one with a mistyped field does."""
    if any(path.name != LOCK for path in folder.glob("*")):
        return
    with suppress(OSError):  # what cannot be taken away stays
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def write_run(folder: Path, run: Run, config: Config) -> None:
    form = {"run": run.to_json(), "model": to_json(config)}
    with writing(folder / RUN_FILE):
        write_atomically(folder / RUN_FILE, (json.dumps(form, indent=2) + "\n").encode())


def read_run(folder: Path) -> tuple[Run, Config]:
    """The run of a folder and its model's config, as it was then: a preset may have changed since."""
    path = folder / RUN_FILE
    if not path.is_file():
        raise ValueError(f"{folder} holds no run to resume: there is no {path}")
    try:
        form: Any = json.loads(path.read_text())
        run, model = form["run"], form["model"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged, or no run of linattn: {type(error).__name__}: {error}") from error
    return run_from_json(run, path), from_json(model, path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process, however that ends. Held by another: an error."""
    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        yield
        return
    with writing(folder / LOCK):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"another process is training in {folder}: wait for it, or end it first") from None
    except OSError:
        pass  # a file system without locks
    try:
        for left in (*folder.glob(".*.*.*"), *folder.glob("samples/.*.*.*")):
            left.unlink(missing_ok=True)  # half-written by a process that was killed
        yield
    finally:
        os.close(handle)
