"""Jobs of every kind at tiny sizes; and sessions: interrupted anywhere and resumed, they find what a whole one does."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from typing import Any, ClassVar

import pytest
import torch
from sound_cases import little_ocean
from study_cases import SPEECH, TINY, found_for
from test_study import write_music

from linattn.study import data, kinds, music, speech, work
from linattn.study.folder import FILE, Folder, load
from linattn.study.jobs import Job, Missing, Study
from linattn.study.learn import Diverged
from linattn.study.plan import finals, learned, plan
from linattn.study.work import Session, Worker
from linattn.train.data import Dataset


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """TINY in the place of the quick sizes, with data that is at hand."""
    monkeypatch.setitem(kinds.SIZES, "quick", TINY)
    monkeypatch.setenv("LINATTN_DATA", str(tmp_path))
    write_music(tmp_path)
    (tmp_path / "enwik8").mkdir()
    (tmp_path / "enwik8" / "enwik8").write_bytes(bytes(range(256)) * 20)
    for cache in (data.generated, data.images, data.text, data._enwik8, music.pieces):
        cache.cache_clear()
    yield TINY
    for cache in (data.generated, data.images, data.text, data._enwik8, music.pieces):
        cache.cache_clear()


def of_every_kind(sizes):
    """One job of each kind and part, softmax attention and a map with weights among them."""
    made = {}
    for job in plan(sizes, Study("quick"), "cpu"):
        made.setdefault((job.part, job.kind), job)
    text = next(task for task in sizes.tasks if task.name == "text")
    final = learned(sizes, text, "final", "hedgehog", 8, 1, 2)
    return [*made.values(), final]


def test_every_kind_of_job_is_done(tiny):
    jobs = of_every_kind(tiny)
    assert {job.kind for job in jobs} == set(kinds.KINDS) - {"speech"}
    for job in jobs:
        torch.manual_seed(0)
        found = kinds.do(job, "cpu")
        json.dumps(found, allow_nan=False)
        if job.kind == "time":
            assert all(seconds > 0 for level in ("operator", "layer") for seconds in found[level].values())
        elif job.kind == "scaling":
            assert found["seconds"] == pytest.approx(found["call_seconds"] / found["batch"])
        else:
            assert 0 <= found["score"] < 200 and found["parameters"] > 500


def test_speech_is_judged_by_its_error_rate(tmp_path, monkeypatch):
    monkeypatch.setitem(kinds.SIZES, "quick", dataclasses.replace(TINY, tasks=(SPEECH,)))
    monkeypatch.setenv("LINATTN_DATA", str(tmp_path))
    monkeypatch.setattr(speech, "gettempdir", lambda: str(tmp_path))
    speech.utterances.cache_clear()
    job = learned(TINY, SPEECH, "screen", "learned_elu", 8, 0, 0)
    assert work.answer(job, "cpu", 1)["line"] == "missing"
    little_ocean(tmp_path)
    found = kinds.do(job, "cpu")
    assert found["split"] == "dev" and found["score"] > 0 and found["speakers_interval"][0] <= found["score"]
    assert [step for step, _ in found["curve"]] == [1, 2, 3]
    speech.utterances.cache_clear()


def test_screens_are_judged_on_dev_and_finals_on_test(tiny):
    for task in tiny.tasks:
        for stage, split in (("screen", "dev"), ("final", "test")):
            found = kinds.do(learned(tiny, task, stage, "elu", task.head_widths[0], 0, 0), "cpu")
            assert found["split"] == split


def test_the_same_job_finds_the_same(tiny):
    job = learned(tiny, tiny.tasks[0], "screen", "favor", 8, 3, 0)
    first, second = (work.answer(job, "cpu", 1)["found"] for _ in range(2))
    assert first == second
    other = learned(tiny, tiny.tasks[0], "screen", "favor", 8, 4, 0)
    assert work.answer(other, "cpu", 1)["found"]["curve"] != first["curve"]


def test_a_loss_that_is_no_number_is_a_finding(tiny, monkeypatch):
    job = learned(tiny, tiny.tasks[0], "screen", "elu", 8, 0, 0)
    monkeypatch.setattr(kinds.Pupil, "learn", lambda self: self.check_finite(float("nan")))
    assert "is nan by step 0" in kinds.do(job, "cpu")["diverged"]
    pupil = kinds.Pupil(kinds.run_of(tiny.tasks[1], job.settings, "cpu"), functools.partial(data.images, "digits"))
    with pytest.raises(Diverged):
        pupil.check_finite(float("inf"))


def test_without_any_text_the_part_is_missing(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("LINATTN_DATA", str(tmp_path / "empty"))
    data._enwik8.cache_clear()
    data.text.cache_clear()

    def unreachable(*_, **__):
        raise ValueError("not downloaded")

    monkeypatch.setattr(data, "load", unreachable)
    with pytest.raises(Missing, match="Shakespeare's plays neither: not downloaded"):
        data.text("train", 100)


def test_the_first_bytes_of_enwik8_in_three_parts(tiny):
    parts = [data.text(split, 1000) for split in ("train", "dev", "test")]
    assert [len(part) for part in parts] == [900, 50, 50]
    whole = torch.cat([part.data for part in parts])
    assert whole.tolist() == list((bytes(range(256)) * 20)[:1000]) and isinstance(parts[0], Dataset)


# Sessions


SOME = ("images", "music", "short", "scaling")  # of every rank, and growing


def session(folder, **options) -> Session:
    return Session(folder, TINY, "cpu", **{"workers": 0, "only": SOME, **options})


def answering(seen: list[str], stop_after: int | None = None):
    """In the place of `work.answer`: made-up results, and Ctrl-C after some."""

    def answer(job: Job, device: str, threads: int):
        if stop_after is not None and len(seen) >= stop_after:
            raise KeyboardInterrupt
        seen.append(job.id)
        settings = dict(job.settings)
        return {
            "line": "result",
            "id": job.id,
            "part": job.part,
            "settings": settings,
            "seconds": 1.0,
            "found": found_for(job, {}),
        }

    return answer


def test_interrupted_and_resumed_is_whole(tmp_path, monkeypatch):
    whole: list[str] = []
    monkeypatch.setattr(work, "answer", answering(whole))
    with Folder(tmp_path / "whole", "quick").opened() as folder:
        folder.begin_session()
        assert session(folder).go_on()
    seen: list[str] = []
    for stop_after in (1, 5, 40, 41, 60, None):
        monkeypatch.setattr(work, "answer", answering(seen, stop_after))
        with Folder(tmp_path / "parts", "quick").opened() as folder:
            folder.begin_session()
            if stop_after is None:
                assert session(folder).go_on()
            else:
                with pytest.raises(KeyboardInterrupt):
                    session(folder).go_on()
        with open(tmp_path / "parts" / FILE, "ab") as file:
            file.write(b'{"line": "result", "id": "half')  # as a machine that loses its power leaves it
    assert seen == whole and len(set(seen)) == len(seen), "the same jobs in the same order, each once"
    one, other = load(tmp_path / "whole"), load(tmp_path / "parts")
    assert {key: result["found"] for key, result in one.results.items()} == {
        key: result["found"] for key, result in other.results.items()
    }
    assert len(other.sessions) == 6 and len(list((tmp_path / "parts").glob("[!.]*"))) == 1, "all is in one file"


def test_another_scale_is_another_folder(tmp_path):
    with Folder(tmp_path, "quick").opened() as folder:
        folder.begin_session()
    with (
        pytest.raises(ValueError, match="holds a study that is quick, not full: go on with that one"),
        Folder(tmp_path, "full").opened(),
    ):
        pass


def test_what_was_missing_or_failed_is_tried_again(tmp_path, monkeypatch):
    def answer(job: Job, device: str, threads: int):
        if job.part == "music":
            return {"line": "missing", "part": "music", "why": "no data"}
        if job.id == "images/screen/relu/8/0":
            return {"line": "failed", "id": job.id, "why": "it broke"}
        return answering([])(job, device, threads)

    monkeypatch.setattr(work, "answer", answer)
    with Folder(tmp_path, "quick").opened() as folder:
        folder.begin_session()
        assert session(folder).go_on()
        assert folder.study.missing == {"music": "no data"}
        assert folder.study.failed == {"images/screen/relu/8/0": "it broke"}
        assert not folder.study.of("music") and finals(TINY, TINY.tasks[1], folder.study)
    seen: list[str] = []
    monkeypatch.setattr(work, "answer", answering(seen))
    with Folder(tmp_path, "quick").opened() as folder:
        folder.begin_session()
        assert session(folder).go_on() and not folder.study.missing and not folder.study.failed
    assert "images/screen/relu/8/0" in seen and {key.partition("/")[0] for key in seen} == {"music", "images"}


def test_no_job_is_begun_that_would_not_end_in_time(tmp_path, monkeypatch):
    """One and a half times a job's seconds must be left. No time passes here, and each takes what it is expected to."""
    seen: list[str] = []
    answer, begun = answering(seen), []

    def as_expected(job: Job, device: str, threads: int):
        begun.append(job.seconds)
        return {**answer(job, device, threads), "seconds": job.seconds}

    monkeypatch.setattr(work, "answer", as_expected)
    monkeypatch.setattr(work.time, "monotonic", lambda: 0.0)
    with Folder(tmp_path, "quick").opened() as folder:
        folder.begin_session()
        now = session(folder, minutes=1.6 / 60)
        assert not now.go_on()
        left = [job.seconds for job in now.todo()]
    assert begun and max(begun) <= 1.6 / 1.5 < min(left)


def test_a_broken_job_is_named(tiny):
    task = next(task for task in TINY.tasks if task.name == "text")
    job = learned(tiny, task, "screen", "elu", 8, 0, 0)
    job = dataclasses.replace(job, settings={**job.settings, "arm": "no such map"})
    line = work.answer(job, "cpu", 1)
    assert line["line"] == "failed" and "'no such map'" in line["why"], line


def test_workers_are_processes_that_may_die(tmp_path):
    """A real worker: it answers, and one that is killed takes its job with it and no more."""
    task = next(task for task in work.plan(TINY, Study("quick"), "cpu", ["recall"]))
    worker = Worker("cpu")
    try:
        broken = Job("recall", "x", "learn", {**task.settings, "task": "nothing"}, 0, 1.0)
        worker.give(broken, 1)
        line = worker.take()
        assert line["line"] == "failed" and "StopIteration" in line["why"]
        worker.give(broken, 1)
        os.kill(worker.process.pid, 9)  # type: ignore[arg-type]
        line = worker.take()
        if line["why"].startswith("StopIteration"):  # it was faster
            worker.give(broken, 1)
            line = worker.take()
        assert line == {"line": "failed", "id": "recall/x", "why": "its process ended with -9"} and worker.dead
    finally:
        worker.end()


class Instant(Worker):
    """In the place of a worker: it is done when it is asked."""

    dead = False  # pyright: ignore[reportAssignmentType]
    made: ClassVar[list[Instant]] = []

    def __init__(self, device: str):
        self.pipe: Any = self
        self.job: Any = None
        self.ended = False
        self.made.append(self)

    def give(self, job, threads):
        beside = [other.job for other in self.made if other.job and not other.ended]
        assert not any(job.alone or other.alone for other in beside), "a job that is timed runs alone"
        self.job, self.threads = job, threads

    def take(self):
        job, self.job = self.job, None
        if job.id == "images/screen/relu/8/0" and not self.ended:
            self.dead = True  # pyright: ignore[reportAttributeAccessIssue]
            return {"line": "failed", "id": job.id, "why": "its process ended with -9"}
        return answering([])(job, "cpu", 1)

    def end(self):
        self.ended = True


def test_side_by_side_and_alone(tmp_path, monkeypatch):
    Instant.made = []
    most = []

    def wait(pipes, timeout):
        most.append(len(pipes))
        return pipes[:1]

    monkeypatch.setattr(work, "Worker", Instant)
    monkeypatch.setattr(work, "wait", wait)
    with Folder(tmp_path, "quick").opened() as folder:
        folder.begin_session()
        assert session(folder, workers=3).go_on()
        assert list(folder.study.failed) == ["images/screen/relu/8/0"]
    assert max(most) == 3 and len(Instant.made) == 4, "one died, and another took its place"
    assert all(worker.ended for worker in Instant.made if not worker.dead)


def test_a_study_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"there is no study at .*study.jsonl: run `linattn study --quick`"):
        load(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="no study that was recorded: KeyError"):
        load(tmp_path / "x.json")
    (tmp_path / FILE).write_text('{"line": "train"}\n')
    with pytest.raises(ValueError, match="no file of `linattn study`"):
        load(tmp_path)
