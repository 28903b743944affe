"""Prefix search for CTC (Hannun et al. 2014): probable label sequences, where greedy decoding takes a probable path.

A sequence is probable when its paths are so together. For each prefix y that is followed, two sums over its paths:

    b_t(y)  those that end in the blank          n_t(y)  those that end in y's last label
    b_t(y)  = p_t(blank) (b_{t-1}(y) + n_{t-1}(y))
    n_t(y)  = p_t(y_last) n_{t-1}(y)  +  p_t(c) (b_{t-1}(y') + [c ≠ last of y'] n_{t-1}(y'))        where y = y' c

and the `width` prefixes with the largest b + n are kept. All in logarithms.

Axes:  T frames   P labels and the blank
"""

from __future__ import annotations

import math
from typing import NamedTuple

from linattn._typing import Float, Tensor
from linattn.nn.heads.ctc import BLANK

NEVER = -math.inf


class Heard(NamedTuple):
    """A label sequence, and log p of the paths to it that were followed."""

    labels: list[int]
    log_prob: float


def beam_search(log_probs: Float[Tensor, "T P"], *, width: int = 8, least: float = -12.0) -> list[Heard]:
    """The `width` most probable label sequences, best first. Labels with log p < least at a frame are passed over.

    With an unbounded width and least=-inf the probabilities are exact.
    """
    if width < 1:
        raise ValueError(f"width is the number of prefixes that are followed, at least 1, got {width}")
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, NEVER)}
    for frame in log_probs.tolist():
        grown: dict[tuple[int, ...], tuple[float, float]] = {}
        choices = [(c, p) for c, p in enumerate(frame) if c != BLANK and p >= least]
        for prefix, (blank, label) in beams.items():
            both = _plus(blank, label)
            _add(grown, prefix, frame[BLANK] + both, frame[prefix[-1]] + label if prefix else NEVER)
            for c, p in choices:
                repeats = bool(prefix) and prefix[-1] == c
                _add(grown, (*prefix, c), NEVER, p + (blank if repeats else both))
        ranked = sorted(grown.items(), key=lambda item: -_plus(*item[1]))
        beams = dict(ranked[:width])
    return [Heard(list(prefix), _plus(*sums)) for prefix, sums in beams.items()]


def _add(
    beams: dict[tuple[int, ...], tuple[float, float]], prefix: tuple[int, ...], blank: float, label: float
) -> None:
    if blank == label == NEVER:
        return
    before = beams.get(prefix, (NEVER, NEVER))
    beams[prefix] = (_plus(before[0], blank), _plus(before[1], label))


def _plus(a: float, b: float) -> float:
    """log(exp a + exp b)"""
    if a < b:
        a, b = b, a
    return a if b == NEVER else a + math.log1p(math.exp(b - a))
