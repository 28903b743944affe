"""What a call costs, in time and in memory, with rivals measured side by side.

The rivals of one race take turns, and the next turn is always that of the one that has used the least time so far: what
disturbs the machine disturbs all of them alike. On the CPU a time is the lower quartile of the samples, not the
minimum, which favours whoever was sampled most often; on a GPU it is the median, and CUDA events hold the clock.
"""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

SAMPLE = 0.005  # seconds: a shorter sample is mostly clock and loop, so cheap calls are timed several at once
SETTLE = 0.01  # seconds: threads of the rival before may spin on for milliseconds, on the cores of the next one
CHEAP = 0.05  # seconds: so cheap a call is run again before it is timed, and again for its memory, when it is warm

Run = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """What one call costs: seconds, and the most memory in use above what was in use before it (None: not known).

    `system_seconds` is the part of them in which the system worked for this process, a thread: above all handing out
    memory that is written for the first time.
    """

    seconds: float
    samples: int
    peak_bytes: int | None = None
    extrapolated: bool = False
    system_seconds: float | None = None


@dataclass(frozen=True)
class Effort:
    """How long to measure: `budget` seconds and `least` samples for each rival, but one only for calls above `once`."""

    budget: float = 0.6
    least: int = 3
    once: float = 2.0


def race(runs: Mapping[str, Run], effort: Effort | None = None, device: str = "cpu") -> dict[str, Cell]:
    """Measure every run, in turns."""
    with _no_garbage_collection():
        rivals = {name: _Entrant(run, effort or Effort(), device) for name, run in runs.items()}
        while waiting := [rival for rival in rivals.values() if rival.wants_more()]:
            min(waiting, key=lambda rival: rival.spent).sample()
        return {name: rival.cell() for name, rival in rivals.items()}


def time_calls(run: Run, calls: int, device: str = "cpu") -> float:
    """Seconds a call, over `calls` calls in a row."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


class Peak:
    """The most memory in use within a `with` block, above what was in use at its start: `bytes`, None where not known.

    On Linux this is the resident memory of the process, so it is right to about a megabyte.
    """

    bytes: int | None = None

    def __init__(self, device: str = "cpu"):
        self._cuda = torch.device(device).type == "cuda"
        self._device = device

    def __enter__(self) -> Peak:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_allocated(self._device)
        else:
            self._start = _reset_peak_of_process()
        return self

    def __exit__(self, *_: object) -> None:
        end = torch.cuda.max_memory_allocated(self._device) if self._cuda else _status("VmHWM")
        if self._start is not None and end is not None:
            self.bytes = max(0, end - self._start)


class _Entrant:
    """One rival in a race: its first call, and the samples it has been given since."""

    def __init__(self, run: Run, effort: Effort, device: str):
        self.run, self.effort, self.device = run, effort, device
        with Peak(device) as peak:
            before = system_seconds()
            self.first = time_calls(run, 1, device)  # also warms up
            system = system_seconds() - before
        self.peak = peak.bytes
        self.cheap = self.first < CHEAP
        one = time_calls(run, 1, device) if self.cheap else self.first
        self.calls = max(1, math.ceil(SAMPLE / max(one, 1e-9)))
        self.samples, self.system = ([self.first], [system]) if self.first > effort.once else ([], [])
        self.spent = 0.0

    def wants_more(self) -> bool:
        if self.first > self.effort.once:
            return False
        return self.spent < self.effort.budget or len(self.samples) < self.effort.least

    def sample(self) -> None:
        if self.cheap and torch.device(self.device).type != "cuda":
            time.sleep(SETTLE)
            self.run()  # its own threads are awake now
        before = system_seconds()
        seconds = time_calls(self.run, self.calls, self.device)
        self.system.append((system_seconds() - before) / self.calls)
        self.samples.append(seconds)
        self.spent += seconds * self.calls

    def cell(self) -> Cell:
        if self.cheap:  # the first call may have loaded a library or started threads
            with Peak(self.device) as peak:
                self.run()
            self.peak = peak.bytes
        cuda = torch.device(self.device).type == "cuda"
        if cuda:
            return Cell(statistics.median(self.samples), len(self.samples), self.peak)
        seconds = lower_quartile(self.samples)
        system = self.system[self.samples.index(seconds)] if resource else None
        return Cell(seconds, len(self.samples), self.peak, system_seconds=system)


def system_seconds() -> float:
    """Seconds the system has worked for this process so far, shared among its threads; 0 where it does not say."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime / torch.get_num_threads() if resource else 0.0


def lower_quartile(samples: list[float]) -> float:
    """The sample that a quarter of them stay below; the smallest of up to four."""
    return sorted(samples)[(len(samples) - 1) // 4]


def _reset_peak_of_process() -> int | None:
    """Start the peak of the resident memory anew; what is resident now, None where the system has no such counter."""
    if sys.platform != "linux":
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what was freed but is still held would hide what the call asks for
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    """A size from /proc/self/status in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
