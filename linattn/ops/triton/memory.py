"""The sums of a stack's layers, held in place while they are stepped, with the tokens that are not yet in them.

    memory = Memory(states, …)        each token: memory.begin(live); out = memory.step(layer, q, k, v), …; memory.end()

The same contract as `linattn.ops.Step`, for many layers at once and without the host: which step folds is decided by a
count on the device (see decode.py), so begin … end can be captured in one CUDA graph and replayed for every token.

Axes:  N layers   B rows   H heads   K key/value heads   D features   M values   P recent tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from linattn.features import FeatureMap
from linattn.ops.triton.decode import count, decode, fold
from linattn.ops.triton.launch import block, launch, multiprocessors, stand_in
from linattn.state import State

FOLD = 16  # bfloat16 heads of 32: 6.8 KB a head and step, within 1% of the best; docs/decisions.md has the arithmetic
WIDEST_TILE = 64  # numbers in each direction
COUNTED = 1024  # rows that a program of `count` counts
WAVES = 32  # programs of `fold` for each multiprocessor


class Memory:
    """Takes the states over: their next use raises. `states()` gives them back, at the same addresses each time."""

    def __init__(
        self,
        states: Sequence[State],
        num_heads: int,
        dtype: torch.dtype,
        *,
        feature_map: str | FeatureMap = "elu",
        scale: float = 1.0,
        eps: float | None = None,
        narrow: bool = False,
    ):
        """The map is one that kernels know, or "identity" for features; dtype is that of keys and values.

        narrow: S is read from a bfloat16 copy, about 0.1% off, and half the traffic. The sums themselves stay exact.
        """
        batch, heads, features, values = _check(states)
        self.shape, self.num_heads, self.layers = (batch, heads, features, values), num_heads, len(states)
        self._map = feature_map if isinstance(feature_map, str) else feature_map.name
        self.root, self._eps, self.fold_after = math.sqrt(scale), eps, FOLD
        self.normalize = states[0].z is not None
        device = states[0].kv.device
        like = {"dtype": torch.float32, "device": device}
        self._kv, self._kv_low = (torch.empty(self.layers, *self.shape, **like) for _ in range(2))
        sizes = (self.layers, batch, heads, features) if self.normalize else (0,)
        self._z, self._z_low = (torch.empty(sizes, **like) for _ in range(2))
        self._fill(states)
        self._copy = self._kv.bfloat16() if narrow else None
        like["dtype"] = dtype
        self._keys = torch.zeros(self.layers, batch, heads, self.fold_after, features, **like)
        self._values = torch.zeros(self.layers, batch, heads, self.fold_after, values, **like)
        self.counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.live: torch.Tensor | None = None
        for state in states:
            state.consume()

    def begin(self, live: torch.Tensor | None = None) -> None:
        """A step begins. live: (B,) int64, 0 for rows that have ended, which nothing moves."""
        self.enter(live)
        rows = self.shape[0]
        mask = self.counts if live is None else live
        constants = (self.fold_after, live is not None, COUNTED)
        launch(count, -(-rows // COUNTED), (self.counts, mask, rows), constants, 4)

    def enter(self, live: torch.Tensor | None) -> None:
        """The same where a kernel of the caller's has counted the rows (`embed` in block.py)."""
        self.live = live

    def step(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One token of a layer: q (B, H · D), k (B, K · D) and v (B, K · M), rows of any stride -> (B, H · M)."""
        batch, heads, D, M = self.shape
        if out is None:
            out = torch.empty(batch, self.num_heads * M, dtype=v.dtype, device=v.device)
        blocks = -(-M // WIDEST_TILE)
        arguments = (q, k, v, out, *self.read(layer), self.counts, self.counts if self.live is None else self.live)
        arguments += (q.stride(0), k.stride(0), v.stride(0), self.num_heads, self.num_heads // heads)
        arguments += (self.root, 0.0 if self._eps is None else self._eps)
        BD, BM = tile(D), tile(M)
        constants = (D, M, BD, BM, blocks, self.fold_after, self._map, self.normalize, self._eps is not None)
        launch(decode, batch * self.num_heads * blocks, arguments, (*constants, self.live is not None), warps(BD, BM))
        return out

    def end(self) -> None:
        """A step ends: rows with `fold_after` recent tokens take them in."""
        self._fold(self.fold_after)

    def states(self) -> list[State]:
        """All tokens enter the sums; the sums as values, which lie in this memory. Steps may go on."""
        self.counts.masked_fill_(self.counts == self.fold_after, 0)  # the last step has folded these
        self._fold(1)
        self.counts.zero_()
        return self.views()

    def views(self) -> list[State]:
        """The sums where they lie, without the recent tokens."""
        if not self.normalize:
            return [State(kv, None, low, None) for kv, low in zip(self._kv, self._kv_low, strict=True)]
        parts = (self._kv, self._z, self._kv_low, self._z_low)
        return [State(*of) for of in zip(*parts, strict=True)]

    def read(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What a step reads of a layer: S, z, recent keys and values."""
        S = self._kv if self._copy is None else self._copy
        z = self._z[layer] if self.normalize else stand_in(S.device)
        return S[layer], z, self._keys[layer], self._values[layer]

    @property
    def nbytes(self) -> int:
        held = (self._kv, self._kv_low, self._z, self._z_low, self._copy, self._keys, self._values, self.counts)
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    def _fill(self, states: Sequence[State]) -> None:
        for layer, state in enumerate(states):
            whole = state.with_low_parts()
            for held, x in zip(
                (self._kv, self._z, self._kv_low, self._z_low),
                (whole.kv, whole.z, whole.kv_low, whole.z_low),
                strict=True,
            ):
                if x is not None:
                    held[layer].copy_(x)

    def _fold(self, least: int) -> None:
        batch, heads, D, M = self.shape
        programs = min(self.layers * batch * heads, WAVES * multiprocessors(self._kv.device))
        none = stand_in(self._kv.device)
        z = (self._z, self._z_low) if self.normalize else (none, none)
        copy = none if self._copy is None else self._copy
        arguments = (self._kv, self._kv_low, *z, copy, self._keys, self._values, self.counts)
        arguments += (batch, heads, least, self.root)
        BD, BM = tile(D), tile(M)
        constants = (self.layers, D, M, BD, BM, self.fold_after, self._map, self.normalize)
        constants += (self._copy is not None,)
        launch(fold, programs, arguments, constants, warps(BD, BM))


def tile(width: int) -> int:
    return min(block(width), WIDEST_TILE)


def warps(BD: int, BM: int) -> int:
    """32 numbers a thread: the whole tile is then one round of loads."""
    return max(1, BD * BM // 1024)


def _check(states: Sequence[State]) -> tuple[int, int, int, int]:
    if not states:
        raise ValueError("a memory needs the states of at least one layer, got none")
    shape, kind = tuple(states[0].kv.shape), states[0].kv.dtype
    if any(tuple(s.kv.shape) != shape or (s.z is None) != (states[0].z is None) for s in states):
        found = ", ".join(str(tuple(s.kv.shape)) for s in states)
        raise ValueError(f"all layers of a memory have states of one shape, got {found}")
    if kind != torch.float32:
        raise ValueError(f"the kernels' sums are float32, and this state is {kind}")
    if shape[2] % 8 or shape[3] % 8:
        raise ValueError(f"heads must have multiples of 8 features and values, got {shape[2]} and {shape[3]}")
    return shape  # type: ignore[return-value]
