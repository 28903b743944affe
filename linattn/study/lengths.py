"""How far a model reads: the bits of each byte of a long stretch, by its place, with the state carried all the way.

carried   the stretch from its first byte on, the state going on from window to window: context 0, 1, … longest
known     the same bytes, each with a context of half a window to a whole one, as in training: windows at every half, of
          which the second half counts

    carried - known          below 0: what lies further back than a window helps; above 0: carrying on does harm

Both are means over bins of places, for each stretch by itself: an interval over stretches of text is one over what is
being read.

Axes:  S stretches   T time
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from linattn._typing import Float, Shaped, Tensor
from linattn.models import SequenceModel


@torch.no_grad()
def far(model: SequenceModel, text: Shaped[Tensor, " N"], window: int, longest: int, streams: int) -> dict[str, Any]:
    """Bits by bins of places, and by stretch; bins are [0, w), [w, 2w), [2w, 4w), …"""
    values = stretches(text, longest, streams).to(model.device).long()
    carried = read_on(model, values, window)
    known = in_halves(model, values, window)
    edges = bins(window, values.shape[1] - 1)
    places = list(itertools.pairwise(edges))
    beyond = slice(window, None)
    difference = (carried[:, beyond] - known[:, beyond]).mean(1)
    return {
        "edges": edges,
        "carried": [_mean(carried[:, a:b]) for a, b in places],
        "known": [None if a == 0 else _mean(known[:, a:b]) for a, b in places],
        "difference": [round(x, 6) for x in difference.tolist()],
        "difference_by_bin": [
            None if a == 0 else [round(x, 6) for x in (carried[:, a:b] - known[:, a:b]).mean(1).tolist()]
            for a, b in places
        ],
    }


def stretches(text: Shaped[Tensor, " N"], longest: int, streams: int) -> Shaped[Tensor, "S T"]:
    """So many of `longest` predictions, evenly spread; fewer where the text is short."""
    streams = max(1, min(streams, (len(text) - 1) // longest))
    longest = min(longest, len(text) - 1)
    starts = torch.linspace(0, len(text) - 1 - longest, streams).long()
    return torch.stack([text[start : start + longest + 1] for start in starts.tolist()])


def read_on(model: SequenceModel, values: Shaped[Tensor, "S T"], window: int) -> Float[Tensor, "S N"]:
    """Bits of values 2 … T, the state carried from window to window."""
    state = model.empty_state(len(values), capacity=values.shape[1])
    bits = []
    for start in range(0, values.shape[1] - 1, window):
        nats, state = model.nats(values[:, start : start + window + 1], state)
        bits.append(nats.float() / math.log(2))
    return torch.cat(bits, 1)


def in_halves(model: SequenceModel, values: Shaped[Tensor, "S T"], window: int) -> Float[Tensor, "S N"]:
    """Bits of the same values, each after half a window or more of context (the first window: after what there is)."""
    half = window // 2
    last = values.shape[1] - 1
    bits = torch.full((len(values), last), float("nan"), device=values.device)
    for start in range(0, last, half):
        end = min(start + window, last)
        nats, _ = model.nats(values[:, start : end + 1])
        fresh = 0 if start == 0 else half
        if start + fresh < end:
            bits[:, start + fresh : end] = nats[:, fresh:].float() / math.log(2)
    return bits


def bins(window: int, longest: int) -> list[int]:
    edges = [0, window]
    while edges[-1] < longest:
        edges.append(min(2 * edges[-1], longest))
    return edges


def _mean(bits: Tensor) -> float:
    return round(float(bits.mean()), 6)
