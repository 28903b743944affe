"""How large everything is: `quick` for two CPU cores and five minutes, `full` for an hour or so of a large GPU.

A task is trained with one budget of tokens and one learning rate for everybody. `seconds` are those of a run with the
map elu; only their proportions count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEEP = {"norm_first": True, "activation": "gelu"}
LOCAL = {
    "conv": 2,
    "position": "none",
    "rotary": "before",
}  # neighbours are known: what is learned is addressing


@dataclass(frozen=True)
class TaskSize:
    """A task that every map is screened on.

    name           "recall", or a part with the data behind a dash, "music-nottingham"
    kind           of its jobs
    preset         with `model`, the changes of it that all arms share (width and ff_width among them)
    run            fields of the training run
    data           options of its data
    head_widths    those that are screened; the best four maps are chosen at the first
    final_widths   those of the finals; None: the first
    """

    name: str
    kind: str
    preset: str
    model: dict[str, Any]
    run: dict[str, Any]
    data: dict[str, Any]
    head_widths: tuple[int, ...]
    seconds: float
    final_widths: tuple[int, ...] | None = None

    @property
    def part(self) -> str:
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class CopySize:
    """`reformer`: the lengths at which Reformer, the slowest, takes part, with the first seed."""

    lengths: tuple[int, ...]
    reformer: tuple[int, ...]
    model: dict[str, Any]
    run: dict[str, Any]
    head_width: int
    examples: int
    seeds: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ShortSize:
    """tokens: timed; trained: lengths for models of text beside that of the task, as many tokens an update."""

    tokens: tuple[int, ...]
    compiled: tuple[int, ...]  # those timed compiled as well: each takes longer to compile than to time
    shape: tuple[int, int]  # heads, width of a head
    full_load: Mapping[str, int]  # tokens of a full batch, by device
    budget: float
    trained: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class LengthsSize:
    """A model of text trained at `window` reads `streams` stretches of `longest` bytes."""

    window: int
    longest: int
    streams: int
    arms: tuple[tuple[str, str], ...]  # arm, rotary
    seeds: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ScalingSize:
    """N in powers of two from 2^first to 2^last; a series ends before a call that would take more than `longest` s."""

    first: int
    last: int
    heads: int
    width: int
    tokens: int  # of a batch: B = tokens / N, at least one
    longest: float
    budget: float
    arms: tuple[str, ...] = ("elu", "softmax-attention", "reformer-attention")


@dataclass(frozen=True)
class Sizes:
    name: str
    tasks: tuple[TaskSize, ...]
    copy: CopySize
    short: ShortSize
    lengths: LengthsSize
    scaling: ScalingSize
    final_seeds: tuple[int, ...] = (1, 2, 3)  # not the screen's: what it chose was lucky with that one
    eval_batch: int = 128
    notes: dict[str, Any] = field(default_factory=dict)


ADAM = {"optimizer": "adamw", "betas": (0.9, 0.98), "warmup": 20, "lr_decay": 0.05, "log_every": 20}

QUICK = Sizes(
    "quick",
    tasks=(
        TaskSize(
            "recall",
            "learn",
            "copy",
            {"width": 48, "ff_width": 48, "depth": 1, "conv": 2, "position": "none", "vocabulary": 24, **DEEP},
            {**ADAM, "steps": 240, "batch": 16, "lr": 1e-2, "weight_decay": 0.01},
            {"pairs": 12, "keys": 12, "values": 12, "examples": 256},
            (8, 4, 16),
            0.9,
            (8, 16),
        ),
        TaskSize(
            "images",
            "learn",
            "digits",
            {"width": 32, "ff_width": 64, "depth": 2, **DEEP},
            {**ADAM, "steps": 120, "batch": 32, "lr": 1e-2, "weight_decay": 0.1},
            {"name": "digits"},
            (16,),
            1.2,
        ),
        TaskSize(
            "text",
            "learn",
            "text",
            {"width": 48, "ff_width": 96, "depth": 2, "bias": False, **DEEP},
            {**ADAM, "steps": 160, "batch": 10, "window": 128, "lr": 1e-2, "weight_decay": 0.1},
            {"bytes": 5_000_000, "examples": 128},
            (16,),
            2.0,
        ),
        TaskSize(
            "music-jsb",
            "music",
            "text",
            {"width": 48, "ff_width": 96, "depth": 2, **DEEP},
            {**ADAM, "steps": 100, "batch": 12, "lr": 8e-3, "weight_decay": 0.1},
            {"file": "JSB_Chorales", "crop": 64},
            (16,),
            0.9,
        ),
    ),
    copy=CopySize(
        lengths=(16, 32),
        reformer=(32,),
        model={"width": 48, "ff_width": 96, "depth": 2, "vocabulary": 11, **LOCAL, **DEEP},
        run={**ADAM, "steps": 300, "batch": 24, "lr": 1e-2, "weight_decay": 0.0},
        head_width=24,
        examples=256,
        seeds=(1, 2, 3),
        seconds=2.5,
    ),
    short=ShortSize((16, 64, 256, 1024, 4096), (), (4, 64), {"cpu": 2048, "cuda": 65_536}, 0.05, (32, 512), 2.0),
    lengths=LengthsSize(
        128,
        2048,
        8,
        (("elu", "before"), ("elu", "none"), ("softmax-attention", "before"), ("softmax-attention", "none")),
        (1,),
        4.0,
    ),
    scaling=ScalingSize(9, 16, 8, 32, 4096, 1.0, 0.05),
)

FULL_RUN = {**ADAM, "warmup": 100, "precision": "bf16"}
FULL = Sizes(
    "full",
    tasks=(
        TaskSize(
            "recall",
            "learn",
            "copy",
            {"width": 128, "ff_width": 256, "depth": 2, "conv": 4, "position": "none", "vocabulary": 256, **DEEP},
            {**ADAM, "warmup": 100, "steps": 1500, "batch": 128, "lr": 2e-3, "weight_decay": 0.01},
            {"pairs": 64, "keys": 128, "values": 128, "examples": 2048},
            (16, 8, 32, 64),
            18.0,
            (16, 64),
        ),
        TaskSize(
            "text",
            "learn",
            "text",
            {"width": 256, "ff_width": 1024, "depth": 4, "bias": False, **DEEP},
            {**FULL_RUN, "steps": 1500, "batch": 64, "window": 512, "lr": 2e-3, "weight_decay": 0.1},
            {"bytes": 25_000_000, "examples": 1000},
            (32,),
            35.0,
        ),
        TaskSize(
            "images",
            "learn",
            "mnist",
            {"width": 256, "ff_width": 1024, "depth": 4, "dropout": 0.1, **DEEP},
            {**FULL_RUN, "steps": 1200, "batch": 64, "lr": 1e-3, "weight_decay": 0.01},
            {"name": "mnist", "examples": 2000},
            (32,),
            35.0,
        ),
        TaskSize(
            "music-nottingham",
            "music",
            "text",
            {"width": 128, "ff_width": 512, "depth": 3, "dropout": 0.1, **DEEP},
            {**ADAM, "warmup": 100, "steps": 1200, "batch": 32, "lr": 2e-3, "weight_decay": 0.1},
            {"file": "Nottingham", "crop": 512},
            (32,),
            25.0,
        ),
        TaskSize(
            "speech",
            "speech",
            "speech",
            {"width": 192, "ff_width": 768, "depth": 9, "causal": False},
            {**FULL_RUN, "steps": 900, "batch": 128, "lr": 1e-3, "clip": 1.0},
            {"name": "speechocean762", "scaling": "utterance", "speeds": (0.9, 1.0, 1.1), "batch_frames": 40_000},
            (32,),
            60.0,
        ),
    ),
    copy=CopySize(
        lengths=(32, 128, 512, 2048),
        reformer=(32, 128, 512),
        model={"width": 256, "ff_width": 1024, "depth": 4, "vocabulary": 11, **LOCAL, **DEEP},
        run={**ADAM, "warmup": 100, "steps": 3000, "batch": 64, "lr": 5e-4, "optimizer": "radam", "weight_decay": 0.0},
        head_width=32,
        examples=1024,
        seeds=(1, 2, 3),
        seconds=45.0,
    ),
    short=ShortSize(
        (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        (64, 512, 4096),
        (8, 64),
        {"cpu": 8192, "cuda": 65_536},
        0.25,
        (32, 128),
        35.0,
    ),
    lengths=LengthsSize(
        512,
        16_384,
        32,
        (
            *((arm, rotary) for arm in ("elu", "softmax-attention", "taylor") for rotary in ("before", "none")),
            ("elu", "after"),
        ),
        (1, 2, 3),
        45.0,
    ),
    scaling=ScalingSize(9, 20, 8, 32, 65_536, 8.0, 0.5),
)
SIZES = {sizes.name: sizes for sizes in (QUICK, FULL)}
