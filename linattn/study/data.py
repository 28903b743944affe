"""The data of the study's parts, read once a process. What is not there is `Missing`, with what to do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linattn.study.jobs import Missing
from linattn.train.data import Dataset, load
from linattn.train.data.originals import COMPRESSED, place, read_bytes

BEGINNINGS = ("enwik8/enwik8_first25MB", "enwik8/enwik8", "enwik8")  # of one and the same text
CUTS = {"train": (0, 90), "dev": (90, 95), "test": (95, 100)}


@functools.lru_cache(maxsize=4)
def generated(name: str, split: str, examples: int, options: tuple[tuple[str, int], ...]) -> Dataset:
    """The copy task or associative recall."""
    chosen: dict[str, Any] = {"num_examples": examples, **dict(options)}
    return load(name, split=split, **chosen)


@functools.lru_cache(maxsize=4)
def images(name: str, split: str) -> Dataset:
    """The digits that ship with the package, or MNIST."""
    try:
        return load(name, split=split)
    except ValueError as error:
        raise Missing(str(error)) from error


@functools.lru_cache(maxsize=4)
def text(split: str, size: int) -> Dataset:
    """The first `size` bytes of enwik8, in 90, 5 and 5 percent; where there is none, Shakespeare's plays."""
    found = _enwik8(size)
    if found is None:
        try:
            return load("tinyshakespeare", split=split)
        except ValueError as error:
            raise Missing(f"no text: enwik8 is not there, and Shakespeare's plays neither: {error}") from error
    begin, end = (len(found) * percent // 100 for percent in CUTS[split])
    data = torch.from_numpy(np.frombuffer(found[begin:end], np.uint8).copy())
    return Dataset(f"enwik8, the first {len(found):,} bytes", split, data, licence="GFDL, CC BY-SA")


@functools.lru_cache(maxsize=1)
def _enwik8(size: int) -> bytes | None:
    root = place().root
    paths = (root / f"{name}{end}" for name in BEGINNINGS for end in COMPRESSED)
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else read_bytes(path)[:size]


def music_file(name: str) -> Path:
    root = place().root
    path = root / "music" / f"{name}.mat"
    if not path.is_file():
        raise Missing(
            f"{path} is not there: put the piano rolls of Boulanger-Lewandowski et al. 2012 (as .mat) into the folder "
            f"music of LINATTN_DATA"
        )
    return path
