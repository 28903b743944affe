"""`linattn study`: the study on this machine, from where it stands to its end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.bench.machine import num_cores
from linattn.bench.report import heading, save_json
from linattn.study.folder import Folder
from linattn.study.jobs import PARTS, Study
from linattn.study.plan import plan
from linattn.study.sizes import SIZES
from linattn.study.work import Line, Session
from linattn.train.metrics import clock
from linattn.train.setup import choose_device

GPU_WORKERS = 6
LEAST = 2.0  # seconds between two lines of progress where the output is no terminal


def study(
    quick: Annotated[bool, typer.Option("--quick", help="Small models: under five minutes on two CPU cores.")] = False,
    only: Annotated[str, typer.Option(help=f"Some of its parts, as a,b: {', '.join(PARTS)}.")] = "all",
    minutes: Annotated[float | None, typer.Option(help="Stop after so many; the next call goes on.")] = None,
    workers: Annotated[
        int | None, typer.Option(help="Small runs side by side. Default: one a core, at most 8; 6 on a GPU.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="Where everything that is known lies. Default: runs/study or runs/study-quick.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the JSON of a complete study goes. Default: where measurements are kept.")
    ] = None,
) -> None:
    """Which feature map for which task, what short sequences cost, how far it reaches: measured.

    Goes on where it was interrupted, down to the single small run: Ctrl-C, `--minutes`, or another machine (its folder
    is one small file). MNIST, enwik8, speech and music are looked for in LINATTN_DATA; a part without its data is left
    out, and named.

        linattn study --quick
        linattn study --minutes 9 --workers 6       # on a GPU, again and again until it is complete
        linattn report study                        # docs/study.md and its plots
    """
    sizes = SIZES["quick" if quick else "full"]
    parts = chosen(only)
    place = choose_device(device).type
    if workers is None:
        workers = GPU_WORKERS if place == "cuda" else min(num_cores(), 8)
    path = folder or Path("runs") / ("study-quick" if quick else "study")
    with Folder(path, sizes.name).opened() as opened:
        opened.begin_session(device=place, workers=workers)
        show = Show(opened.study, len(plan(sizes, opened.study, place, parts)))
        print(heading(opened.study.sessions[-1]["environment"]), file=sys.stderr)
        session = Session(opened, sizes, place, workers, minutes, parts, show.line)
        interrupted = False
        try:
            done = session.go_on()
        except KeyboardInterrupt:
            interrupted, done = True, False
        show.end()
        jobs = session.todo()
        finish(opened.study, path, done and only == "all", session.seconds_left(jobs) if jobs else 0.0, out)
    if interrupted:
        raise typer.Exit(130)


def chosen(only: str) -> tuple[str, ...]:
    if only == "all":
        return PARTS
    names = tuple(name.strip() for name in only.split(",") if name.strip())
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise ValueError(f"no part {', '.join(unknown) or only!r} in the study: there are {', '.join(PARTS)}")
    return names


def finish(study: Study, path: Path, done: bool, left: float, out: Path | None) -> None:
    """Say where it stands; a complete study becomes one JSON file."""
    study.to_come = left
    for part, why in study.missing.items():
        print(f"left out: {part}: {why.splitlines()[0]}")
    for job, why in study.failed.items():
        print(f"failed: {job}: {why}")
    print(f"{len(study.results):,} runs in {path}")
    if left:
        print(f"about {clock(left)} are left; the same command goes on")
    elif done:
        print(f"written: {save_json(study.to_json(), study.to_json()['what'], out)}")
    print(f"linattn report study {path}")


class Show:
    """The last run and the time left: one line that is drawn over on a terminal, a line now and then elsewhere."""

    def __init__(self, study: Study, jobs: int):
        self.study, self.jobs = study, jobs
        self.live, self.shown = sys.stderr.isatty(), 0.0

    def line(self, line: Line, left: float, jobs: int) -> None:
        if not self.live and time.monotonic() - self.shown < LEAST and jobs:
            return
        self.shown = time.monotonic()
        text = f"{len(self.study.results):>4} done, {jobs} known to come, {clock(left)} left   {said(line)}"
        end = "" if self.live else "\n"
        print(("\r\x1b[K" if self.live else "") + text[:160], end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print(file=sys.stderr)


def said(line: Line) -> str:
    if line["line"] == "missing":
        return f"{line['part']}: left out"
    if line["line"] == "failed":
        return f"{line['id']}: failed"
    found: dict[str, Any] = line["found"]
    score = found.get("score")
    return line["id"] + (f": {score:.4g}" if isinstance(score, float) else "")
