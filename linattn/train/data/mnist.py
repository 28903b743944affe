"""MNIST, and the 8 × 8 digits that ship with the package: images in the idx form.

idx, big-endian: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as uint32, then the values.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch

from linattn.train.data.dataset import Dataset
from linattn.train.data.originals import Place, originals, read_bytes
from linattn.train.data.sources import MNIST

UNSIGNED_BYTE = 8


def mnist(where: Place, split: str) -> Dataset:
    """28 × 28 × 1. train 55,000 · dev 5,000, the last of the published training set · test 10,000."""
    part = "t10k" if split == "test" else "train"
    files = [f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"]
    images, labels = (read_idx(data, name) for data, name in zip(originals(MNIST, files, where), files, strict=True))
    rows = {"train": slice(None, -5000), "dev": slice(-5000, None), "test": slice(None)}[split]
    return _dataset("mnist", split, images[rows], labels[rows], MNIST.licence)


def digits(split: str) -> Dataset:
    """8 × 8 × 1, the UCI test set as scikit-learn has it: 1,797 images of 17 levels. See DIGITS.md for its origin.

    Level v of 0 … 16 is the byte (255 v + 8) // 16, evenly spread from 0 to 255; (16 x + 127) // 255 is v again.
    train 1,397 · dev 200 · test 200, in this order: the images come writer after writer, so those held out are by
    others than those trained on.
    """
    folder = Path(__file__).parent
    levels, labels = (
        read_idx(read_bytes(folder / f"digits-{name}.xz"), name) for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    rows = {"train": slice(None, -400), "dev": slice(-400, -200), "test": slice(-200, None)}[split]
    images = ((levels.astype(np.uint16) * 255 + 8) // 16).astype(np.uint8)
    return _dataset("digits", split, images[rows], labels[rows], "CC BY 4.0 (E. Alpaydin, C. Kaynak; see DIGITS.md)")


def read_idx(data: bytes, name: str) -> np.ndarray:
    """The array that an idx file of unsigned bytes holds; `name` is for errors."""
    head = data[:4]
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != UNSIGNED_BYTE:
        raise ValueError(
            f"{name} is no idx file of unsigned bytes: it begins with {head.hex(' ')}, expected 00 00 08 .."
        )
    begin = 4 + 4 * head[3]
    if len(data) < begin:
        raise ValueError(f"{name} ends within its header, after {len(data)} bytes: fetch it again")
    shape = struct.unpack(f">{head[3]}I", data[4:begin])
    if len(data) - begin != math.prod(shape):
        raise ValueError(
            f"{name} should hold {' × '.join(map(str, shape))} = {math.prod(shape)} bytes after its header, "
            f"and holds {len(data) - begin}: fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape).copy()  # copied: torch wants to write to it


def _dataset(name: str, split: str, images: np.ndarray, labels: np.ndarray, licence: str) -> Dataset:
    data = torch.from_numpy(images)[..., None]
    return Dataset(name, split, data, torch.from_numpy(labels), licence=licence)
