"""Jobs side by side, by a clock, with an end at any time.

    session = Session(folder, sizes, device="cuda", workers=6, minutes=9)
    session.go_on()          True where nothing is left to do

A worker is a process that does one job after the other; jobs that are timed run alone. With workers=0 they run in this
process. What a session stops (Ctrl-C, or the minutes are over) is done again by the next, all that was found is kept. A
worker that dies takes one job with it, which is noted, and another takes its place.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from linattn.bench.machine import num_cores
from linattn.study.folder import Folder
from linattn.study.jobs import PARTS, Job, Missing
from linattn.study.plan import plan, still_hidden
from linattn.study.sizes import Sizes

MARGIN = 1.5  # times what a job is expected to take, is what must be left of the minutes
TICK = 0.5  # seconds between two looks at the clock
Line = dict[str, Any]


def answer(job: Job, device: str, threads: int) -> Line:
    """Do a job; the line that is written of it."""
    from linattn.study.kinds import do  # here: a worker brings in what the parent does not need

    torch.set_num_threads(threads)
    torch.manual_seed(job.settings.get("seed", 0))
    begun = time.perf_counter()
    try:
        found = do(job, device)
    except Missing as error:
        return {"line": "missing", "part": job.part, "why": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({where.filename.rpartition('linattn')[2]}, line {where.lineno})"
        return {"line": "failed", "id": job.id, "why": why}
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # for those beside it
    line = {"line": "result", "id": job.id, "part": job.part, "settings": dict(job.settings)}
    return line | {"seconds": round(time.perf_counter() - begun, 3), "found": found}


def serve(inbox: Connection, device: str) -> None:
    """A worker: jobs in, lines out, until the door closes. Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            job, threads = inbox.recv()
            inbox.send(answer(job, device, threads))
    except (EOFError, BrokenPipeError):
        pass


class Worker:
    """The parent's end of a worker."""

    def __init__(self, device: str):
        context = multiprocessing.get_context("spawn")  # CUDA and threads do not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, device))  # no daemon: torch.compile starts processes
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.begun = 0.0

    def give(self, job: Job, threads: int) -> None:
        self.job, self.begun = job, time.monotonic()
        self.pipe.send((job, threads))

    def take(self) -> Line:
        """The line of its job, now that there is one; of a worker that died, what of."""
        job, self.job = self.job, None
        assert job is not None
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return {"line": "failed", "id": job.id, "why": f"its process ended with {self.process.exitcode}"}

    @property
    def dead(self) -> bool:
        return self.process.exitcode is not None

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


@dataclass
class Session:
    """One sitting. `say` is told of every line as it comes, with the seconds that are left."""

    folder: Folder
    sizes: Sizes
    device: str = "cpu"
    workers: int = 1
    minutes: float | None = None
    only: Iterable[str] = PARTS
    say: Callable[[Line, float, int], None] = lambda line, left, jobs: None
    paces: dict[str, list[float]] = field(default_factory=dict)  # of each part: seconds taken, and expected
    known: tuple[int, ...] | None = None  # how much was known when the plan was made
    planned: list[Job] = field(default_factory=list)

    def go_on(self) -> bool:
        """Until nothing is left (True), the minutes are over, or Ctrl-C."""
        self.begun = time.monotonic()
        self.threads = max(1, num_cores() // max(1, self.workers))
        pool: list[Worker] = []
        try:
            if not self.workers:
                self._by_itself()
            else:
                self._side_by_side(pool)
        finally:
            for worker in pool:
                worker.end()
        return not self.todo()

    def todo(self) -> list[Job]:
        study = self.folder.study
        known = (len(study.results), len(study.missing), len(study.failed))
        if known != self.known:  # a plan is made anew where something was added
            self.known = known
            jobs = plan(self.sizes, study, self.device, self.only)
            self.planned = [job for job in jobs if not study.settled(job)]
        return self.planned

    def time_left(self) -> float:
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.monotonic() - self.begun)

    def fits(self, job: Job) -> bool:
        """Whether a job can be expected to end within the minutes."""
        return self.time_left() >= MARGIN * self.expected(job)

    def expected(self, job: Job) -> float:
        """Its seconds here, by what jobs of its part, or all jobs, took so far."""
        taken, planned = self.paces.get(job.part) or self.paces.get("", [1.0, 1.0])
        return job.seconds * taken / planned

    def seconds_left(self, jobs: list[Job]) -> float:
        """Of these jobs and those still to come of them, spread over the workers."""
        hidden = still_hidden(self.sizes, self.folder.study, self.only)
        taken, planned = self.paces.get("", [1.0, 1.0])
        shared = sum(self.expected(job) for job in jobs if not job.alone) + hidden * taken / planned
        return shared / max(1, self.workers) + sum(self.expected(job) for job in jobs if job.alone)

    def settle(self, line: Line, job: Job) -> None:
        """Write what came of a job."""
        if line["line"] == "result":
            line["session"] = len(self.folder.study.sessions)
            for key in (job.part, ""):
                pace = self.paces.setdefault(key, [0.0, 0.0])
                pace[0], pace[1] = pace[0] + line["seconds"], pace[1] + job.seconds
        self.folder.add(line)
        jobs = self.todo()
        self.say(line, self.seconds_left(jobs), len(jobs))

    def _by_itself(self) -> None:
        while job := next((job for job in self.todo() if self.fits(job)), None):
            self.settle(answer(job, self.device, num_cores()), job)

    def _side_by_side(self, pool: list[Worker]) -> None:
        pool += [Worker(self.device) for _ in range(self.workers)]
        while True:
            self._hand_out(pool)
            busy = [worker for worker in pool if worker.job]
            if not busy or self.time_left() <= 0:
                return
            for pipe in wait([worker.pipe for worker in busy], timeout=TICK):
                worker = next(worker for worker in busy if worker.pipe is pipe)
                job = worker.job
                assert job is not None
                self.settle(worker.take(), job)
                if worker.dead:
                    pool.remove(worker)
                    pool.append(Worker(self.device))

    def _hand_out(self, pool: list[Worker]) -> None:
        """A job to every worker that has none; one that must run alone waits until all have none."""
        running = [worker.job for worker in pool if worker.job]
        if any(job.alone for job in running):
            return
        taken = {job.id for job in running}
        for job in [job for job in self.todo() if job.id not in taken and self.fits(job)]:
            free = next((worker for worker in pool if not worker.job), None)
            if free is None:
                return
            if job.alone:
                if len(taken) == 0:
                    free.give(job, num_cores())
                return
            free.give(job, self.threads)
            taken.add(job.id)
