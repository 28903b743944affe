"""SpecAugment (Park et al. 2019, arXiv 1904.08779): stripes of time and of frequency are blanked while training.

Features are normalised, so a blanked place is 0, the mean. No stripe of time is longer than a part of its utterance.
Speed perturbation (Ko et al. 2015) is `resample.at_speed`: it changes sounds, and is done before features are made.

Axes:  B batch   T frames   F bins   S stripes
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linattn._typing import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class SpecAugment:
    """How many stripes, and how wide at most: `time_width` frames, but no more than `time_part` of the utterance."""

    times: int = 2
    time_width: int = 40
    time_part: float = 0.2
    bands: int = 2
    band_width: int = 10

    def __call__(
        self, frames: Float[Tensor, "B T F"], lengths: Int[Tensor, " B"], generator: torch.Generator | None = None
    ) -> Float[Tensor, "B T F"]:
        """Each row with stripes of its own, from `generator` (on the CPU) or torch's own."""
        T, F = frames.shape[1:]
        longest = (lengths * self.time_part).clamp(max=self.time_width)
        hidden = self._stripes(lengths, longest, self.times, T, generator)[:, :, None]
        bins = torch.full_like(lengths, F)
        hidden = hidden | self._stripes(bins, bins.clamp(max=self.band_width), self.bands, F, generator)[:, None]
        return frames.masked_fill(hidden, 0.0)

    @staticmethod
    def _stripes(
        sizes: Int[Tensor, " B"], widest: Tensor, count: int, along: int, generator: torch.Generator | None
    ) -> Bool[Tensor, "B X"]:
        """True inside `count` stripes a row, each of a width in 0 … widest, anywhere within the row's size."""
        drawn = torch.rand(2, len(sizes), count, generator=generator).to(sizes.device)
        width = (drawn[0] * (widest[:, None] + 1)).floor()
        start = (drawn[1] * (sizes[:, None] - width + 1)).floor()
        place = torch.arange(along, device=sizes.device)[:, None]
        return ((place >= start[:, None]) & (place < (start + width)[:, None])).any(-1)
