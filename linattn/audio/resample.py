"""Other sampling rates, by a windowed sinc in its polyphase form; whole, or piece by piece with the same result.

    y[n] = Σ_k x[k] g(n a/b - k)      g(t) = c sinc(c t) w(t)      c = ρ min(1, b/a)      from a to b samples a second

With b/a = L/M in lowest terms, n M/L = i + p/L: output n meets the inputs i-h … i+h with phase p of L filters, which
are computed once. After L outputs and M inputs the phases begin again, so a sound is mostly a product of its periods,
laid side by side, with one banded matrix. w is a Kaiser window; ρ puts the cut-off a little below half the lower rate,
where the filter's slope ends.

Axes:  N samples before, M after   P phases   K taps, 2h + 1
       Q, X outputs and inputs of a period
"""

from __future__ import annotations

import functools
import math

import torch

from linattn._typing import Float, Tensor

ZEROS = 64  # zero crossings of the sinc on each side
BETA = 9.0  # of the Kaiser window: aliases 90 dB down
CUTOFF = 0.97  # ρ: the slope of a window of that width and β ends at half the lower rate
BLOCK = 1 << 13  # outputs at a time
TOGETHER = 32  # outputs of a row of the product, at least
LARGEST = 1 << 21  # numbers in the matrix of a period


class Resampler:
    """Samples at one rate in, samples at another out. In any pieces the result is that of the whole."""

    def __init__(self, before: int, after: int):
        for name, rate in (("before", before), ("after", after)):
            if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
                raise ValueError(f"a sampling rate is a positive integer (samples a second), got {name}={rate!r}")
        common = math.gcd(before, after)
        self.up, self.down = after // common, before // common  # L and M
        self.filters = filters(self.up, self.down)
        self.half = self.filters.shape[1] // 2
        turns = -(-TOGETHER // self.up)
        self.outputs, self.inputs = turns * self.up, turns * self.down  # of a period, or of several
        self.period = period(self.filters, self.outputs, self.inputs)
        self.kept = torch.zeros(self.half)  # inputs that are still needed, from index `start` on
        self.start, self.seen, self.made = -self.half, 0, 0

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, " M"]:
        """All outputs whose inputs are there by now."""
        self.kept = torch.cat([self.kept, samples.float()])
        self.seen += len(samples)
        return self._until(self.seen - self.half)

    def finish(self) -> Float[Tensor, " N"]:
        """The last ones: the sound has ended, and silence follows. ⌈N L/M⌉ are made in all."""
        self.kept = torch.cat([self.kept, torch.zeros(self.half)])
        return self._until(self.seen)

    def _until(self, inputs: int) -> Float[Tensor, " N"]:
        """The outputs that lie before input number `inputs`."""
        end = max(self.made, -(-inputs * self.up // self.down))
        parts = [self._outputs(n, min(n + BLOCK, end)) for n in range(self.made, end, BLOCK)]
        self.made = end
        spare = self.made * self.down // self.up - self.half - self.start
        if spare > 0:
            self.kept, self.start = self.kept[spare:].clone(), self.start + spare
        return torch.cat([torch.zeros(0), *parts])

    def _outputs(self, begin: int, end: int) -> Float[Tensor, " N"]:
        first, last = -(-begin // self.outputs), end // self.outputs  # whole periods between them
        if self.period is None or first >= last:
            return self._one_by_one(begin, end)
        middle = self._periods(first, last)
        edges = self._one_by_one(begin, first * self.outputs), self._one_by_one(last * self.outputs, end)
        return torch.cat([edges[0], middle, edges[1]])

    def _periods(self, first: int, last: int) -> Float[Tensor, " N"]:
        """The outputs of whole periods, from the inputs that any of them meets."""
        assert self.period is not None
        near = self.kept[first * self.inputs - self.half - self.start :].unfold(0, self.period.shape[1], self.inputs)
        return (near[: last - first].double() @ self.period.T).float().flatten()

    def _one_by_one(self, begin: int, end: int) -> Float[Tensor, " N"]:
        places = torch.arange(begin, end) * self.down
        first = places // self.up - self.half - self.start
        near = self.kept[first[:, None] + torch.arange(self.filters.shape[1])].double()
        return (near * self.filters[places % self.up]).sum(1).float()


def resample(samples: Float[Tensor, " N"], before: int, after: int) -> Float[Tensor, " M"]:
    """The whole sound, from `before` to `after` samples a second.

    >>> resample(torch.zeros(44_100), 44_100, 16_000).shape
    torch.Size([16000])
    """
    if before == after:
        return samples
    made = Resampler(before, after)
    return torch.cat([made.push(samples), made.finish()])


def at_speed(samples: Float[Tensor, " N"], speed: float) -> Float[Tensor, " M"]:
    """Played `speed` times as fast, with the pitch that this brings; to a thousandth."""
    return resample(samples, round(1000 * speed), 1000)


@functools.lru_cache(8)
def filters(up: int, down: int) -> Float[Tensor, "P K"]:
    """g at the taps of each phase, float64: taps[p, j] = g(p/L + h - j)."""
    c = CUTOFF * min(1.0, up / down)
    half = math.ceil(ZEROS / c)
    t = torch.arange(up, dtype=torch.float64)[:, None] / up + half - torch.arange(2 * half + 1, dtype=torch.float64)
    inside = (1 - (c * t / ZEROS) ** 2).clamp(min=0)
    window = torch.special.i0(BETA * inside.sqrt()) / torch.special.i0(torch.tensor(BETA, dtype=torch.float64))
    return c * torch.sinc(c * t) * window.where(inside > 0, 0)


def period(taps: Float[Tensor, "P K"], outputs: int, inputs: int) -> Float[Tensor, "Q X"] | None:
    """The banded matrix of a period: row p has its filter from input ⌊p M/L⌋ on. None where it would be large."""
    up, width = taps.shape
    if outputs * (width + inputs) > LARGEST:
        return None
    begins = [p * inputs // outputs for p in range(outputs)]
    made = torch.zeros(outputs, width + begins[-1], dtype=torch.float64)
    for p, begin in enumerate(begins):
        made[p, begin : begin + width] = taps[p * (inputs * up // outputs) % up]
    return made
