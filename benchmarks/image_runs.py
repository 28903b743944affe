"""The trainings behind docs/results.md, cut into calls of at most ten minutes on a machine that keeps nothing.

What    A plan: which runs fill each call on one GPU, alone or side by side. A call trains until its time is over, then
        leaves in its folder what the next one needs: packed checkpoints of runs that are not done (files of at most 15
        MiB), and of those that are done weights in int8 with their card, and one JSON of figures and curves.
Why     Rivals are compared at equal wall-clock, so each has the GPU to itself; searches share it.
How     python -m benchmarks.image_runs plan
        LINATTN_DATA=… python -m benchmarks.image_runs call mnist-linear --out $OUT
        python -m benchmarks.image_runs call mnist-paper --out $OUT [--carry FOLDER]   FOLDER: what its last call left
        linattn report images                                the page, from the JSON files in benchmarks/results
Out     $OUT/NAME/portable-…, or $OUT/NAME.safetensors, $OUT/NAME.md and $OUT/<date>-<machine>-images.json
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from linattn.bench.image_record import record
from linattn.train.portable import pack, shards

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
CALL = 585.0  # seconds of a call, with what comes before and after training
AFTER = 75.0  # of these, for evaluating, packing and recording
CHECKED = 256  # images whose bits/dim are counted a second time
INTERRUPTED = 130  # how `linattn train` exits when it was asked to stop
LINATTN = (sys.executable, "-m", "linattn.cli.main")
ON_GPU = ("sample_every=0", "samples=1", "compile=true")
EAGER = ("sample_every=0", "samples=1")  # Reformer sorts, and its rounds are many small kernels: compiling them is slow


@dataclass(frozen=True)
class Job:
    """One run: its name, and what `linattn train` is told."""

    name: str
    told: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Jobs that share a GPU, why, and how many calls they take. `test`: whether their test set is read at the end."""

    why: str
    jobs: tuple[Job, ...]
    calls: int = 1
    test: bool = True


def rival(
    data: str, minutes: int, batch: tuple[str, ...], *changes: str, how: Sequence[str] = ON_GPU
) -> tuple[Job, ...]:
    name = "-".join([data, *(change.partition("=")[2] for change in changes)])
    return (Job(name, (data, f"minutes={minutes}", *batch, *changes, *how)),)


def search(data: str, minutes: int, variants: dict[str, tuple[str, ...]]) -> tuple[Job, ...]:
    base = (data, "recipe=best", f"minutes={minutes}", *EAGER)
    return tuple(Job(f"{data}-search-{name}", (*base, *changes)) for name, changes in variants.items())


MNIST_VARIANTS: dict[str, tuple[str, ...]] = {
    "best": (),
    "logistics": ("head=logistics",),
    "eight-heads": ("num_heads=8",),
    "exp": ("feature_map=exp",),
    "dropout-2": ("dropout=0.2",),
    "lr-3": ("lr=3e-3",),
}
CIFAR_VARIANTS: dict[str, tuple[str, ...]] = {
    "best": (),
    "eight-heads": ("num_heads=8",),
    "exp": ("feature_map=exp",),
    "lr-2": ("lr=2e-3",),
}
SMALLER = ("accumulate=4",)  # the same batch in parts, for what keeps more than its activations
CALLS: dict[str, Call] = {
    "mnist-linear": Call("equal wall-clock", rival("mnist", 5, ())),
    "mnist-softmax": Call("equal wall-clock", rival("mnist", 5, (), "attention=softmax")),
    "mnist-lsh-1": Call("equal wall-clock", rival("mnist", 5, SMALLER, "attention=reformer", "rounds=1", how=EAGER)),
    "mnist-lsh-4": Call("equal wall-clock", rival("mnist", 5, SMALLER, "attention=reformer", "rounds=4", how=EAGER)),
    "mnist-search": Call("which changes of `best` help", search("mnist", 7, MNIST_VARIANTS), test=False),
    "mnist-paper": Call("≤ 0.644 within 20 minutes", (Job("mnist-paper", ("mnist", *ON_GPU)),), calls=3),
    "mnist-best": Call("≤ 0.60", (Job("mnist-best", ("mnist", "recipe=best", *ON_GPU)),), calls=5),
    "cifar10-linear": Call("equal wall-clock", rival("cifar10", 10, ()), calls=2),
    "cifar10-softmax": Call("equal wall-clock", rival("cifar10", 10, SMALLER, "attention=softmax"), calls=2),
    "cifar10-lsh-1": Call(
        "equal wall-clock", rival("cifar10", 10, SMALLER, "attention=reformer", "rounds=1", how=EAGER), calls=2
    ),
    "cifar10-lsh-4": Call(
        "equal wall-clock", rival("cifar10", 10, SMALLER, "attention=reformer", "rounds=4", how=EAGER), calls=2
    ),
    "cifar10-search": Call("which changes of `best` help", search("cifar10", 7, CIFAR_VARIANTS), test=False),
    "cifar10-paper": Call("≤ 3.40 within 60 minutes", (Job("cifar10-paper", ("cifar10", *ON_GPU)),), calls=8),
    "cifar10-best": Call("≤ 3.20", (Job("cifar10-best", ("cifar10", "recipe=best", *ON_GPU)),), calls=8),
}


@app.command()
def plan() -> None:
    """What is to be run, in this order, and what it would take."""
    print("python -m benchmarks.gpu_check                      first of all: a fast wrong kernel is not fast")
    print("python -m benchmarks.training mnist [compile=true]  the speed of a step, and its bound")
    for name, call in CALLS.items():
        print(f"python -m benchmarks.image_runs call {name:16} {call.calls} × 10 minutes: {call.why}")
        for job in call.jobs:
            print(f"    linattn train {' '.join(job.told)}")
    print("linattn bench generate --device cuda                images a second")
    print(f"{sum(call.calls for call in CALLS.values())} calls")


@app.command()
def call(
    name: Annotated[str, typer.Argument(help="Of the plan.")],
    out: Annotated[Path, typer.Option(help="What is to be kept goes here.")],
    carry: Annotated[Path | None, typer.Option(help="What the call before left.")] = None,
    work: Annotated[Path, typer.Option(help="Where runs live meanwhile.")] = Path("runs"),
    seconds: Annotated[float, typer.Option(help="How long the call may take in all.")] = CALL,
) -> None:
    """Train the jobs of one call until its time is over, and leave what is needed."""
    if name not in CALLS:
        raise typer.BadParameter(f"no call {name!r}: there are {', '.join(CALLS)}")
    begin, chosen = time.monotonic(), CALLS[name]
    jobs = [job for job in chosen.jobs if carry is None or packed(job, carry)]  # of a call that goes on: what is left
    processes = [started(command(job, work, carry)) for job in jobs]
    codes = ended(processes, begin + seconds - AFTER)
    done = []
    for job, code in zip(jobs, codes, strict=True):
        folder = work / job.name
        if code == INTERRUPTED:
            files = pack(folder, out / job.name)
            print(f"{job.name} goes on in another call, from {len(files)} files in {out / job.name}", flush=True)
        else:
            finish(folder, job.name, out, chosen.test)
            done.append(folder)
    if done:
        print(f"recorded: {record(done, out)}")


def packed(job: Job, carry: Path) -> Path | None:
    """Where a job's packed checkpoint lies."""
    return next((folder for folder in (carry / job.name, carry) if shards(folder)), None)


def command(job: Job, work: Path, carry: Path | None) -> list[str]:
    """A run from its beginning, or from what was carried."""
    folder = work / job.name
    if carry is None:
        return [*LINATTN, "train", *job.told, "--folder", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    for path in shards(packed(job, carry) or carry):
        shutil.copy(path, folder)
    return [*LINATTN, "train", str(folder), "--resume"]


def ended(processes: Sequence[subprocess.Popen], until: float) -> list[int]:
    """The exit codes; at `until` those that still train are asked to stop, which leaves a checkpoint."""
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(0.5)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    codes = [process.wait() for process in processes]
    if any(code not in (0, INTERRUPTED) for code in codes):
        raise SystemExit(f"a training failed: exit codes {codes}")
    return codes


def finish(folder: Path, name: str, out: Path, test: bool) -> None:
    """The test set, once, and the second count; then small weights to keep."""
    if not test:
        return
    out.mkdir(parents=True, exist_ok=True)
    through([*LINATTN, "eval", str(folder), "--check", str(CHECKED), "--record"])
    through([*LINATTN, "pack", str(folder), "--name", name, "--to", str(out)])


def started(words: Sequence[str]) -> subprocess.Popen:
    return subprocess.Popen(words)


def through(words: Sequence[str]) -> None:
    """What fails is said and does not keep the rest from being written."""
    code = subprocess.run(words, check=False).returncode
    if code:
        print(f"exit code {code}: {' '.join(words)}", flush=True)


if __name__ == "__main__":
    app()
