"""How a job of each kind is done: settings in, what was found out. In a worker, on one device.

    found = do(job, "cuda")

Every function gives plain values. `Diverged` is a finding ("diverged": why); `Missing` is for the scheduler.

Axes:  B batch   T time
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from linattn.models import SequenceModel
from linattn.study import data, lengths, music, speech, timing
from linattn.study.arms import changes
from linattn.study.jobs import Job
from linattn.study.learn import Diverged, Pupil, accuracy
from linattn.study.sizes import SIZES, TaskSize
from linattn.train.config import Run
from linattn.train.evaluate import evaluate

Found = dict[str, Any]


def do(job: Job, device: str) -> Found:
    try:
        return KINDS[job.kind](job.settings, device)
    except Diverged as error:
        return {"diverged": str(error)}


def run_of(task: TaskSize, settings: Mapping[str, Any], device: str, **others: Any) -> Run:
    """The training run of one arm: a task's, with the arm's model. bfloat16 is for GPUs."""
    fields = {**task.run, **others}
    if device == "cpu":
        fields.pop("precision", None)
    model = changes(settings["arm"], head_width=settings["head_width"], **task.model)
    return Run(task.preset, task.name, changes=model, seed=settings["seed"], device=device, **fields)


def task_of(settings: Mapping[str, Any]) -> TaskSize:
    return next(task for task in SIZES[settings["scale"]].tasks if task.name == settings["task"])


def learn(settings: Mapping[str, Any], device: str) -> Found:
    """Recall, images or text."""
    task, sizes = task_of(settings), SIZES[settings["scale"]]
    others = {}
    if "window" in settings:  # as many tokens an update, in windows of another length
        window = settings["window"]
        others = {"window": window, "batch": max(1, task.run["batch"] * task.run["window"] // window)}
    run = run_of(task, settings, device, **others)
    datasets = DATASETS[task.part](task)
    pupil = Pupil(run, datasets)
    model = pupil.learn()
    held_out = datasets("dev" if settings["stage"] == "screen" else "test")
    length = run.window or math.prod(held_out.shape)
    found = {"data": held_out.name, "split": held_out.split, **about(model, length), "curve": pupil.curve}
    found |= {"steps": run.steps, "tokens": pupil.step * run.batch * (length - (run.window is None))}
    if task.part == "recall":
        return found | {"score": accuracy(model, held_out)}
    found |= {} if run.window is None else {"window": run.window}
    examples = task.data.get("examples")
    if "window" in settings and examples is not None:
        examples = max(1, examples * task.run["window"] // settings["window"])
    judged = evaluate(model, held_out, batch=sizes.eval_batch, window=run.window, examples=examples)
    return found | {"score": judged["bits"]}


def about(model: SequenceModel, length: int) -> Found:
    """Sizes: parameters, and the bytes that one sequence's state has after `length` tokens."""
    state = model.empty_state(1, capacity=length)
    return {"parameters": model.num_parameters, "state_bytes": state.nbytes}


def copy(settings: Mapping[str, Any], device: str) -> Found:
    """The copy task at one length: nats and accuracy on the second word, and the curve of the loss."""
    size = SIZES[settings["scale"]].copy
    task = TaskSize("copy", "copy", "copy", size.model, size.run, {}, (size.head_width,), size.seconds)
    options = (("length", settings["length"]),)
    datasets = functools.partial(_drawn, "copy", size.run["batch"], size.examples, options)
    pupil = Pupil(run_of(task, settings, device), datasets)
    model, test = pupil.learn(), datasets("test")
    bits = evaluate(model, test, batch=size.run["batch"])["bits"]
    found = {**about(model, settings["length"]), "curve": pupil.curve, "steps": pupil.step}
    return found | {"score": bits, "accuracy": accuracy(model, test, size.run["batch"])}


def lengths_of(settings: Mapping[str, Any], device: str) -> Found:
    """Trained at one length, read far beyond it."""
    sizes = SIZES[settings["scale"]]
    size, text = sizes.lengths, next(task for task in sizes.tasks if task.name == "text")
    batch = max(1, text.run["batch"] * text.run["window"] // size.window)
    task = dataclasses.replace(text, model={**text.model, "rotary": settings["rotary"]})
    run = run_of(task, settings, device, window=size.window, batch=batch)
    datasets = DATASETS["text"](text)
    pupil = Pupil(run, datasets)
    model = pupil.learn()
    found = lengths.far(model, datasets("test").data, size.window, size.longest, size.streams)
    short = evaluate(model, datasets("test"), window=size.window, examples=text.data["examples"])
    return {**about(model, size.window), "score": short["bits"], **found}


def speech_of(settings: Mapping[str, Any], device: str) -> Found:
    task = task_of(settings)
    return speech.learn(run_of(task, settings, device), task, settings)


def music_of(settings: Mapping[str, Any], device: str) -> Found:
    task = task_of(settings)
    return music.learn(run_of(task, settings, device), task, settings)


def time_of(settings: Mapping[str, Any], device: str) -> Found:
    return timing.short(settings, SIZES[settings["scale"]].short)


def scaling_of(settings: Mapping[str, Any], device: str) -> Found:
    return timing.scaling(settings, SIZES[settings["scale"]].scaling)


def _drawn(name: str, batch: int, examples: int, options: tuple[tuple[str, int], ...], split: str):
    """Training data that lasts for ten updates, then is drawn anew; held-out data of its own size."""
    return data.generated(name, split, 10 * batch if split == "train" else examples, options)


def _recall(task: TaskSize) -> Callable[[str], Any]:
    options = tuple((key, x) for key, x in task.data.items() if key != "examples")
    return functools.partial(_drawn, "recall", task.run["batch"], task.data["examples"], options)


def _images(task: TaskSize) -> Callable[[str], Any]:
    return functools.partial(data.images, task.data["name"])


def _text(task: TaskSize) -> Callable[[str], Any]:
    return functools.partial(data.text, size=task.data["bytes"])


DATASETS = {"recall": _recall, "images": _images, "text": _text}
KINDS: dict[str, Callable[[Mapping[str, Any], str], Found]] = {
    "learn": learn,
    "copy": copy,
    "lengths": lengths_of,
    "speech": speech_of,
    "music": music_of,
    "time": time_of,
    "scaling": scaling_of,
}
