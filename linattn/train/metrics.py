"""What a run reports: JSON lines in its folder, and a live line on the terminal.

    {"kind": "train", "step": 50, "nats": 1.71, "bits": 2.47, "lr": 0.001, "grad_norm": 0.8,
     "epoch": 0.41, "tokens_per_second": 41200, "seconds": 5.0}                     means since the line before
    {"kind": "eval", "step": 500, "split": "dev", "examples": 200, "nats": 0.98, "bits": 1.42, "epoch": 4.1,
     "seconds": 50.2}

`nats` and `bits` are means over predicted values (see evaluate.py), `epoch` how often the data has been seen, `seconds`
the time of training with its evaluations, over all sessions of the run, without the first update of each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linattn.state import write_atomically
from linattn.train.run_folder import writing

FILE = "metrics.jsonl"
UNITS = {"images": "bits/dim", "text": "bits/byte", "sequences": "bits/token", "speech": "bits/label"}


class Metrics:
    """The file of a run. A line is in the system's hands when `write` returns, and on the disk after `sync`."""

    def __init__(self, folder: Path, last_step: int):
        """Opened at `last_step`: what an interrupted session wrote after it is taken out, and half a line with it."""
        self.path = folder / FILE
        with writing(self.path):
            kept = [line for line in read_lines(self.path) if line["step"] <= last_step]
            write_atomically(self.path, b"".join(map(_text, kept)))
            # unbuffered: a line that the disk has no room for is not tried again when the file is closed
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def write(self, line: Mapping[str, Any]) -> None:
        with writing(self.path):
            self.file.write(_text(line))

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; [] where there is none. The last one may be cut off, no other."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [_read_line(path, number, line) for number, line in enumerate(whole, 1)]


def _read_line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no JSON: {text[:80]!r}. Mend or remove it") from error


def _text(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


class Show:
    """Where the run stands, on stderr: a bar that moves on a terminal, a line at each log elsewhere."""

    def __init__(self, steps: int | None, unit: str, *, quiet: bool = False):
        from rich import progress  # here, so that importing linattn does not import rich
        from rich.console import Console

        self.steps, self.unit, self.quiet = steps, unit, quiet
        self.console = Console(file=sys.stderr, highlight=False)
        self.live = self.console.is_terminal and not quiet
        columns = (progress.BarColumn(24), progress.TextColumn("{task.description}"))
        self.bar = progress.Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.bar.add_task("the first steps", total=steps)
        if self.live:
            self.bar.start()

    def train_line(self, line: Mapping[str, Any], left: float | None) -> None:
        """A line of means, and the seconds that are left."""
        text = in_words(line, self.unit, self.steps, left)
        if self.live:
            self.bar.update(self.task, completed=line["step"], description=text)
        else:
            self.say(text)

    def eval_line(self, line: Mapping[str, Any]) -> None:
        """A line that stays, above the bar."""
        self.say(in_words(line, self.unit))

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


def in_words(line: Mapping[str, Any], unit: str, steps: int | None = None, left: float | None = None) -> str:
    """A line of metrics for people."""
    words = [f"step {line['step']:,}" + (f"/{steps:,}" if steps else "")]
    if line["kind"] == "eval":
        words.append(f"{line['split']}, {line['examples']:,} examples")
    words.append(f"{line['bits']:.4f} {unit}")
    if "error_rate" in line:
        words.append(f"{line['error_rate']:.2%} of labels wrong")
    if "tokens_per_second" in line:
        words.append(f"{short_count(line['tokens_per_second'])} tokens/s")
    if left is not None:
        words.append(f"{clock(left)} left")
    return "  ".join(words)


def short_count(count: int | float) -> str:
    """Three digits: 950, 41.2k, 1.25M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def clock(seconds: int | float) -> str:
    """0:42, 12:05, 3:00:00"""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
