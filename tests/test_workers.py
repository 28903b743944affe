"""Processes that may be lost: what benchmarks on a GPU work in (benchmarks/workers.py)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.workers import Worker, spread


def work(job: str) -> str:
    if job == "die":
        os._exit(3)
    if job == "hang":
        time.sleep(60)
    if job == "fail":
        raise ValueError("no")
    return job.upper()


@pytest.fixture
def worker():
    made = Worker(work)
    yield made
    made.end()


def test_a_lost_process_costs_its_job_alone(worker):
    assert worker.ask("a", 60) == ("A", "")
    assert worker.ask("fail", 60) == (None, "ValueError: no")
    assert worker.ask("die", 60) == (None, "the process ended (exit code 3)")
    assert worker.ask("b", 60) == ("B", "")
    assert worker.ask("hang", 0.2) == (None, "it took too long and was ended")


def test_jobs_are_spread():
    jobs = ["a", "die", "b", "c"]
    found = {job: (result, said) for job, result, said in spread(work, jobs, 2, 60)}
    assert found.keys() == set(jobs)
    assert found["die"][0] is None and found["c"] == ("C", "")


def test_none_is_begun_after_the_end():
    assert list(spread(work, ["a", "b"], 2, 60, until=time.monotonic() - 1)) == []
