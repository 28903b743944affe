"""Every dataset by its name, and anybody's own by its path."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linattn.train.data.cifar10 import cifar10
from linattn.train.data.dataset import Dataset, check_split
from linattn.train.data.folder import image_folder
from linattn.train.data.generated import associative_recall, copy_task, synthetic
from linattn.train.data.mnist import digits, mnist
from linattn.train.data.originals import Place, place
from linattn.train.data.text import enwik8, text_file, tinyshakespeare

PUBLIC: dict[str, Callable[..., Dataset]] = {
    "mnist": mnist,
    "cifar10": cifar10,
    "enwik8": enwik8,
    "tinyshakespeare": tinyshakespeare,
}
AT_HAND: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    "copy": copy_task,
    "recall": associative_recall,
    "synthetic": synthetic,
}


def load(
    name: str | os.PathLike[str],
    *,
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    download: bool = True,
    **options: Any,
) -> Dataset:
    """One split ("train", "dev" or "test") of a dataset, whole and in memory. No training set holds what dev holds.

        "mnist" "cifar10" "enwik8" "tinyshakespeare"    in data_dir, else $LINATTN_DATA, else a cache folder;
                                                        downloaded to there and checked where missing
        "digits"                                        ships with the package
        "copy"       length= symbols= num_examples= seed=      the copy task
        "recall"     pairs= keys= values= num_examples= seed=  associative recall
        "synthetic"  size= channels= num_examples= seed=       images to try a loop with
        a folder     size= channels= cache_dir=                images in any format that pillow reads
        a file                                                 a text, as bytes; .xz, .gz and .zip are unpacked

    A path that does not exist as it is written is also looked for in the data folder. A name wins over a path: ./mnist
    is the folder. Options are those of the function that reads or makes the data; others are errors.

    >>> load("digits")
    <digits train: 1,397 images 8×8×1, sha256 a7e9e6542cd8>
    """
    check_split(split)
    reader = _reader(os.fspath(name), place(data_dir, download))
    known = list(inspect.signature(reader).parameters)[1:]  # without split
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}: it has {', '.join(known) or 'none'}")
    return reader(split, **options)


def _reader(name: str, where: Place) -> Callable[..., Dataset]:
    """What makes the dataset from a split and its options."""
    if name in AT_HAND:
        return AT_HAND[name]
    if name in PUBLIC:
        return functools.partial(PUBLIC[name], where)
    paths = (Path(name).expanduser(), where.root / name)
    for path in paths:
        if path.is_dir():
            return functools.partial(image_folder, path)
        if path.is_file():
            return functools.partial(text_file, path)
    raise ValueError(
        f"no dataset {name!r}: it is neither one of {', '.join([*PUBLIC, *AT_HAND])} nor a file or folder at "
        f"{' or '.join(map(str, paths))} ({where.chosen_by})"
    )
