"""What the tests of training share: runs whose steps take milliseconds, and ways to look at what they left."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import Tensor

from linattn.models.files import read
from linattn.train import Run
from linattn.train.metrics import FILE, read_lines

TINY = Run(
    preset="digits",
    changes={"width": 16, "num_heads": 2, "depth": 1},
    data="synthetic",
    data_options={"size": 4, "num_examples": 48},
    name="tiny",
    steps=12,
    batch=8,
    lr=1e-2,
    log_every=2,
    eval_every=4,
    checkpoint_every=3,
    device="cpu",
)


def tiny(**changes: Any) -> Run:
    return dataclasses.replace(TINY, **changes)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return read(folder / "weights.safetensors", "cpu")[1]


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / FILE) if line["kind"] == kind]


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same have in common."""
    return {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")}


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    assert all(a[name].equal(b[name]) for name in a), [name for name in a if not a[name].equal(b[name])]
