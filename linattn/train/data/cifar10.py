"""CIFAR-10 in the binary version: for each image one byte of label, then its red, green and blue planes of 32 × 32.

Besides the six single files, the data folder may hold

    cifar-10-binary.tar.gz    the published archive, read without unpacking it
    *.webp and labels.npy     lossless mosaics, at 60% of its size: data_batch_1.webp … test_batch.webp, each 100 × 100
                              tiles of 32 × 32, row by row; labels.npy, uint8 (60000,), in the order of the files

From a mosaic the original file is made again, byte for byte, and has to have its checksum.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import torch

from linattn.train.data.dataset import Dataset
from linattn.train.data.originals import DAMAGE, Place, damaged, originals, single_files
from linattn.train.data.sources import CIFAR10, CIFAR10_ARCHIVE

PLANES = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32


def cifar10(where: Place, split: str) -> Dataset:
    """32 × 32 × 3. train 45,000 · dev 5,000, the last of the published training set · test 10,000."""
    numbers = {"train": range(1, 6), "dev": (5,)}.get(split)
    files = [f"data_batch_{i}.bin" for i in numbers] if numbers else ["test_batch.bin"]
    parts = [read_records(data) for data in originals(CIFAR10, files, where, (single_files, archive, mosaics))]
    rows = {"train": slice(None, -5000), "dev": slice(-5000, None), "test": slice(None)}[split]
    images, labels = (np.concatenate(kind)[rows] for kind in zip(*parts, strict=True))
    return Dataset("cifar10", split, torch.from_numpy(images), torch.from_numpy(labels), licence=CIFAR10.licence)


def read_records(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) and labels (N,) of one file."""
    if len(data) % RECORD:
        raise ValueError(f"a CIFAR-10 file holds records of {RECORD} bytes, got {len(data)} bytes: fetch it again")
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    images = records[:, 1:].reshape(-1, *PLANES).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].copy()


def archive(folder: Path, names: list[str]) -> dict[str, tuple[Path, bytes]]:
    """The form of the published archive."""
    path, found = folder / CIFAR10_ARCHIVE, {}
    if not names or not path.is_file():
        return found
    try:
        with tarfile.open(path, "r|gz") as members:  # one pass: going back would decompress from the start
            for member in members:
                name = Path(member.name).name
                if name in names and (file := members.extractfile(member)):
                    found[name] = (path, file.read())
                    if len(found) == len(names):
                        break
    except DAMAGE as error:
        raise damaged(path, error) from error
    return found


def mosaics(folder: Path, names: list[str]) -> dict[str, tuple[Path, bytes]]:
    """The form of the lossless mosaics."""
    paths = {name: (folder / name).with_suffix(".webp") for name in names}
    paths = {name: path for name, path in paths.items() if path.is_file()}
    path = folder / "labels.npy"
    if not paths or not path.is_file():
        return {}
    found, order = {}, list(CIFAR10.originals)
    try:
        labels = np.load(path, allow_pickle=False).reshape(len(order), -1)
        for name, path in paths.items():
            found[name] = (path, _records(path, labels[order.index(name)]))
    except DAMAGE as error:
        raise damaged(path, error) from error
    return found


def _records(mosaic: Path, labels: np.ndarray) -> bytes:
    from PIL import Image

    with Image.open(mosaic) as image:
        pixels = np.asarray(image.convert("RGB"))
    tiles = pixels.reshape(pixels.shape[0] // 32, 32, pixels.shape[1] // 32, 32, 3)
    planes = tiles.transpose(0, 2, 4, 1, 3).reshape(len(labels), RECORD - 1)
    return np.concatenate([labels.astype(np.uint8)[:, None], planes], 1).tobytes()
