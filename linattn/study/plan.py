"""Which small runs there are, by what is known so far, the most valuable first.

rank 0    the default map and softmax attention in every task; the copy task
rank 1    the screen: every feature map, one seed
rank 2    times of short sequences, which need the machine for themselves
rank 3    finals: the best four of each screen, elu and softmax attention, three seeds that the screen has not seen
rank 4    lengths, and quality at short lengths
rank 5    scaling, from short to long: where a length took too long or too much memory, there is no longer one

Two parts grow while the study runs: finals exist once their screen is complete, and each length of the scaling figure
once the one before is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from linattn.study.arms import LINEAR, REFORMER, SOFTMAX, TWINS, kin, num_features, screened
from linattn.study.jobs import PARTS, Job, Study
from linattn.study.sizes import Sizes, TaskSize

FINALISTS = 4
HIGHER = ("recall",)  # tasks whose score is better when it is higher
GROWTH = {SOFTMAX: 4.0, REFORMER: 2.3, LINEAR: 2.0}  # of the time, from N to 2N tokens in a batch of one


def plan(sizes: Sizes, study: Study, device: str, only: Iterable[str] = PARTS) -> list[Job]:
    """All jobs that exist by now, in the order in which they are to be done."""
    parts: dict[str, Callable[[], list[Job]]] = {
        "copy": lambda: copies(sizes),
        "short": lambda: short_times(sizes, device) + short_quality(sizes),
        "lengths": lambda: lengths(sizes),
        "scaling": lambda: scaling(sizes, study, device),
    }
    only = set(only)
    jobs = [job for part, made in parts.items() if part in only for job in made()]
    for task in sizes.tasks:
        if task.part in only:
            jobs += screen(sizes, task) + finals(sizes, task, study)
    return sorted(jobs, key=lambda job: job.rank)


def still_hidden(sizes: Sizes, study: Study, only: Iterable[str] = PARTS) -> float:
    """Seconds of the jobs that will exist and do not yet: finals whose screen is not complete."""
    seconds = 0.0
    for task in sizes.tasks:
        if task.part in only and task.part not in study.missing and not finals(sizes, task, study):
            seconds += len(sizes.final_seeds) * len(widths_of_finals(task)) * (FINALISTS + 2) * task.seconds * 1.5
    return seconds


def screen(sizes: Sizes, task: TaskSize) -> list[Job]:
    return [
        learned(sizes, task, "screen", arm, width, 0, rank=0 if arm in (LINEAR, SOFTMAX) else 1)
        for width in task.head_widths
        for arm in screened()
    ]


def finals(sizes: Sizes, task: TaskSize, study: Study) -> list[Job]:
    """None while the screen is not complete."""
    chosen = finalists(sizes, task, study)
    return [
        learned(sizes, task, "final", arm, width, seed, rank=3)
        for seed in sizes.final_seeds
        for width in widths_of_finals(task)
        for arm in chosen
    ]


def widths_of_finals(task: TaskSize) -> tuple[int, ...]:
    return task.final_widths or task.head_widths[:1]


def finalists(sizes: Sizes, task: TaskSize, study: Study) -> list[str]:
    """Softmax attention, elu, and the best four others of the screen at the first head width; of twins one."""
    jobs = [job for job in screen(sizes, task) if job.settings["head_width"] == task.head_widths[0]]
    if not all(study.settled(job) for job in jobs):
        return []
    scores = {
        job.settings["arm"]: study.results[job.id]["found"].get("score") for job in jobs if job.id in study.results
    }
    others = [arm for arm, score in scores.items() if score is not None and arm not in (SOFTMAX, LINEAR)]
    others = [arm for arm in others if not (arm in TWINS and kin(arm) in others)]
    best = sorted(others, key=lambda arm: scores[arm], reverse=task.part in HIGHER)[:FINALISTS]
    return [arm for arm in (SOFTMAX, LINEAR, *best) if arm in scores]


def learned(sizes: Sizes, task: TaskSize, stage: str, arm: str, width: int, seed: int, rank: int) -> Job:
    """One model of a task, judged on dev in the screen and on test in the finals."""
    settings = {"scale": sizes.name, "task": task.name, "stage": stage, "arm": arm, "head_width": width, "seed": seed}
    name = f"{stage}/{arm}/{width}/{seed}" if task.name == task.part else f"{task.name}/{stage}/{arm}/{width}/{seed}"
    return Job(task.part, name, task.kind, settings, rank, task.seconds * price(arm, width))


def price(arm: str, head_width: int) -> float:
    """Times what elu takes."""
    features = num_features(arm, head_width)
    return 1.3 if features is None else 1 + 0.25 * math.log2(features / head_width)


def copies(sizes: Sizes) -> list[Job]:
    size = sizes.copy
    return [
        Job(
            "copy",
            f"{length}/{arm}/{seed}",
            "copy",
            {"scale": sizes.name, "length": length, "arm": arm, "head_width": size.head_width, "seed": seed},
            0 if seed == size.seeds[0] and length == size.lengths[0] else 1,
            size.seconds * max(0.5, length / size.lengths[-1]) * (3 if arm == REFORMER else 1),
        )
        for length in size.lengths
        for seed in size.seeds
        for arm in (LINEAR, SOFTMAX, REFORMER)
        if arm != REFORMER or (length in size.reformer and seed == size.seeds[0])
    ]


def short_times(sizes: Sizes, device: str) -> list[Job]:
    size = sizes.short
    ways = [("eager", load, tokens) for load in ("one", "many") for tokens in size.tokens]
    ways += [("compiled", "one", tokens) for tokens in size.compiled]
    return [
        Job(
            "short",
            f"time/{place}/{form}/{load}/{tokens}",
            "time",
            {"scale": sizes.name, "device": place, "form": form, "load": load, "tokens": tokens},
            2,
            8 * size.budget + (40.0 if form == "compiled" else 2.0),
            alone=True,
        )
        for place in dict.fromkeys((device, "cpu"))
        for form, load, tokens in ways
        if load == "one" or tokens < size.full_load[place]
    ]


def short_quality(sizes: Sizes) -> list[Job]:
    return [
        Job(
            "short",
            f"quality/{window}/{arm}/{seed}",
            "learn",
            {"scale": sizes.name, "task": "text", "arm": arm, "head_width": head_width(sizes), "seed": seed}
            | {"stage": "final", "window": window},
            4,
            sizes.short.seconds,
        )
        for window in sizes.short.trained
        for seed in sizes.final_seeds
        for arm in (LINEAR, SOFTMAX)
    ]


def head_width(sizes: Sizes) -> int:
    """Of the models of text."""
    return text_task(sizes).head_widths[0]


def text_task(sizes: Sizes) -> TaskSize:
    return next(task for task in sizes.tasks if task.name == "text")


def lengths(sizes: Sizes) -> list[Job]:
    size = sizes.lengths
    return [
        Job(
            "lengths",
            f"{arm}/{rotary}/{seed}",
            "lengths",
            {"scale": sizes.name, "arm": arm, "rotary": rotary, "head_width": head_width(sizes), "seed": seed},
            4,
            size.seconds,
        )
        for seed in size.seeds
        for arm, rotary in size.arms
    ]


def scaling(sizes: Sizes, study: Study, device: str) -> list[Job]:
    """Of each series what is done, and one length more."""
    size = sizes.scaling
    jobs: list[Job] = []
    for place in dict.fromkeys((device, "cpu")):
        for arm in size.arms:
            jobs += series(sizes, study, place, arm)
    return jobs


def series(sizes: Sizes, study: Study, place: str, arm: str) -> list[Job]:
    size, jobs, expected = sizes.scaling, [], 0.05
    for power in range(size.first, size.last + 1):
        settings = {"scale": sizes.name, "device": place, "arm": arm, "tokens": 2**power}
        job = Job("scaling", f"{place}/{arm}/{power}", "scaling", settings, 5, 1 + 4 * expected, alone=True)
        jobs.append(job)
        if job.id not in study.results:
            break
        seconds = study.results[job.id]["found"].get("call_seconds")
        if seconds is None:  # it did not fit into memory
            break
        alone = max(1, size.tokens // 2**power) == 1
        expected = seconds * (GROWTH[arm] if alone else GROWTH[arm] / 2)
        if expected > size.longest:
            break
    return jobs
