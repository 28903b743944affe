"""What the numbers say, and what they do not.

Different is what two 95% intervals over seeds that do not overlap say (numbers.apart). Everything else is "not told
apart", and one seed alone tells nothing apart. Nothing here knows which map ought to win.

Runs of one seed see the same data in the same order, so beside it stands how much better than elu a map was, seed by
seed. That interval is often much narrower. Where it leaves out 0 it is called a hint, and no more: there is one for
every map, and each is wrong once in twenty times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from linattn.study.arms import LINEAR, REFORMER, SOFTMAX, TWINS, label
from linattn.study.jobs import Study
from linattn.study.numbers import Interval, apart, crossing, exponent, interval


@dataclass(frozen=True)
class Meta:
    """A task as the page names it. `higher`: a higher score is better."""

    title: str
    looks_like: str
    unit: str
    higher: bool = False

    @property
    def within(self) -> tuple[float, float] | None:
        """Where the score lies."""
        return (0.0, 1.0) if self.unit == "accuracy" else None


TASKS = {
    "recall": Meta("Associative recall", "exact recall of what stood before: keys, names, settings", "accuracy", True),
    "text": Meta("Text", "text, code or logs, byte by byte", "bits a byte"),
    "images": Meta("Images", "images, pixel by pixel", "bits/dim"),
    "music-jsb": Meta("Music: JSB chorales", "short scores, many events at a time", "nats a step"),
    "music-nottingham": Meta("Music: Nottingham", "folk tunes: long, with repeated parts", "nats a step"),
    "speech": Meta("Speech", "recorded sound to labels", "error rate"),
}


@dataclass(frozen=True)
class Entry:
    """One arm at one head width: its scores over seeds."""

    arm: str
    head_width: int
    score: Interval
    parameters: int
    state_bytes: int | None
    by_seed: Mapping[int, float]


@dataclass(frozen=True)
class Verdict:
    """Of a task's finals: the best linear entry, those not told apart from it, and where softmax attention stands."""

    best: Entry
    alike: list[Entry]
    worse: list[Entry]
    softmax: Entry | None
    against_softmax: str  # "better", "worse", "not told apart", "not measured": the best linear one is

    @property
    def default(self) -> Entry | None:
        """elu at the best one's head width."""
        entries = [self.best, *self.alike, *self.worse]
        return next((e for e in entries if (e.arm, e.head_width) == (LINEAR, self.best.head_width)), None)

    @property
    def nothing_apart(self) -> bool:
        """Whether no linear entry was told apart from the best one."""
        return not self.worse


def entries(study: Study, task: str, stage: str) -> list[Entry]:
    """Of every arm and head width that has results, in the order in which they came."""
    part = task.partition("-")[0]
    groups: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for result in study.of(part, task=task, stage=stage):
        if result["found"].get("score") is not None:
            settings = result["settings"]
            key = (settings["arm"], settings["head_width"])
            groups.setdefault(key, {})[settings["seed"]] = result["found"]
    return [_entry(key, found, task) for key, found in groups.items()]


def _entry(key: tuple[str, int], found: dict[int, dict[str, Any]], task: str) -> Entry:
    scores = {seed: one["score"] for seed, one in found.items()}
    one = next(iter(found.values()))
    mean = interval(list(scores.values()), TASKS[task].within)
    return Entry(*key, mean, one["parameters"], one.get("state_bytes"), scores)


def gain(entry: Entry, other: Entry, higher: bool) -> Interval | None:
    """How much better than another an entry was, seed by seed; None with fewer than two seeds that both have."""
    both = sorted(entry.by_seed.keys() & other.by_seed.keys())
    sign = 1 if higher else -1
    return interval([sign * (entry.by_seed[s] - other.by_seed[s]) for s in both]) if len(both) > 1 else None


def hint(made: Interval | None) -> bool:
    """Whether a gain leaves out 0."""
    return made is not None and made.ends is not None and not made.ends[0] <= 0 <= made.ends[1]


def ranked(found: Iterable[Entry], task: str) -> list[Entry]:
    """The best first."""
    return sorted(found, key=lambda entry: entry.score.mean, reverse=TASKS[task].higher)


def verdict(study: Study, task: str) -> Verdict | None:
    """None where no linear arm has final results from two seeds or more."""
    known = [entry for entry in ranked(entries(study, task, "final"), task) if entry.score.known]
    linear = [entry for entry in known if entry.arm not in (SOFTMAX, REFORMER)]
    if not linear:
        return None
    best = linear[0]
    alike = [entry for entry in linear[1:] if not apart(entry.score, best.score)]
    worse = [entry for entry in linear[1:] if apart(entry.score, best.score)]
    rivals = [entry for entry in known if entry.arm == SOFTMAX]
    softmax = next((entry for entry in rivals if entry.head_width == best.head_width), None)
    if softmax is None:
        return Verdict(best, alike, worse, None, "not measured")
    return Verdict(best, alike, worse, softmax, compared(best.score, softmax.score, TASKS[task].higher))


def compared(a: Interval, b: Interval, higher: bool) -> str:
    """How a stands to b."""
    if not apart(a, b):
        return "not told apart"
    return "better" if (a.mean > b.mean) == higher else "worse"


def diverged(study: Study) -> list[str]:
    return [result["id"] for result in study.results.values() if "diverged" in result["found"]]


def twins_differ(study: Study, task: str) -> float | None:
    """How far the two forms of one kernel came out from each other in the screen, at most: what rounding does."""
    scores = {(entry.arm, entry.head_width): entry.score.mean for entry in entries(study, task, "screen")}
    gaps = [
        abs(scores[twin, width] - scores[other, width])
        for twin, other in TWINS.items()
        for (arm, width) in scores
        if arm == twin and (other, width) in scores
    ]
    return max(gaps, default=None)


# Copying


def copies(study: Study) -> dict[int, dict[str, tuple[Interval, Interval]]]:
    """By length and arm: bits on the second word, and accuracy."""
    made: dict[int, dict[str, tuple[Interval, Interval]]] = {}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for result in study.of("copy"):
        if "score" in result["found"]:
            key = (result["settings"]["length"], result["settings"]["arm"])
            found.setdefault(key, []).append(result["found"])
    for (length, arm), runs in sorted(found.items()):
        right = interval([run["accuracy"] for run in runs], within=(0.0, 1.0))
        made.setdefault(length, {})[arm] = (interval([run["score"] for run in runs]), right)
    return made


# Short sequences


@dataclass(frozen=True)
class Race:
    """Linear over softmax by length, for one way of calling it: below 1 linear is faster."""

    device: str
    form: str
    load: str
    level: str  # operator, layer
    mode: str  # forward, training
    tokens: list[int]
    ratios: list[float]

    @property
    def pays_from(self) -> int | None:
        return crossing(self.tokens, self.ratios)


def races(study: Study) -> list[Race]:
    groups: dict[tuple[str, ...], dict[int, float]] = {}
    for result in study.of("short"):
        settings, found = result["settings"], result["found"]
        for level in ("operator", "layer"):
            for mode in ("forward", "training"):
                if level in found:
                    key = (settings["device"], settings["form"], settings["load"], level, mode)
                    ratio = found[level][f"{LINEAR} {mode}"] / found[level][f"{SOFTMAX} {mode}"]
                    groups.setdefault(key, {})[settings["tokens"]] = ratio
    return [
        Race(*key, tokens=sorted(points), ratios=[points[t] for t in sorted(points)])  # type: ignore[arg-type]
        for key, points in groups.items()
    ]


def short_quality(study: Study) -> dict[int, dict[str, Interval]]:
    """Bits a byte by the length that was trained at, and arm; the finals of text are one of the lengths."""
    groups: dict[tuple[int, str], list[float]] = {}
    for result in (*study.of("short", task="text"), *study.of("text", stage="final")):
        if "score" in result["found"]:
            key = (result["found"]["window"], result["settings"]["arm"])
            groups.setdefault(key, []).append(result["found"]["score"])
    made: dict[int, dict[str, Interval]] = {}
    for (window, arm), scores in sorted(groups.items()):
        made.setdefault(window, {})[arm] = interval(scores)
    return made


# Long ones


@dataclass(frozen=True)
class Far:
    """How one arm reads on: bits by places, and carried - known over stretches of text in the last of them."""

    arm: str
    rotary: str
    edges: list[int]
    carried: list[float]
    known: list[float | None]
    last: Interval
    seeds: int

    @property
    def says(self) -> str:
        """What the last places show of the state carried that far."""
        if self.last.low is not None and self.last.low > 0:
            return "does harm"
        if self.last.high is not None and self.last.high < 0:
            return "helps"
        return "not told apart from reading in windows"


def far(study: Study) -> list[Far]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in study.of("lengths"):
        if "carried" in result["found"]:
            settings = result["settings"]
            groups.setdefault((settings["arm"], settings["rotary"]), []).append(result["found"])
    return [_far(arm, rotary, found) for (arm, rotary), found in groups.items()]


def _far(arm: str, rotary: str, found: list[dict[str, Any]]) -> Far:
    """Models of several seeds read the same stretches: of each, the mean over models."""
    by_stretch = list(zip(*(one["difference_by_bin"][-1] for one in found), strict=True))
    places = range(len(found[0]["carried"]))
    known = [[one["known"][i] for one in found] for i in places]
    return Far(
        arm,
        rotary,
        found[0]["edges"],
        [_mean([one["carried"][i] for one in found]) for i in places],
        [None if row[0] is None else _mean(row) for row in known],
        interval([_mean(row) for row in by_stretch]),
        len(found),
    )


# Scaling


@dataclass(frozen=True)
class Scaling:
    """One arm on one device: seconds and bytes of a sequence by its length, and the exponents of both."""

    device: str
    arm: str
    tokens: list[int]
    seconds: list[float]
    memory: list[tuple[int, float]]
    time_exponent: Interval | None
    memory_exponent: Interval | None
    stopped: str | None


LEAST_BYTES = 1e6  # below, what a process grows by is not to be read


def scalings(study: Study) -> list[Scaling]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in study.of("scaling"):
        groups.setdefault((result["settings"]["device"], result["settings"]["arm"]), []).append(result)
    return [_scaling(device, arm, results) for (device, arm), results in groups.items()]


def _scaling(device: str, arm: str, results: list[dict[str, Any]]) -> Scaling:
    results = sorted(results, key=lambda result: result["settings"]["tokens"])
    measured = [result for result in results if "seconds" in result["found"]]
    tokens = [result["settings"]["tokens"] for result in measured]
    seconds = [result["found"]["seconds"] for result in measured]
    memory = [
        (result["settings"]["tokens"], result["found"]["bytes"])
        for result in measured
        if (result["found"]["bytes"] or 0) * result["found"]["batch"] > LEAST_BYTES
    ]
    too_large = [result for result in results if "too_large" in result["found"]]
    stopped = None
    if too_large:
        stopped = f"at {too_large[0]['settings']['tokens']:,}: {too_large[0]['found']['too_large']}"
    return Scaling(
        device,
        arm,
        tokens,
        seconds,
        memory,
        exponent(tokens, seconds) if len(tokens) > 1 else None,
        exponent(*zip(*memory, strict=True)) if len(memory) > 1 else None,
        stopped,
    )


# Surprises


def surprises(study: Study) -> list[str]:
    """What one might not have expected, each by a rule that is stated with it."""
    found = []
    for task, meta in TASKS.items():
        made = verdict(study, task)
        if made is None:
            continue
        if made.against_softmax == "better" and made.softmax is not None:
            found.append(
                f"{meta.title}: a linear map is better than softmax attention: {_beside(made.best, made.softmax)}"
            )
        elu = made.default
        if elu is not None and elu in made.worse:
            found.append(
                f"{meta.title}: the default map is told apart from the best, as worse: {_beside(made.best, elu)}"
            )
    found += [f"{arm}: the loss became infinite or NaN" for arm in diverged(study)]
    for one in far(study):
        if one.says == "does harm":
            found.append(
                f"{label(one.arm)}, rotary {one.rotary}: reading on beyond the trained length does harm, "
                f"{shown(one.last)} bits a byte more than windows"
            )
    return found


def _beside(a: Entry, b: Entry) -> str:
    return f"{label(a.arm)} {shown(a.score)} and {label(b.arm)} {shown(b.score)}"


def shown(value: Interval, digits: int = 3) -> str:
    """A mean with its interval."""
    if value.low is None or value.high is None:
        return f"{value.mean:.{digits}f} (one seed: no interval)"
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
