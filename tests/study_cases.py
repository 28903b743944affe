"""A study without its minutes: results made up by a function of the job, and sizes that take no time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from linattn.study.folder import apply
from linattn.study.jobs import Job, Study
from linattn.study.plan import plan
from linattn.study.sizes import ADAM, DEEP, LOCAL, CopySize, LengthsSize, ScalingSize, ShortSize, Sizes, TaskSize

SMALL = {"width": 16, "ff_width": 32, "depth": 1, **DEEP}
SHORT = {**ADAM, "warmup": 1, "steps": 3, "batch": 4, "lr": 1e-2, "log_every": 1}
TINY = Sizes(
    "quick",
    tasks=(
        TaskSize(
            "recall",
            "learn",
            "copy",
            {**SMALL, "conv": 2, "position": "none", "vocabulary": 8},
            SHORT,
            {"pairs": 4, "keys": 4, "values": 4, "examples": 8},
            (8, 4),
            1.0,
            (8, 4),
        ),
        TaskSize("images", "learn", "digits", SMALL, SHORT, {"name": "digits", "examples": 6}, (8,), 1.0),
        TaskSize("text", "learn", "text", SMALL, {**SHORT, "window": 16}, {"bytes": 4000, "examples": 4}, (8,), 1.0),
        TaskSize("music-jsb", "music", "text", SMALL, SHORT, {"file": "JSB_Chorales", "crop": 8}, (8,), 1.0),
    ),
    copy=CopySize((8,), (8,), {**SMALL, "vocabulary": 11, **LOCAL}, SHORT, 8, 8, (1, 2), 1.0),
    short=ShortSize((4, 8), (), (2, 4), {"cpu": 16}, 0.001, (8,), 1.0),
    lengths=LengthsSize(8, 64, 2, (("elu", "before"), ("softmax-attention", "none")), (1,), 1.0),
    scaling=ScalingSize(4, 7, 2, 4, 32, 5.0, 0.001),
)

SPEECH = TaskSize(
    "speech",
    "speech",
    "speech",
    {"width": 16, "ff_width": 32, "depth": 1, "causal": False},
    SHORT,
    {"name": "speechocean762", "scaling": "utterance", "speeds": (1.0,), "batch_frames": 2000},
    (8,),
    1.0,
)


def bits(job: Job, best: dict[str, float], spread: float) -> float:
    """A score that is what `best` says of the arm (else 3), and differs between seeds by `spread`; lower is better.

    For recall, an accuracy: 1 less a tenth of it.
    """
    arm, seed = job.settings["arm"], job.settings["seed"]
    score = best.get(arm, 3.0) + spread * random.Random(f"{arm} {seed} {job.id}").uniform(-1, 1)
    return 1 - score / 10 if job.part == "recall" else score


def found_for(job: Job, best: dict[str, float], spread: float = 0.01) -> dict[str, Any]:
    """What a job of its kind gives, made up."""
    if job.kind == "time":
        ratio = job.settings["tokens"] ** -0.5 * 4
        cells = {
            f"{a} {m}": r for m in ("forward", "training") for a, r in (("elu", ratio), ("softmax-attention", 1.0))
        }
        return {"operator": cells, "layer": cells}
    if job.kind == "scaling":
        n = job.settings["tokens"]
        power = {"elu": 1, "softmax-attention": 2, "reformer-attention": 1.2}[job.settings["arm"]]
        return {"call_seconds": 1e-3, "seconds": 1e-6 * n**power, "bytes": 2e6 * n, "batch": 1}
    score = bits(job, best, spread)
    made = {"score": score, "parameters": 1000, "state_bytes": 4096, "steps": 3, "data": "made up", "curve": [[1, 3.0]]}
    if job.kind == "copy":
        return made | {"accuracy": 0.5}
    if job.kind == "lengths":
        far = {"edges": [0, 8, 16], "carried": [3.0, score], "known": [None, 3.0]}
        return made | far | {"difference_by_bin": [None, [score - 3.0, score - 3.01]], "difference": [0.0, 0.0]}
    return made | ({"window": job.settings.get("window", 16)} if job.settings["task"] == "text" else {})


def made_up(sizes: Sizes, found: Callable[[Job], dict[str, Any]]) -> Study:
    """A whole study, jobs that come of others included."""
    study = Study(sizes.name)
    apply(study, {"line": "session", "number": 1, "environment": ENVIRONMENT, "device": "cpu", "workers": 1})
    while todo := [job for job in plan(sizes, study, "cpu") if not study.settled(job)]:
        for job in todo:
            line = {"line": "result", "id": job.id, "part": job.part, "settings": dict(job.settings), "seconds": 1.0}
            apply(study, line | {"session": 1, "found": found(job)})
    study.to_come = 0.0
    return study


ENVIRONMENT = {
    "date": "2026-01-01T00:00:00+00:00",
    "machine": {
        "cpu": "a processor",
        "cores": 2,
        "threads": 2,
        "instructions": "AVX2",
        "memory_bytes": None,
        "gpu": None,
        "gpu_memory_bytes": None,
    },
    "versions": {"os": "Linux", "python": "3.11", "torch": "2.13", "cuda": None, "linattn": "0.1.0"},
    "commit": None,
    "load_average": 0.0,
}
