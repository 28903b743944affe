"""How far a long wait has come: a bar on a terminal, one line in a log."""

from __future__ import annotations

import sys
from typing import Literal


class Bar:
    """A bar on stderr while it is open. `total`, `update`, `reset` and `close` are also what pooch asks of a bar."""

    def __init__(self, label: str, total: int = 0, unit: Literal["bytes", "files"] = "files"):
        from rich import progress  # here, so that importing linattn does not import rich
        from rich.console import Console

        console = Console(file=sys.stderr)
        amount = progress.DownloadColumn() if unit == "bytes" else progress.MofNCompleteColumn()
        columns = ("{task.description}", progress.BarColumn(), amount, progress.TimeRemainingColumn())
        # transient: the bar is gone when the work is done, as it is no result
        self._progress = progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(label, total=total or None)
        if console.is_terminal:
            self._progress.start()
        else:
            print(label, file=console.file, flush=True)

    @property
    def total(self) -> int:
        return int(self._progress.tasks[0].total or 0)

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    def update(self, amount: int) -> None:
        self._progress.advance(self._task, amount)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.stop()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
