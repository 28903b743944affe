"""Blocks of the operands: contiguous tiles, in the dtype of the sums, with the feature map applied and padding cleared.

Packing a tile first is worth a factor of two: in (B, T, H, W) the rows of one head lie H·W numbers apart.

Axes:  B batch   T time   H heads   K key/value heads   G = H / K   W width   N chunks in a block   L tokens in a chunk
       R = B·K rows that never meet
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from linattn._typing import Tensor
from linattn.ops.form import Form, sum_dtype
from linattn.state import State

# Up to here one chunk holds the whole sequence (the quadratic order); measured by benchmarks/crossover.py.
SINGLE_CHUNK = 192
# Elements of one tile of a block: half a MB of fp32 stays in the second-level cache; a GPU wants more at once.
BLOCK_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}


@dataclass(frozen=True)
class Span:
    """A block's place in time: `chunks` chunks of `length` tokens from `start`."""

    start: int
    chunks: int
    length: int

    @property
    def time(self) -> slice:
        return slice(self.start, self.start + self.chunks * self.length)


def spans(time: int, rows: int, features: int, values: int, device: str) -> list[Span]:
    """Cut `time` into blocks: as many full ones as fit, then the full chunks left over, then the tokens left over."""
    wide = max(features, values, 1)
    length = time if time <= SINGLE_CHUNK else (64 if wide <= 64 else 128)
    if time == 0:
        return []
    chunks = max(1, BLOCK_ELEMENTS.get(device, 2**22) // (max(rows, 1) * length * wide))
    made, start = [], 0
    while time - start >= length:
        now = min(chunks, (time - start) // length)
        made.append(Span(start, now, length))
        start += now * length
    if start < time:
        made.append(Span(start, 1, time - start))
    return made


@dataclass
class Mapped:
    """One tile of queries or keys: the scaled input of the map, and its output."""

    x: Tensor
    phi: Tensor


class Tiles:
    """Blocks of the operands as batches of contiguous tiles: (B, T, H, W) → (B·K·N, G·L, W), in the sums' dtype."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, form: Form, live: Tensor | None, asked: Tensor | None):
        self.q, self.k, self.v, self.form, self.live, self.asked = q, k, v, form, live, asked
        self.batch, self.heads = k.shape[0], k.shape[2]
        self.groups = q.shape[2] // max(self.heads, 1)
        self.rows = self.batch * self.heads
        self.num_features = form.feature_map.num_features(q.shape[3])
        self.dtype = sum_dtype(q.dtype)

    def key_spans(self) -> list[Span]:
        return self._spans(self.k.shape[1], self.rows)

    def query_spans(self) -> list[Span]:
        return self._spans(self.q.shape[1], self.rows * self.groups)

    def _spans(self, time: int, rows: int) -> list[Span]:
        if rows == 0:
            return []
        made = spans(time, rows, self.num_features, self.v.shape[-1], self.q.device.type)
        # With all keys for every query nothing happens within a chunk: a block is one long chunk.
        return made if self.form.causal else [Span(span.start, 1, span.chunks * span.length) for span in made]

    def queries(self, span: Span) -> Mapped:
        return self._mapped(self.q, span, self.groups, self.asked)

    def keys(self, span: Span) -> Mapped:
        return self._mapped(self.k, span, 1, self.live)

    def values(self, span: Span) -> Tensor:
        return self._clear(self.load(self.v, span, 1), self.live, span)

    def output_gradients(self, dout: Tensor, span: Span) -> Tensor:
        return self._clear(self.load(dout, span, self.groups), self.asked, span)

    def load(self, x: Tensor, span: Span, groups: int) -> Tensor:
        view = self._view(x, span, groups)
        tile = view.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return tile.view(self.rows * span.chunks, groups * span.length, x.shape[-1])

    def store(self, x: Tensor, span: Span, tile: Tensor) -> None:
        view = self._view(x, span, x.shape[2] // self.heads)
        view.copy_(tile.view(view.shape))

    def through_map(self, dphi: Tensor, mapped: Mapped, real: Tensor | None, span: Span) -> Tensor:
        """dφ → dx, through the feature map and the scale; 0 for padding."""
        if self.form.feature_map.name != "identity":
            dphi = dphi.mul_(self.form.derivative(mapped.x, mapped.phi))
        if self.form.scale != 1.0:
            dphi = dphi.mul_(self.form.scale**0.5)
        return self._clear(dphi, real, span)

    def per_chunk(self, x: Tensor, span: Span) -> Tensor:
        """(R, ...) → (R·N, ...): the same for each chunk of a block."""
        return x if span.chunks == 1 else x.repeat_interleave(span.chunks, 0)

    def empty_state(self) -> State:
        features, values = self.num_features, self.v.shape[-1]
        options = {"normalize": self.form.normalize, "dtype": self.dtype, "device": self.q.device}
        return State.empty(self.batch, self.heads, features, values, **options)

    def _mapped(self, x: Tensor, span: Span, groups: int, real: Tensor | None) -> Mapped:
        # Cleared before the map (NaN times a derivative is NaN) and after it (φ(0) need not be 0).
        x = self.form.scaled(self._clear(self.load(x, span, groups), real, span))
        phi = self.form.feature_map(x)
        return Mapped(x, phi if phi is x else self._clear(phi, real, span))

    def _view(self, x: Tensor, span: Span, groups: int) -> Tensor:
        """(B, T, H, W) at the block's time, seen as (B, K, N, G, L, W)."""
        if span.chunks * span.length != x.shape[1]:
            x = x[:, span.time]
        x = x.view(self.batch, span.chunks, span.length, self.heads, groups, x.shape[3])
        return x.permute(0, 3, 1, 4, 2, 5)

    def _clear(self, tile: Tensor, real: Tensor | None, span: Span) -> Tensor:
        if real is None:
            return tile
        gone = ~real[:, span.time].unflatten(1, (span.chunks, span.length))
        shape = (self.batch, self.heads, span.chunks, -1, span.length, tile.shape[-1])
        return tile.view(shape).masked_fill_(gone[:, None, :, None, :, None], 0).view(tile.shape)
