"""The one training loop, for images, sequences and texts: next values from the values before them.

    loss = mean over predicted values of -log p(x_{t+1} | x_1 … x_t)          batch → nats → gradient → clip → step

    result = train(load_run("digits"))                          # runs/digits-1
    result = train(None, "runs/digits-1", resume=True)          # goes on from its newest checkpoint, or a packed one

On the CPU an interrupted and resumed run ends with the same weights as one that was not, bit for bit (the threads being
as many). With `minutes` the learning rate follows the clock, and no two runs are the same.

Axes:  B batch   T time
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from linattn.models import Config, SpeechConfig
from linattn.train import checkpoint
from linattn.train.config import CHANGEABLE, Run
from linattn.train.portable import unpack
from linattn.train.run_folder import alone, begin, new_folder, read_run, remove_unbegun, write_run
from linattn.train.speech.trainer import SpeechTrainer
from linattn.train.trainer import Sample, Trainer


@dataclass(frozen=True)
class Result:
    """Where a run stands: `evaluation` is the line of metrics of its last evaluation, where there was one."""

    folder: Path
    step: int
    seconds: float
    evaluation: dict[str, Any] | None
    interrupted: bool


def train(
    run: Run | None,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    sample: Sample | None = None,
    quiet: bool = False,
) -> Result:
    """Train, from the start or with `resume` from the newest whole checkpoint of `folder`.

    folder=None is runs/<name>-<n>. To resume, run=None goes on as the run was; a run given then may differ in how long,
    how often and where (CHANGEABLE). Ctrl-C, or SIGTERM, finishes the step and writes a checkpoint; the second
    Ctrl-C does not wait. Torch's random state and threads are left as they were.
    """
    folder = None if folder is None else Path(folder).expanduser()
    made = False
    if resume:
        if folder is None:
            raise ValueError("which run is to be resumed? Give its folder")
        unpack(folder)
        recorded, config = read_run(folder)
        run = recorded if run is None else run
        _check_changes(recorded, run, folder)
    else:
        if run is None:
            raise ValueError("what is to be trained? Give a run, or the folder of one with resume=True")
        config = None
        made = folder is None or not folder.exists()
        if folder is None:
            folder = new_folder(Path("runs"), run.name or run.preset)
        begin(folder)
    try:
        with alone(folder), _own_randomness(run):
            return _train(run, config, folder, sample, quiet)
    except BaseException:
        if made:
            remove_unbegun(folder)
        raise


def _train(run: Run, config: Config | None, folder: Path, sample: Sample | None, quiet: bool) -> Result:
    """A run from its beginning; with the config that it was begun with, from its newest checkpoint."""
    found, damage = (None, []) if config is None else checkpoint.newest(folder)
    made = SpeechTrainer if isinstance(run.config(), SpeechConfig) else Trainer
    trainer = made(run, config, folder, sample=sample, quiet=quiet)
    if found is not None:
        trainer.restore(found)
    write_run(folder, run, trainer.model.config)
    trainer.open_metrics()
    try:
        for text in damage:
            trainer.show.say(f"going on from an older checkpoint, of step {trainer.step}: {text}")
        trainer.introduce()
        with _stop_on_signals() as stop:
            trainer.go_on(stop)
        if stop.is_set():
            trainer.show.say(
                f"stopped after step {trainer.step:,}. To go on from here:  linattn train {folder} --resume"
            )
    finally:
        trainer.close()
    return Result(folder, trainer.step, trainer.seconds, trainer.evaluation, stop.is_set())


def _check_changes(recorded: Run, run: Run, folder: Path) -> None:
    fields = [f.name for f in dataclasses.fields(Run) if f.name not in CHANGEABLE]
    changed = [name for name in fields if getattr(run, name) != getattr(recorded, name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"{folder} was begun with {name}={getattr(recorded, name)!r}, not {getattr(run, name)!r}: resuming may "
            f"change {', '.join(CHANGEABLE)}. For another {name} begin a new run"
        )


@contextmanager
def _own_randomness(run: Run) -> Iterator[None]:
    """Torch's random state and threads, of the run while it lasts and the caller's afterwards."""
    threads = torch.get_num_threads()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(run.seed)
        torch.set_num_threads(run.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets. Signals belong to the main thread; elsewhere it stays unset."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(*_: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        for number in before:
            signal.signal(number, ask)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
