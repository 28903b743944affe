"""The keys and values of earlier tokens, as a value that grows: what any attention but the linear one must remember.

    k ← [k; k_new]        v ← [v; v_new]

Buffers have room for `capacity` tokens of each row and double when they are full. Values along one sequence share them:
each sees its own `lengths` only, and the newest appends in place, behind what all others see. An older value is copied
before it grows, so that forks never see each other's tokens. Where gradients are needed nothing is written in place.

Axes:  B batch   T new tokens   N capacity   K key/value heads   D key width   M value width
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from linattn._typing import Bool, Float, Int, Tensor
from linattn.ops.checks import DTYPES
from linattn.ops.form import live_tokens
from linattn.state import Value, value

CacheT = TypeVar("CacheT", bound="TokenCache")
LEAST = 64  # tokens that a buffer has room for when it is first needed
Buffers = tuple[Tensor, Tensor, "Tail | None"]


class Tail:
    """The end of a pair of buffers: counts what was appended, so that a value can tell whether it is the newest."""

    turn = 0


@dataclass(frozen=True)
class Extent:
    """What the host knows of a cache, so that no call waits for the device. Not part of the value: see `extent`."""

    longest: int  # no row holds more tokens
    equal: bool  # every row holds exactly that many
    tail: Tail | None = None  # None: these buffers are not ours to write to
    turn: int = 0


@value
class TokenCache(Value):
    """What KVCache and LSHState share: k (B, N, K, D), v (B, N, K, M) and how many tokens of each row are there.

    A static cache never grows: fixed shapes, positions that only the device knows. Copying one by hand with `copy` or
    pickle, or passing it through a pytree, is safe: the copy moves to buffers of its own before it grows.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    _: KW_ONLY
    static: bool = False

    @classmethod
    def blank(
        cls: type[CacheT],
        shape: tuple[int, int, int, int],
        capacity: int = LEAST,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        **rest: Any,
    ) -> CacheT:
        """A cache without tokens for (batch, key/value heads, key width, value width)."""
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be a number of tokens, at least 1, got {capacity!r}")
        if dtype not in DTYPES:
            raise ValueError(f"a cache's dtype is that of keys and values, one of {DTYPES}, got {dtype}")
        batch, heads, width, values = shape
        k, v = (torch.zeros(batch, capacity, heads, size, dtype=dtype, device=device) for size in (width, values))
        made = cls(k, v, torch.zeros(batch, dtype=torch.int64, device=device), **rest)
        made._learn(0, True, Tail())
        return made

    @property
    def capacity(self) -> int:
        """The tokens that each row has room for."""
        return self.k.shape[1]

    @property
    def extent(self) -> Extent:
        known = self.__dict__.get("_extent")
        if known is None:
            known = self._learn(*_measured(self.lengths, self.capacity))
        return known

    @property
    def newest(self) -> bool:
        """Whether nobody has appended to these buffers since this value was made."""
        return self.extent.tail is not None and self.extent.tail.turn == self.extent.turn

    def filled(self) -> tuple[Float[Tensor, "B N K D"], Float[Tensor, "B N K M"]]:
        """Keys and values up to the longest row: views, unless a newer value may have written into the shorter rows."""
        longest = self.extent.longest
        k, v = self.k[:, :longest], self.v[:, :longest]
        if self.extent.equal or self.newest:
            return k, v
        # What weighs nothing must be finite all the same: 0 · NaN = NaN.
        live = live_tokens(self.lengths, longest)
        assert live is not None
        return torch.where(live[..., None, None], k, 0), torch.where(live[..., None, None], v, 0)

    def append(
        self: CacheT,
        k: Float[Tensor, "B T K D"],
        v: Float[Tensor, "B T K M"],
        counts: Int[Tensor, " B"] | None = None,
        *,
        in_place: bool = True,
        donate: bool = False,
    ) -> CacheT:
        """This cache with T tokens more, of each row the first `counts`. Padding in k and v must be finite.

        in_place=False: as a function that autograd can follow. donate=True: this value is gone, and where it is static
        its tensors become those of the new value, `lengths` too: a CUDA graph can be replayed on them.
        """
        if k.shape[1] == 0:
            made = replace(self, lengths=self.lengths.clone())
            made.__dict__["_extent"] = self.extent
        else:
            lengths, longest, equal = self._grown(k.shape[1], counts)
            even = equal and self.extent.equal and longest == self.extent.longest + k.shape[1]
            k, v, tail = (self._written if in_place else self._followed)(k, v, lengths, longest, even)
            if donate and self.static and k is self.k:
                lengths = self.lengths.copy_(lengths)
            made = replace(self, k=k, v=v, lengths=lengths)
            made._learn(longest, equal, tail)
        if donate:
            self.consume()
        return made

    def select(self: CacheT, rows: int | slice | Sequence[int] | Tensor) -> CacheT:
        """The given batch rows, copied: an int (kept as a batch of one), a slice, a list, an index or a mask."""
        index: Any = [rows] if isinstance(rows, int) else rows
        if not isinstance(index, slice):
            index = torch.as_tensor(index, device=self.k.device)
        return self._copied(lambda x: x[index])

    def clone(self: CacheT) -> CacheT:
        return self._copied()

    fork = clone

    def detach(self: CacheT) -> CacheT:
        """A copy through which no gradient flows."""
        return self._copied(torch.detach)

    def to(self: CacheT, device: str | torch.device) -> CacheT:
        return self._copied(lambda x: x.to(device))

    @classmethod
    def cat(cls: type[CacheT], values: Sequence[CacheT]) -> CacheT:
        """Join along the batch: rows may have different lengths, and room for different ones."""
        if len({one.static for one in values}) > 1:
            raise ValueError(f"{cls.__name__}.cat joins static caches or growing ones, got both: their shapes differ")
        capacity = max((one.capacity for one in values), default=0)
        padded: list[Any] = [one._copied(capacity=capacity) for one in values]
        joined = super().cat(padded)
        extents = [one.extent for one in values]
        longest = max(extent.longest for extent in extents)
        joined._learn(longest, all(e.equal and e.longest == longest for e in extents), _ours(joined))
        return joined

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all: the tokens, without the room behind them unless static."""
        capacity = self.capacity if self.static else max(self.extent.longest, 1)
        super(TokenCache, self._copied(capacity=capacity)).save(path)

    def __getstate__(self) -> dict[str, Any]:
        # A pickled or deep-copied value may share memory with another process: it does not own its buffers.
        return {name: item for name, item in self.__dict__.items() if name != "_extent"}

    def _learn(self, longest: int, equal: bool, tail: Tail | None = None) -> Extent:
        turn = 0 if tail is None else tail.turn
        extent = Extent(self.capacity, False, tail, turn) if self.static else Extent(longest, equal, tail, turn)
        self.__dict__["_extent"] = extent
        return extent

    def _grown(self, time: int, counts: Tensor | None) -> tuple[Tensor, int, bool]:
        """The lengths after T more tokens, and what the host knows of them."""
        extent = self.extent
        lengths = self.lengths + (time if counts is None else counts)
        if counts is None and not self.static:
            return lengths, extent.longest + time, extent.equal
        if not self.static:
            return lengths, *_measured(lengths, extent.longest + time)
        longest, _ = _measured(lengths, self.capacity)
        if longest > self.capacity:
            raise ValueError(
                f"this static cache is full: its capacity is {self.capacity} tokens, this call needs {longest}. "
                f"Make it with a larger capacity=, or with static=False to let it grow"
            )
        return lengths.clamp_max(self.capacity), self.capacity, False

    def _written(self, k: Tensor, v: Tensor, lengths: Tensor, longest: int, even: bool) -> Buffers:
        """The buffers with the new tokens written behind the old ones: these buffers, or a copy with room."""
        stays = longest <= self.capacity and self.newest and _writable(self.k)
        base = self if stays else self._copied(capacity=self._room(longest))
        if even:
            base.k[:, longest - k.shape[1] : longest] = k
            base.v[:, longest - k.shape[1] : longest] = v
        else:
            place = _places(base.lengths, lengths - base.lengths, k.shape[1], base.capacity)
            _put(base.k, k, *place)
            _put(base.v, v, *place)
        tail = base.extent.tail
        assert tail is not None
        tail.turn += 1
        return base.k, base.v, tail

    def _room(self, longest: int) -> int:
        capacity = max(self.capacity, 1)
        while capacity < longest:
            capacity *= 2
        return capacity

    def _copied(
        self: CacheT, function: Callable[[Tensor], Tensor] | None = None, capacity: int | None = None
    ) -> CacheT:
        """`function` of every tensor, on fresh buffers that hold zeros behind the last token of each row."""
        capacity = self.capacity if capacity is None else capacity

        def apply(x: Tensor) -> Tensor:
            return x if function is None else function(x)

        k, v = (_padded(apply(x), capacity) for x in self.filled())
        rest = {name: apply(x).clone() for name, x in self.tensors().items() if name not in ("k", "v")}
        made = replace(self, k=k, v=v, **rest)
        made._learn(self.extent.longest, self.extent.equal, _ours(made))
        return made

    def _followed(self, k: Tensor, v: Tensor, lengths: Tensor, longest: int, even: bool) -> Buffers:
        """The same without writing: new buffers that are exactly as long as needed, and never written to again."""
        if even:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.filled(), (k, v), strict=True))
        else:
            capacity = self.capacity if self.static else longest
            token = torch.arange(capacity, device=lengths.device) - self.lengths[:, None]
            taken = (token >= 0) & (token < (lengths - self.lengths)[:, None])
            old_k, old_v = (_padded(x, capacity) for x in self.filled())
            k, v = _taken(old_k, k, token, taken), _taken(old_v, v, token, taken)
        return k, v, None


def _measured(lengths: Tensor, bound: int) -> tuple[int, bool]:
    """The largest length and whether all are equal, where looking costs nothing; a bound where it would wait."""
    if lengths.device.type != "cpu" or torch.compiler.is_compiling() or type(lengths) is not torch.Tensor:
        return bound, False
    if lengths.numel() == 0:
        return bound, True
    low, high = (int(x) for x in torch.aminmax(lengths))
    return high, low == high


def _ours(cache: TokenCache) -> Tail | None:
    """The tail of fresh buffers; none where autograd may hold on to them."""
    return None if cache.k.requires_grad or cache.v.requires_grad else Tail()


def _writable(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or not x.is_inference() or torch.is_inference_mode_enabled()


def _padded(x: Tensor, capacity: int) -> Tensor:
    return F.pad(x, (0, 0, 0, 0, 0, capacity - x.shape[1]))  # a copy even where nothing is added


def _places(lengths: Tensor, added: Tensor, time: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """For T writes: which token goes to which slot of its row, and whether any does.

    Tokens that do not enter repeat the last one that does: equal writes to one slot, whatever their order, and no
    shape that depends on the lengths, so that no host needs to know them.
    """
    token = torch.minimum(torch.arange(time, device=lengths.device), (added - 1).clamp_min(0)[:, None])
    slot = (lengths[:, None] + token).clamp(0, capacity - 1)
    return token, slot, added > 0


def _put(buffer: Tensor, x: Tensor, token: Tensor, slot: Tensor, any_enter: Tensor) -> None:
    rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    buffer[rows, slot] = torch.where(any_enter[:, None, None, None], x[rows, token], buffer[rows, slot])


def _taken(old: Tensor, x: Tensor, token: Tensor, taken: Bool[Tensor, "B N"]) -> Tensor:
    rows = torch.arange(old.shape[0], device=old.device)[:, None]
    return torch.where(taken[..., None, None], x[rows, token.clamp(0, x.shape[1] - 1)], old)
