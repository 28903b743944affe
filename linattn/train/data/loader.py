"""Batches from a dataset that lies on the device: a permutation, and an index_select there.

`batches` and `streams` never end, and their place is a few numbers: epoch, offset within it, seed of the permutations.
The permutation of epoch e is a function of (seed, e), so a place can be entered without walking there.

A text is cut into windows. A window of w predictions holds w + 1 bytes: inputs are its first w, targets its last w, and
its last byte is the first of the window that follows it in the text. So every byte but the first is predicted once.

Axes:  N examples, or bytes of a text   B batch   T time, w + 1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from linattn._typing import Int, Shaped, Tensor
from linattn.train.data.dataset import Batch, Dataset


def batches(
    dataset: Dataset,
    batch_size: int,
    *,
    window: int | None = None,
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
    drop_last: bool = True,
) -> Shuffled:
    """Random batches without end: each epoch visits every example once, in a new order.

    Of a text, the examples are windows of `window` predictions, side by side from a new random start in each epoch.
    The seed of all orders is drawn from `generator` (torch's own, where none is given). What is left at the end of
    an epoch and does not fill a batch is dropped, or with drop_last=False makes a smaller one.
    """
    return Shuffled(dataset, batch_size, window, device, _draw_seed(generator), drop_last)


def streams(dataset: Dataset, batch_size: int, window: int, *, device: str | torch.device = "cpu") -> Streams:
    """A text cut into B equal parts, read side by side, in order, without end: row b goes on from row b of the batch
    before, so that a model may carry its state along. `batch.fresh` says where the parts begin anew and the state must
    be dropped. Of each part, the bytes that do not fill a last window are left out.
    """
    return Streams(dataset, batch_size, window, device)


def in_order(
    dataset: Dataset, batch_size: int, *, window: int | None = None, device: str | torch.device = "cpu"
) -> Iterator[Batch]:
    """Every example once, in order, and then the end: for evaluation. The last batch may be smaller.

    Of a text, the windows follow each other, and a last one that is shorter comes in a batch of its own: every byte but
    the first is predicted once. With batch_size=1 each window goes on from the one before, and is marked so.
    """
    _check(dataset, batch_size, window)
    dataset = dataset.to(device)
    return _examples_in_order(dataset, batch_size) if window is None else _text_in_order(dataset, batch_size, window)


def _examples_in_order(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    for rows in torch.arange(len(dataset), device=dataset.data.device).split(batch_size):
        yield _select(dataset, rows)


def _text_in_order(dataset: Dataset, batch_size: int, window: int) -> Iterator[Batch]:
    starts = torch.arange(0, max(len(dataset) - window, 0), window, device=dataset.data.device)
    for i, some in enumerate(starts.split(batch_size) if len(starts) else ()):
        yield Batch(_windows(dataset.data, some, window), fresh=batch_size > 1 or i == 0)
    tail = len(starts) * window
    if tail + 1 < len(dataset):
        yield Batch(dataset.data[None, tail:].clone(), fresh=batch_size > 1 or tail == 0)


class Walk(Iterator[Batch]):
    """An endless walk over a dataset, and its place: units (examples or windows) seen in this epoch."""

    kind: str

    def __init__(self, dataset: Dataset, batch_size: int, window: int | None, device: str | torch.device, seed: int):
        _check(dataset, batch_size, window)
        self.dataset = dataset.to(device)
        self.batch_size, self.window, self.seed = batch_size, window, seed
        self.epoch = self.offset = 0

    @property
    def epochs(self) -> float:
        """How often the data has been seen by now."""
        return self.epoch + self.offset / self.units

    @property
    def units(self) -> int:
        """What `offset` counts, in an epoch."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The place as plain numbers and strings, fit for JSON."""
        return {"epoch": self.epoch, "offset": self.offset, "seed": self.seed, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, bit for bit. It must come from the same data and the same way of walking."""
        mine = self.state_dict()
        if state.keys() != mine.keys():
            raise ValueError(f"a place has the entries {', '.join(mine)}; got {', '.join(map(str, state)) or 'none'}")
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"this place is of another walk: its {name} is {state[name]!r}, here it is {value!r}. "
                    f"Make the loader as it was made then, or start anew"
                )
        self.epoch, self.offset, self.seed = (int(state[name]) for name in ("epoch", "offset", "seed"))

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a place to mean the same."""
        return {
            "kind": self.kind,
            "batch_size": self.batch_size,
            "window": self.window,
            "data": f"{self.dataset.name} {self.dataset.split} {self.dataset.sha256}",
        }


class Shuffled(Walk):
    """What `batches` returns."""

    kind = "batches"

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        window: int | None,
        device: str | torch.device,
        seed: int,
        drop_last: bool,
    ):
        super().__init__(dataset, batch_size, window, device, seed)
        self.drop_last = drop_last
        self._entered: tuple[int, int] | None = None  # the (seed, epoch) that _order and _current belong to
        least = len(dataset) if window is None else (len(dataset) - window) // window
        if least < (batch_size if drop_last else 1):
            way = "a smaller window" if least < 1 else "a smaller batch_size, or drop_last=False"
            raise ValueError(
                f"{dataset.name} {dataset.split} has {least} {'examples' if window is None else 'windows'}, "
                f"which make no batch of {batch_size}: take {way}"
            )

    @property
    def units(self) -> int:
        if self.window is None:
            return len(self.dataset)
        return max(1, (len(self.dataset) - 1) // self.window)

    def __next__(self) -> Batch:
        self._enter()
        left = len(self._order) - self.offset
        if left < (self.batch_size if self.drop_last else 1):
            self.epoch, self.offset = self.epoch + 1, 0
            self._enter()
        rows = self._order[self.offset : self.offset + self.batch_size]
        self.offset += len(rows)
        if self.window is None:
            return _select(self._current, rows)
        return Batch(_windows(self._current.data, rows, self.window))

    def _enter(self) -> None:
        """Make the order of this epoch, and its examples where they are generated."""
        if self._entered == (self.seed, self.epoch):
            return
        generator = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        device, redraw = self.dataset.data.device, self.dataset.redraw
        self._current = redraw(self.epoch).to(device) if redraw and self.epoch else self.dataset
        if self.window is None:
            order = torch.randperm(len(self.dataset), generator=generator)
        else:
            first = int(torch.randint(self.window, (), generator=generator))
            order = torch.randperm((len(self.dataset) - 1 - first) // self.window, generator=generator)
            order = first + self.window * order
        self._order = order.to(device)
        self._entered = (self.seed, self.epoch)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "drop_last": self.drop_last}


class Streams(Walk):
    """What `streams` returns."""

    kind = "streams"

    def __init__(self, dataset: Dataset, batch_size: int, window: int, device: str | torch.device):
        super().__init__(dataset, batch_size, window, device, seed=0)
        length = len(dataset) // batch_size
        self.steps = (length - 1) // window  # batches in an epoch
        if self.steps < 1:
            raise ValueError(
                f"{dataset.name} {dataset.split} has {len(dataset)} bytes: {batch_size} streams of {length}, too short "
                f"for a window of {window} and the byte after it. Take a smaller batch_size or window"
            )
        self._rows = self.dataset.data[: batch_size * length].view(batch_size, length)

    @property
    def units(self) -> int:
        return self.steps

    def __next__(self) -> Batch:
        if self.offset >= self.steps:
            self.epoch, self.offset = self.epoch + 1, 0
        start = self.offset * self._width
        self.offset += 1
        return Batch(self._rows[:, start : start + self._width + 1].clone(), fresh=start == 0)

    @property
    def _width(self) -> int:
        assert self.window is not None
        return self.window


def _select(dataset: Dataset, rows: Int[Tensor, " B"]) -> Batch:
    parts = (dataset.data, dataset.labels, dataset.mask)
    return Batch(*(None if x is None else x.index_select(0, rows) for x in parts))  # pyright: ignore[reportArgumentType]


def _windows(text: Shaped[Tensor, " N"], starts: Int[Tensor, " B"], window: int) -> Shaped[Tensor, "B T"]:
    return text[starts[:, None] + torch.arange(window + 1, device=text.device)]


def _draw_seed(generator: torch.Generator | None) -> int:
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def _check(dataset: Dataset, batch_size: int, window: int | None) -> None:
    for name, value in (("batch_size", batch_size), ("window", window)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if (dataset.kind == "text") != (window is not None):
        have = "is a text" if dataset.kind == "text" else f"holds {dataset.kind}"
        way = (
            "pass window= (predictions a row)" if dataset.kind == "text" else "window= is for texts only: leave it out"
        )
        raise ValueError(f"{dataset.name} {have}, got window={window}: {way}")
