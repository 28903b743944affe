"""A run as plain values: what is trained, on what, and how. Frozen, complete, printable, and JSON.

    run = Run("digits", "digits", steps=600)
    run = override(run, ["steps=200", "attention=softmax"])       # what the command line says: key=value

A key is a field of `Run`, of the model's config or its layer, or an option of the dataset. Where two of these share a
name the first is meant, and `model.seed`, `data.seed` say which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from linattn.models import PRESETS, Config, ImageConfig, LanguageConfig, preset
from linattn.nn import Layer
from linattn.train.data.catalogue import AT_HAND
from linattn.train.data.dataset import SPLITS
from linattn.train.data.folder import image_folder
from linattn.train.fields import check_key, keyword_types, parse, types_of, unknown_key
from linattn.train.speech.data import load_speech

CHOICES = {
    "optimizer": ("radam", "adamw"),
    "schedule": ("constant", "cosine", "step", "plateau"),
    "precision": ("fp32", "bf16"),
    "keep": ("last", "best"),
    "split": SPLITS,
}
COUNTS = ("batch", "accumulate", "steps", "window", "patience", "eval_examples", "samples", "threads")
INTERVALS = ("warmup", "log_every", "eval_every", "checkpoint_every", "sample_every")
# What a resumed run may change: how long, how often and where, not what is trained.
CHANGEABLE = ("steps", "minutes", "keep", "device", "threads", "compile", "eval_examples", "samples", *INTERVALS[1:])


@dataclass(frozen=True)
class Run:
    """One training run.

    name              of the run's folder; a run that is a Python file has the file's
    preset, changes   the model: a name of PRESETS, and fields of its config or layer that differ
    start             the weights to begin with: a file, run folder or shipped model; None: fresh ones
    data, data_options    what linattn.train.data.load takes
    steps, minutes    updates, and minutes of training; whichever ends first where both are given
    batch             examples of an update; accumulate: the parts it is computed in, to save memory
    window            of a text: predictions in an example; stateful: parts of the text are read in order, and each
                      window goes on from the state of the one before (truncated back-propagation through time)
    optimizer, lr, betas, weight_decay    decoupled decay, of matrices and embeddings only
    schedule          of lr: "constant"; "cosine" down to lr_decay · lr; "step": times lr_decay after each number of
                      updates in `drops`; "plateau": times lr_decay after `patience` evaluations without a new best
    warmup            updates over which lr first grows from 0
    clip              the largest norm of the gradient, None: any
    ema               d of the averaged weights a ← d · a + (1 - d) · w; they are evaluated and saved. None: w itself
    precision         "bf16": matrix products in bfloat16, weights, optimizer and heads in float32
    keep              which weights are saved: those of the "last" evaluation, or of the "best" one
    split, eval_examples   what is evaluated on, and how many examples of it (None: all)
    *_every           updates between log lines, evaluations, checkpoints and sheets (0: only at the end)
    samples           how many are on a sheet
    device, threads   "auto": CUDA where there is one; threads=None: torch's own choice
    """

    preset: str
    data: str
    name: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None
    minutes: float | None = None
    batch: int = 64
    accumulate: int = 1
    window: int | None = None
    stateful: bool = False
    optimizer: str = "radam"
    lr: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.01
    schedule: str = "cosine"
    warmup: int = 0
    lr_decay: float = 0.1
    drops: tuple[int, ...] = ()
    patience: int = 5
    clip: float | None = 1.0
    ema: float | None = None
    precision: str = "fp32"
    compile: bool = False
    seed: int = 0
    keep: str = "last"
    split: str = "dev"
    eval_examples: int | None = None
    log_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 500
    sample_every: int = 0
    samples: int = 64
    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        _check_values(self)
        _check_together(self)
        self.config()  # raises where preset and changes make no model

    def config(self) -> Config:
        """The model's config. Images may still be of another shape: see `fit_to`."""
        return preset(self.preset, **self.changes)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run_from_json(form: Mapping[str, Any], where: object = "this run") -> Run:
    """The run that `to_json` described. Unknown fields raise, naming what is known."""
    known = types_of(Run)
    for key in form:
        check_key(key, known, f"{where}: a run")
    return Run(**_with_tuples(dict(form)))


def override(run: Run, settings: Sequence[str]) -> Run:
    """The run with fields set by texts "key=value", each parsed as its type.

    >>> run = Run("digits", "digits", steps=100)
    >>> override(run, ["lr=3e-4", "attention=softmax", "depth=4"]).changes
    {'attention': 'softmax', 'depth': 4}
    """
    pairs = [_pair(text) for text in settings]
    chosen = dict(pairs)
    # what was changed in another model, or asked of other data, need not fit these
    same_model, same_data = (chosen.get(key, getattr(run, key)) == getattr(run, key) for key in ("preset", "data"))
    fields: dict[str, Any] = {
        "changes": dict(run.changes) if same_model else {},
        "data_options": dict(run.data_options) if same_data else {},
    }
    groups = _keys(chosen.get("preset", run.preset))
    for key, text in pairs:
        group, name = _resolve(key, groups)
        value = parse(key, text, groups[group][name])
        (fields if group == "" else fields[group])[name] = value
    return dataclasses.replace(run, **fields)


def fit_to(config: Config, kind: str, shape: tuple[int, ...], num_values: int) -> Config:
    """The config for this data: an image model takes its images' shape. Data that cannot fit raises."""
    if isinstance(config, ImageConfig):
        if kind != "images":
            raise ValueError(f"an image model is trained on images, this data is {kind}: choose another preset or data")
        return dataclasses.replace(config, shape=shape)
    if not isinstance(config, LanguageConfig):
        raise ValueError(f"this loop trains image and language models, got a {type(config).__name__}")
    if config.vocabulary < num_values:
        raise ValueError(
            f"the data has values 0 … {num_values - 1} and the model a vocabulary of {config.vocabulary}: "
            f"set vocabulary={num_values}"
        )
    return config


def _with_tuples(form: Any) -> Any:
    """JSON knows no tuples: its lists are ours."""
    if isinstance(form, dict):
        return {key: _with_tuples(value) for key, value in form.items()}
    return tuple(map(_with_tuples, form)) if isinstance(form, list) else form


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"expected key=value, got {text!r}")
    return key.strip(), value.strip()


def _keys(name: str) -> dict[str, dict[str, Any]]:
    """All keys, by where they go ("" is the run itself), with their types."""
    own = {key: kind for key, kind in types_of(Run).items() if key not in ("changes", "data_options")}
    model: dict[str, Any] = types_of(Layer)
    if name in PRESETS:  # if not, `preset` will say so
        model |= types_of(type(PRESETS[name]))
        model.pop("layer")
    options: dict[str, Any] = {"data_dir": str | None, "download": bool}
    for reader in (*AT_HAND.values(), image_folder, load_speech):
        options |= keyword_types(reader)
    return {"": own, "changes": model, "data_options": options}


def _resolve(key: str, groups: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The group and the name that a key stands for."""
    prefix, dot, name = key.partition(".")
    if dot and prefix in ("model", "data"):
        group = {"model": "changes", "data": "data_options"}[prefix]
        check_key(name, groups[group], "the model" if prefix == "model" else "the data")
        return group, name
    for group, names in groups.items():
        if key in names:
            return group, key
    raise unknown_key(key, {"a run": groups[""], "the model": groups["changes"], "the data": groups["data_options"]})


def _check_values(run: Run) -> None:
    for name, choices in CHOICES.items():
        if getattr(run, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(run, name)!r}")
    for names, least in ((COUNTS, 1), (INTERVALS, 0)):
        for name in names:
            value = getattr(run, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    for name, low, high in (("ema", 0, 1), ("lr_decay", 0, 1), ("weight_decay", 0, 10), ("lr", 0, 100)):
        value = getattr(run, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} must lie in {low} … {high}, got {value!r}")
    for name in ("clip", "minutes"):
        value = getattr(run, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, or none, got {value!r}")
    if len(run.betas) != 2 or not all(0 <= beta < 1 for beta in run.betas):
        raise ValueError(f"betas must be two numbers in [0, 1), got {run.betas!r}")


def _check_together(run: Run) -> None:
    if run.steps is None and run.minutes is None:
        raise ValueError("a run must end: set steps=, minutes= or both")
    if run.batch % run.accumulate:
        raise ValueError(f"batch={run.batch} does not divide into accumulate={run.accumulate} equal parts")
    if run.schedule == "step" and not run.drops:
        raise ValueError("schedule=step needs drops=, the updates after which lr is multiplied by lr_decay: drops=3000")
    if run.drops and run.schedule != "step":
        raise ValueError(f"drops= belongs to schedule=step, here the schedule is {run.schedule}")
    if run.schedule == "plateau" and not run.eval_every:
        raise ValueError("schedule=plateau watches the evaluations: set eval_every=")
    if run.stateful and run.window is None:
        raise ValueError("stateful training reads a text in windows: set window=")
    if run.stateful and run.config().layer.attention != "linear":
        raise ValueError(
            f"stateful training carries a state that does not grow: attention must be linear, "
            f"got {run.config().layer.attention}"
        )
