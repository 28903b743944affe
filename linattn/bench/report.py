"""What was measured, as values: rows, and the report that holds them, printed as a table and kept as JSON.

The file of a report is read back by `Report.load` to the same value. Times are seconds, memory is bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn.bench.machine import environment, result_name, results_folder
from linattn.bench.measure import Cell
from linattn.state import write_atomically

SOFTMAX = "sdpa"
LABELS = {SOFTMAX: "SDPA"}


@dataclass(frozen=True)
class Row:
    """One size, and what each rival costs there. `mode` is "forward" or "forward+backward"."""

    device: str
    dtype: str
    batch: int
    heads: int
    width: int
    mode: str
    tokens: int
    cells: dict[str, Cell]

    @property
    def ratios(self) -> dict[str, float]:
        """Each rival's time over that of softmax: below 1 is faster."""
        if SOFTMAX not in self.cells:
            return {}
        softmax = self.cells[SOFTMAX].seconds
        return {name: cell.seconds / softmax for name, cell in self.cells.items() if name != SOFTMAX}

    def guessed(self, name: str) -> bool:
        """Whether the ratio of `name` rests on an extrapolated time, its own or that of softmax."""
        return self.cells[name].extrapolated or self.cells[SOFTMAX].extrapolated

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ratios": self.ratios}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Row:
        cells = {name: Cell(**cell) for name, cell in data["cells"].items()}
        return cls(**{**{key: x for key, x in data.items() if key != "ratios"}, "cells": cells})


@dataclass(frozen=True)
class Verdict:
    """A claim about speed or memory, and what the numbers say: "PASS", "MISS", or "OPEN" where they are too few."""

    claim: str
    outcome: str
    seen: str


@dataclass
class Report:
    """One run: where and when, the table, the long sequences, what was left out and why, and the verdicts."""

    what: str
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=environment)
    table: list[Row] = field(default_factory=list)
    long: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rows = {name: [row.to_json() for row in plain[name]] for name in ("table", "long")}
        return {**plain, **rows, "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        rows = {name: [Row.from_json(row) for row in data[name]] for name in ("table", "long")}
        return cls(**{**data, **rows, "verdicts": [Verdict(**verdict) for verdict in data["verdicts"]]})

    def save(self, out: Path | None = None) -> Path:
        """Write the JSON file: `out`, or in the folder `out`, or where measurements are kept."""
        return save_json(self.to_json(), self.what + ("-partial" if self.interrupted else ""), out)

    @classmethod
    def load(cls, path: Path) -> Report:
        return cls.from_json(json.loads(path.read_text()))


def save_json(data: dict[str, Any], what: str, out: Path | None = None) -> Path:
    """Write `data`, which holds its environment, under the name that it has from there."""
    path = results_folder() if out is None else out
    if path.suffix != ".json":
        path = path / result_name(data["environment"], what)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    return path


def heading(environment: dict[str, Any]) -> str:
    """Where and with what, in two lines; a third where the machine is busy with something else."""
    about, with_ = environment["machine"], environment["versions"]
    memory = "" if about["memory_bytes"] is None else f", {about['memory_bytes'] / 2**30:.0f} GB"
    gpu = f", {about['gpu']}" if about["gpu"] else ""
    cores = f"{counted(about['cores'], 'core')}, {counted(about['threads'], 'thread')}"
    lines = [
        f"{about['cpu']}, {cores}, {about['instructions']}{memory}{gpu}",
        f"linattn {with_['linattn']}, torch {with_['torch']}, Python {with_['python']}, {with_['os']}",
    ]
    load = environment["load_average"]
    if load is not None and load > 0.5:
        lines.append(f"The load average is {load}: other programs are running, and absolute times are too long.")
    return "\n".join(lines)


def table_head(row: Row, names: Iterable[str]) -> str:
    """What stands above the rows of one device, width and mode."""
    names = list(names)
    title = f"{_shape(row)}; time of one call, peak memory in MB above the inputs)"
    times = "".join(f"{label(name):>11}" for name in names)
    ratios = "".join(f"{label(name) + '/SDPA':>17}" for name in names[:1])
    peaks = "".join(f"{label(name):>10}" for name in names)
    return f"{title}\n{'T':>9}{times}{ratios}{'MB:':>6}{peaks}"


def table_line(row: Row, names: Iterable[str]) -> str:
    names = list(names)
    cells = [row.cells.get(name) for name in names]
    times = "".join(f"{shown_time(cell):>11}" for cell in cells)
    ratio = row.ratios.get(names[0])
    shown = "-" if ratio is None else ("≈ " if row.guessed(names[0]) else "") + f"{ratio:.3g}"
    peaks = "".join(f"{shown_bytes(cell):>10}" for cell in cells)
    return f"{row.tokens:>9,}{times}{shown:>17}{'':6}{peaks}"


def long_head(row: Row) -> str:
    columns = f"{'T':>9}{'time':>11}{'ns a token':>13}{'in system':>14}{'peak MB':>11}{'bytes a token':>16}"
    return f"{_shape(row)}; linear attention alone)\n{columns}"


def long_line(row: Row) -> str:
    (cell,) = row.cells.values()
    peak = "-" if cell.peak_bytes is None else f"{cell.peak_bytes / row.tokens:,.0f}"
    nanoseconds = f"{cell.seconds / row.tokens * 1e9:,.0f}"
    system = "-" if cell.system_seconds is None else f"{cell.system_seconds / row.tokens * 1e9:,.0f}"
    return f"{row.tokens:>9,}{shown_time(cell):>11}{nanoseconds:>13}{system:>14}{shown_bytes(cell):>11}{peak:>16}"


def _shape(row: Row) -> str:
    return f"{row.mode}, D = {row.width}   ({row.device}, {row.dtype}, B = {row.batch}, H = {row.heads}"


def label(name: str) -> str:
    return LABELS.get(name, name)


def shown_time(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return ("≈ " if cell.extrapolated else "") + seconds_in_words(cell.seconds)


def shown_bytes(cell: Cell | None) -> str:
    return "-" if cell is None or cell.peak_bytes is None else f"{cell.peak_bytes / 1e6:,.1f}"


def seconds_in_words(seconds: float) -> str:
    """Three digits and a unit: 61.3 µs, 1.20 ms, 97.0 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size or unit == "µs":
            number = seconds / size
            return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"
    raise AssertionError


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
