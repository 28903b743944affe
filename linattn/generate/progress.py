"""How far generation is, on a terminal. Nothing draws in the background: that would take time away from the model."""

from __future__ import annotations

import sys
import time

EVERY = 0.1  # seconds between two lines


class Progress:
    """One line on stderr, rewritten: `312 of 784 values, 8 rows, 1,240 values/s, 3 s left`."""

    def __init__(self, total: int, rows: int, shown: bool | None):
        """total: the steps to come. shown=None: on a terminal only."""
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._total, self._rows, self._done = total, rows, 0
        self._begin = self._last = time.monotonic()

    def step(self, steps: int = 1) -> None:
        self._done += steps
        now = time.monotonic()
        if self._shown and now - self._last >= EVERY:
            self._last = now
            print(f"\r\x1b[K{self.line(now - self._begin)}", end="", file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        speed = self._done / max(seconds, 1e-9)
        rows = "" if self._rows == 1 else f", {self._rows:,} rows"
        left = (self._total - self._done) / speed
        return f"{self._done:,} of {self._total:,} values{rows}, {speed * self._rows:,.0f} values/s, {left:,.0f} s left"

    def close(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
