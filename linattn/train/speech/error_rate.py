"""How far apart two sequences are, and how sure that is.

    error rate = (substitutions + deletions + insertions) / length of what was said

summed over utterances before the division. The interval comes from drawing speakers anew, with replacement: utterances
of one speaker err together, so utterances would give too narrow an interval.

Axes:  S speakers   R draws
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from linattn._typing import Tensor

DRAWS = 2_000


@dataclasses.dataclass(frozen=True)
class Errors:
    """Counts that add: what it takes to make `said` of `heard`."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    length: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """0 is perfect; more than 1 where more was heard than said. NaN where nothing was said."""
        return self.total / self.length if self.length else float("nan")


def errors(said: Sequence[Any], heard: Sequence[Any]) -> Errors:
    """The fewest changes (Levenshtein's distance), among equals those with the most substitutions.

    >>> errors("kitten", "sitting")
    Errors(substitutions=2, deletions=0, insertions=1, length=6)
    """
    # A cell is (all changes, deletions + insertions, deletions): the least in this order.
    row = [(j, j, 0) for j in range(len(heard) + 1)]
    for i, wanted in enumerate(said, 1):
        diagonal, row[0] = row[0], (i, i, i)
        for j, got in enumerate(heard, 1):
            above, left = row[j], row[j - 1]
            kept = diagonal if wanted == got else (diagonal[0] + 1, diagonal[1], diagonal[2])
            gone, extra = (above[0] + 1, above[1] + 1, above[2] + 1), (left[0] + 1, left[1] + 1, left[2])
            diagonal, row[j] = above, min(kept, gone, extra)
    total, moved, deleted = row[-1]
    return Errors(total - moved, deleted, moved - deleted, len(said))


def interval(
    by_speaker: Mapping[str, Errors], *, level: float = 0.95, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The middle `level` of the error rates of draws of speakers."""
    counts = torch.tensor([[e.total, e.length] for e in by_speaker.values()], dtype=torch.float64)
    picked = torch.randint(len(counts), (draws, len(counts)), generator=torch.Generator().manual_seed(seed))
    wrong, length = counts[picked].sum(1).unbind(1)
    return quantiles(wrong / length.clamp(min=1), level)


def quantiles(rates: Tensor, level: float) -> tuple[float, float]:
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=rates.dtype)
    low, high = torch.quantile(rates, ends).tolist()
    return low, high
