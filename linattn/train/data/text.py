"""A text as its bytes, whatever they encode: no tokeniser, V = 256.

Splits are contiguous: train is the first 90%, dev the next 5%, test the last 5% (of enwik8's 100 million bytes, the
usual 90, 5 and 5 million).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from linattn.train.data.dataset import Dataset
from linattn.train.data.originals import Place, originals, read_bytes
from linattn.train.data.sources import ENWIK8, TINYSHAKESPEARE, Source


def text_file(path: Path, split: str) -> Dataset:
    """A file of one's own, plain, or compressed as .xz, .gz or .zip."""
    return _dataset(path.name, split, read_bytes(path), "unknown")


def enwik8(where: Place, split: str) -> Dataset:
    """The first 10⁸ bytes of the English Wikipedia of March 2006. train 90 million bytes · dev 5 · test 5."""
    return _public(ENWIK8, where, split)


def tinyshakespeare(where: Place, split: str) -> Dataset:
    """1,115,394 bytes of Shakespeare's plays. train 1,003,854 bytes · dev 55,770 · test 55,770."""
    return _public(TINYSHAKESPEARE, where, split)


def _public(source: Source, where: Place, split: str) -> Dataset:
    (data,) = originals(source, list(source.originals), where)
    return _dataset(source.name, split, data, source.licence)


def _dataset(name: str, split: str, data: bytes, licence: str) -> Dataset:
    cuts = {"train": (0, 90), "dev": (90, 95), "test": (95, 100)}[split]
    begin, end = (len(data) * percent // 100 for percent in cuts)
    return Dataset(name, split, torch.from_numpy(np.frombuffer(data[begin:end], np.uint8).copy()), licence=licence)
