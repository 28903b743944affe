"""A dataset as a value: all of one split in memory, as bytes.

Axes:  N examples   H height   W width   C channels   T time   B batch   V values that one byte takes here
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from linattn._typing import Bool, Float, Shaped, Tensor

SPLITS = ("train", "dev", "test")
AXES = {4: "images", 2: "sequences", 1: "text"}


class Batch(NamedTuple):
    """Some examples, on the device of the loader. A mask is True at the tokens that count in the loss."""

    data: Tensor
    labels: Tensor | None = None
    mask: Tensor | None = None
    fresh: bool = True  # False where row b goes on from row b of the batch before: keep the state (see `streams`)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """One split of a dataset.

    data        uint8: images (N, H, W, C), sequences (N, T), or a text (T,), whose examples are cut by the loader
    labels      uint8 (N,), the class of each example, where there are classes
    mask        bool (N, T), True at the tokens that count in the loss; None where all do
    num_values  V: data holds 0 … V-1
    sha256      of the bytes of data, labels and mask, one after the other: what exactly was trained on
    redraw      for generated data: the dataset of epoch e, instead of the same examples again
    """

    name: str
    split: str
    data: Shaped[Tensor, "N *example"]
    labels: Shaped[Tensor, " N"] | None = None
    mask: Bool[Tensor, "N T"] | None = None
    num_values: int = 256
    licence: str = "unknown"
    redraw: Callable[[int], Dataset] | None = None
    sha256: str = ""

    def __post_init__(self) -> None:
        check_split(self.split)
        if self.data.dtype != torch.uint8 or self.data.dim() not in AXES:
            raise ValueError(
                f"{self.name}: data must be uint8 images (N, H, W, C), sequences (N, T) or a text (T,), "
                f"got {self.data.dtype} {tuple(self.data.shape)}"
            )
        if len(self.data) == 0:
            raise ValueError(f"{self.name}: the {self.split} split is empty: choose another split, or more data")
        for name, x in (("labels", self.labels), ("mask", self.mask)):
            if x is not None and len(x) != len(self.data):
                raise ValueError(
                    f"{self.name}: {len(x)} {name} for {len(self.data)} examples: there must be one for each"
                )
        if not self.sha256:
            object.__setattr__(self, "sha256", _digest(self.data, self.labels, self.mask))

    @property
    def kind(self) -> str:
        """ "images", "sequences" or "text"."""
        return AXES[self.data.dim()]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example: (H, W, C), (T,), or () for a text, whose examples are cut by the loader."""
        return tuple(self.data.shape[1:])

    def __len__(self) -> int:
        """N; for a text its bytes."""
        return len(self.data)

    def __repr__(self) -> str:
        what = "bytes of text" if self.kind == "text" else f"{self.kind} {'×'.join(map(str, self.shape))}"
        return f"<{self.name} {self.split}: {len(self):,} {what}, sha256 {self.sha256[:12]}>"

    def to(self, device: str | torch.device) -> Dataset:
        """The same on another device."""
        moved = {name: getattr(self, name) for name in ("data", "labels", "mask")}
        return dataclasses.replace(self, **{name: x if x is None else x.to(device) for name, x in moved.items()})

    def marginal_first(self, smoothing: float = 1.0) -> Float[Tensor, " V"]:
        """p(x_1 = v) = (how many examples begin with v + smoothing) / (N + V · smoothing), over the training set.

        What a model is given for its first value, and what that value costs: -log2 p bits. A text may be entered
        anywhere, so there every byte counts as a first one. float64.
        """
        if self.split != "train":
            raise ValueError(
                f"the marginal belongs to the training set, this is the {self.split} split of {self.name}: "
                f"call marginal_first on load(..., split='train')"
            )
        if not smoothing > 0:
            raise ValueError(
                f"smoothing must be positive, got {smoothing}: a value never seen would cost infinite bits"
            )
        first = self.data if self.kind == "text" else self.data.flatten(1)[:, 0]
        # on the CPU: bincount has no repeatable form on CUDA
        counts = torch.bincount(first.cpu().long(), minlength=self.num_values).double() + smoothing
        return (counts / counts.sum()).to(self.data.device)


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")


def _digest(*tensors: Tensor | None) -> str:
    digest = hashlib.sha256()
    for x in tensors:
        if x is not None:
            digest.update(x.cpu().contiguous().numpy().data)
    return digest.hexdigest()
