"""The little statistics that the report needs, in plain Python.

interval    a mean with its 95% interval by Student's t over seeds (or texts): x̄ ± t(n - 1) s / √n
exponent    b of y = a N^b by least squares in logarithms, with the 95% interval of the slope
apart       two intervals that do not overlap: what the report calls different. That asks for more than a test of the
            difference would, and keeps its sense when many pairs are looked at
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# The two-sided 95% points of Student's t with 1 … 30 degrees of freedom.
T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


@dataclass(frozen=True)
class Interval:
    """A mean of n values and the ends of its interval; with one value there is no interval (low and high are None)."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def known(self) -> bool:
        return self.low is not None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends, where there is an interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def interval(values: Sequence[float], within: tuple[float, float] | None = None) -> Interval:
    """The ends are cut off at those of `within`, where the mean can only lie there (an accuracy between 0 and 1).

    >>> interval([1.0, 2.0, 3.0])
    Interval(mean=2.0, low=-0.484..., high=4.484..., n=3)
    """
    if not values:
        raise ValueError("an interval needs values, got none")
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(mean, None, None, n)
    half = t95(n - 1) * statistics.stdev(values) / math.sqrt(n)
    low, high = within or (-math.inf, math.inf)
    return Interval(mean, max(mean - half, low), min(mean + half, high), n)


def t95(freedom: int) -> float:
    """Beyond the table the value of its end, which is a little too wide and never too narrow."""
    if freedom < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {freedom}")
    return T95[min(freedom, len(T95)) - 1]


def apart(a: Interval, b: Interval) -> bool:
    """Whether both intervals are known and do not overlap. Touching counts as overlapping."""
    if a.ends is None or b.ends is None:
        return False
    return a.ends[1] < b.ends[0] or b.ends[1] < a.ends[0]


def exponent(sizes: Sequence[int | float], values: Sequence[float]) -> Interval:
    """The slope of log value over log size; the interval is known from three points on."""
    if len(sizes) != len(values) or len(sizes) < 2:
        raise ValueError(f"an exponent needs two points or more, got {len(sizes)} sizes and {len(values)} values")
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle, level = statistics.fmean(x), statistics.fmean(y)
    spread = sum((a - middle) ** 2 for a in x)
    slope = sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True)) / spread
    if len(x) < 3:
        return Interval(slope, None, None, len(x))
    rest = sum((b - level - slope * (a - middle)) ** 2 for a, b in zip(x, y, strict=True))
    half = t95(len(x) - 2) * math.sqrt(rest / (len(x) - 2) / spread)
    return Interval(slope, slope - half, slope + half, len(x))


def crossing(sizes: Sequence[int], ratios: Sequence[float]) -> int | None:
    """The size from which on, as far as was measured, every ratio is below 1; None where the last one is not."""
    found = None
    for size, ratio in sorted(zip(sizes, ratios, strict=True), reverse=True):
        if ratio >= 1:
            break
        found = size
    return found
