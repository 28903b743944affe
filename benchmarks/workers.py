"""Work on a GPU in processes of their own: one that dies, hangs or loses its device costs its job and no other.

After an illegal access to memory every call of the same process fails, so a worker that finds its device lost ends,
and the next job gets a new one. `ask` gives a job to a single worker, for timing; `spread` gives jobs to many, for
compiling and checking.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Answer = tuple[Any, str]  # what the job returned, or why there is nothing


class Worker:
    """A process that calls `function` on one job after the other; begun at its first job, and anew after a loss."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self._process: Any = None
        self.connection: Any = None
        self.job: Any = None
        self.deadline = 0.0

    def begin(self, job: Any, seconds: float) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._function, theirs), daemon=True)
            self._process.start()
            theirs.close()
        self.job, self.deadline = job, time.monotonic() + seconds
        self.connection.send(job)

    def finish(self) -> Answer:
        """The answer to the job, waiting for it until its time is over."""
        try:
            if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                self.end()
                return None, "it took too long and was ended"
            result, said, lost = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.end()
            return None, f"the process ended (exit code {code})"
        if lost:
            self.end()
        return result, said

    def ask(self, job: Any, seconds: float) -> Answer:
        self.begin(job, seconds)
        return self.finish()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.connection.close()
        self._process = None


def spread(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: int, seconds: float, until: float = float("inf")
) -> Iterator[tuple[Any, Any, str]]:
    """(job, result, why there is none) in the order in which jobs end; none is begun after `until` (monotonic)."""
    left, idle, busy = list(reversed(jobs)), [Worker(function) for _ in range(workers)], {}
    try:
        while busy or left:
            while left and idle and time.monotonic() < until:
                worker = idle.pop()
                worker.begin(left.pop(), seconds)
                busy[worker.connection] = worker
            if not busy:
                return
            soonest = min(worker.deadline for worker in busy.values())
            ready = wait(list(busy), max(0.0, soonest - time.monotonic()))
            late = [c for c, worker in busy.items() if time.monotonic() >= worker.deadline]
            for connection in {*ready, *late}:
                worker = busy.pop(connection)
                idle.append(worker)
                yield (worker.job, *worker.finish())
    finally:
        for worker in (*idle, *busy.values()):
            worker.end()


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            result, said = function(job), ""
        except Exception as error:  # one job must not end the others
            result, said = None, f"{type(error).__name__}: {str(error)[:300]}"
        lost = _device_lost()
        connection.send((result, said, lost))
        if lost:
            return


def _device_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
