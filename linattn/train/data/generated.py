"""Data that is drawn, not read: the copy task, associative recall, and images to try a training loop with.

Axes:  N examples   T time   H height   W width   C channels
"""

from __future__ import annotations

import functools
import hashlib

import torch

from linattn.train.data.dataset import Dataset

LICENCE = "none needed: generated"


def copy_task(split: str, *, length: int = 128, symbols: int = 10, num_examples: int = 6400, seed: int = 0) -> Dataset:
    """0 w 0 w: a word of random symbols 1 … symbols, to be said again after the second separator 0; then zeros.

    |w| is uniform in 1 … length/2 - 1. The mask is True on the second w: what comes there is known exactly, so the loss
    of a model that addresses sharply goes to 0. Each epoch of the training set is drawn anew; dev and test stay.
    """
    for name, value, least in (("length", length, 4), ("symbols", symbols, 2), ("num_examples", num_examples, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if symbols > 255:
        raise ValueError(f"symbols must be at most 255, so that they fit a byte with the separator, got {symbols}")
    return _draw_copies(length, symbols, num_examples, seed, split, epoch=0)


def associative_recall(
    split: str, *, pairs: int = 16, keys: int = 64, values: int = 64, num_examples: int = 6400, seed: int = 0
) -> Dataset:
    """k v k v … k v, then every key again in another order, each followed by the value that it had: length 4 · pairs.

    The keys 0 … keys-1 of a sequence differ from each other, the values keys … keys+values-1 need not. The mask is True
    on the values of the second half: they are known exactly to who has remembered all pairs, and guessing among the
    values costs log₂ values bits. Each epoch of the training set is drawn anew; dev and test stay.
    """
    for name, value, least in (("pairs", pairs, 1), ("values", values, 2), ("num_examples", num_examples, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if keys < pairs:
        raise ValueError(f"the keys of a sequence differ, so keys must be at least pairs={pairs}, got {keys}")
    if keys + values > 256:
        raise ValueError(f"keys and values must fit a byte, at most 256 together, got {keys} + {values}")
    return _draw_recall(pairs, keys, values, num_examples, seed, split, epoch=0)


def synthetic(split: str, *, size: int = 28, channels: int = 1, num_examples: int = 1000, seed: int = 0) -> Dataset:
    """Discs of random place, radius and colour on a background of random colour: something a model can learn, at once.

    The labels say in which quarter of the image the centre lies: 0 1 above, 2 3 below.
    """
    for name, value in (("size", size), ("channels", channels), ("num_examples", num_examples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    draw = _generator("synthetic", seed, split, 0)
    centre = torch.rand(num_examples, 2, 1, 1, generator=draw)
    radius = 0.1 + 0.3 * torch.rand(num_examples, 1, 1, generator=draw)
    colours = torch.randint(256, (2, num_examples, 1, 1, channels), generator=draw, dtype=torch.uint8)
    place = (torch.arange(size) + 0.5) / size
    y, x = place[:, None] - centre[:, 0], place[None, :] - centre[:, 1]
    images = torch.where((y.square() + x.square() < radius.square())[..., None], colours[0], colours[1])
    low, right = (centre > 0.5).flatten(1).unbind(1)
    return Dataset("synthetic", split, images, (2 * low + right).to(torch.uint8), licence=LICENCE)


def _draw_copies(length: int, symbols: int, num_examples: int, seed: int, split: str, epoch: int) -> Dataset:
    draw = _generator("copy", seed, split, epoch)
    most = length // 2 - 1
    n = torch.randint(1, most + 1, (num_examples, 1), generator=draw)
    word = torch.randint(1, symbols + 1, (num_examples, most), generator=draw, dtype=torch.uint8)
    t = torch.arange(length)
    first, second = (t >= 1) & (t <= n), (t >= n + 2) & (t <= 2 * n + 1)
    place = torch.where(first, t - 1, torch.where(second, t - n - 2, 0))
    tokens = word.gather(1, place).where(first | second, 0)
    redraw = functools.partial(_draw_copies, length, symbols, num_examples, seed, split)
    return Dataset(
        "copy",
        split,
        tokens,
        mask=second,
        num_values=symbols + 1,
        licence=LICENCE,
        redraw=redraw if split == "train" else None,
    )


def _draw_recall(pairs: int, keys: int, values: int, num_examples: int, seed: int, split: str, epoch: int) -> Dataset:
    draw = _generator("recall", seed, split, epoch)
    key = torch.rand(num_examples, keys, generator=draw).argsort(1)[:, :pairs]
    value = torch.randint(keys, keys + values, (num_examples, pairs), generator=draw)
    asked = torch.rand(num_examples, pairs, generator=draw).argsort(1)
    halves = (torch.stack((key, value), 2), torch.stack((key.gather(1, asked), value.gather(1, asked)), 2))
    mask = torch.arange(4 * pairs) % 2 == 1
    mask[: 2 * pairs] = False
    redraw = functools.partial(_draw_recall, pairs, keys, values, num_examples, seed, split)
    return Dataset(
        "recall",
        split,
        torch.cat(halves, 1).flatten(1).to(torch.uint8),
        mask=mask.expand(num_examples, -1).clone(),
        num_values=keys + values,
        licence=LICENCE,
        redraw=redraw if split == "train" else None,
    )


def _generator(*names: object) -> torch.Generator:
    """A generator of its own for each name, seed, split and epoch."""
    digest = hashlib.sha256(" ".join(map(str, names)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
