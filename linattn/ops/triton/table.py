"""Which tile sizes, warps and pipeline stages each kernel is started with: data, read once (launch_table.json).

`benchmarks/tune.py` writes the file, with the machine that it was measured on. A GPU that it does not know takes the
same rows: they are a sensible default, and nothing is tuned while a program runs.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Tile:
    """tokens of a tile, numbers of a block of the state (0: all), warps, stages of the pipeline of loads."""

    tokens: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Filling:
    """How long sequences are cut: programs for each multiprocessor, and the fewest tokens of a segment."""

    programs: int
    tokens: int


@functools.cache
def tile(kernel: str, narrow: bool, D: int, M: int) -> Tile:
    """For blocks of D features and M values; narrow: products of bfloat16."""
    rows = _table()["tiles"][kernel]["bf16" if narrow else "fp32"]
    size = max(D, M)
    width = min((int(w) for w in rows if int(w) >= size), default=max(int(w) for w in rows))
    return Tile(*rows[str(width)])


@functools.cache
def filling(direction: str, size: int) -> Filling:
    """direction: "forward" or "backward"; size: the larger of D and M."""
    rows = _table()["filling"][direction]
    width = min((int(w) for w in rows if int(w) >= size), default=max(int(w) for w in rows))
    return Filling(*rows[str(width)])


@functools.cache
def widest_sweep() -> int:
    """The widest heads whose gradients are made in a single sweep."""
    return _table()["sweep"]


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(resources.files("linattn.ops.triton").joinpath("launch_table.json").read_text())
