"""Softmax attention under the operator's call: the rival, with the cache that makes it generate.

    out_i = Σ_j exp(scale · q_i·k_j) v_j  /  Σ_j exp(scale · q_i·k_j)          causal: j ≤ i

What is remembered are all keys and values: a step costs as much as there are tokens, and the cache grows with each.

Axes:  B batch   T time of queries   U time of keys   S all keys   H heads   K key/value heads   D key width   M values
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F

from linattn._typing import Bool, Float, Int, Tensor
from linattn.ops import checks
from linattn.ops.attention import described, same_dtype_under_autocast
from linattn.ops.autograd import no_autocast
from linattn.ops.buffers import LEAST, TokenCache
from linattn.ops.checks import Lengths
from linattn.ops.form import live_tokens
from linattn.ops.rival_checks import check_cache, check_donation, has_gradient, is_plain, masked
from linattn.state import value

QUERIES = 256  # queries that share one mask: T × S masks never exist as a whole


@value
class KVCache(TokenCache):
    """The keys (B, capacity, K, D) and values (B, capacity, K, M) of `lengths` (B,) tokens of each row."""

    @staticmethod
    def empty(
        batch: int,
        num_heads: int,
        width: int,
        values: int,
        *,
        capacity: int = LEAST,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        static: bool = False,
    ) -> KVCache:
        """The cache before any token.

        A static one never grows: its shapes are fixed, no call waits for the device, and with donate=True its tensors
        stay where they are, so that a CUDA graph of a step can be replayed. It is full at `capacity`: a further token
        raises where lengths can be read for nothing (CPU, eager), and is dropped elsewhere.
        """
        return KVCache.blank((batch, num_heads, width, values), capacity, dtype, device, static=static)


@overload
def softmax_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, *, return_state: Literal[False] = ..., **options: Any
) -> Tensor: ...
@overload
def softmax_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, *, return_state: Literal[True], **options: Any
) -> tuple[Tensor, KVCache]: ...
def softmax_attention(  # pyright: ignore[reportInconsistentOverload]  (the options, listed once)
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B U K D"] | None,
    v: Float[Tensor, "B U K M"] | None,
    *,
    causal: bool = True,
    scale: float | None = None,
    state: KVCache | None = None,
    return_state: bool = False,
    lengths: Lengths = None,
    q_lengths: Lengths = None,
    donate: bool = False,
) -> Tensor | tuple[Tensor, KVCache]:
    """Attention by softmax(scale · q kᵀ) v, computed by torch's fused kernels.

    Args:
        q, k, v: (batch, time, heads, width), any strides, one floating dtype. Keys and values may have fewer heads (a
            divisor of q's), v another width, and with causal=False another time.
        causal: each query sees its own key and earlier ones; False: all keys (encoders, cross-attention).
        scale: multiplies the scores; None: 1/√D.
        state: the keys and values of earlier tokens, which all queries see. It stays valid: the new tokens are written
            behind those that it sees, or into a copy if another call has already done so.
        return_state: also return the cache after the last (real) key of each row.
        lengths: (B,) real keys of each row of a padded batch. With causal=True the queries share them, with
            causal=False `q_lengths` describes the queries. Padded outputs are 0; padding reaches nothing, NaN or not.
        donate: `state` is given away: its next use raises. For generation; no gradients.

    A prompt, and then one token after the other:

    >>> q = k = v = torch.randn(1, 16, 2, 8)
    >>> whole = softmax_attention(q, k, v)
    >>> prompt, cache = softmax_attention(q[:, :15], k[:, :15], v[:, :15], return_state=True)
    >>> step, cache = softmax_attention(q[:, 15:], k[:, 15:], v[:, 15:], state=cache, return_state=True)
    >>> torch.allclose(torch.cat([prompt, step], 1), whole, atol=1e-5)
    True

    With k = v = None and causal=False a cache is read and nothing is added to it.
    """
    if k is None or v is None:
        k, v = _no_keys(q, k, v, state, causal)
    q, k, v = same_dtype_under_autocast(q, k, v)
    checks.check_operands(q, k, v, causal)
    checks.check_scale(scale, None)
    batch = checks.read_batch(q, k, causal, lengths, q_lengths, None, None)
    if state is not None:
        check_cache(state, KVCache, k, v)
    if donate:
        check_donation(state, return_state, q, k, v)
    live = live_tokens(batch.lengths, k.shape[1])
    asked = live if causal else live_tokens(batch.q_lengths, q.shape[1])
    q, k, v = masked(q, asked), masked(k, live), masked(v, live)
    end, keys, seen = None, (k, v), 0 if causal else _all_of(batch.lengths)
    if state is not None or return_state:
        end, keys, seen = _remember(q, k, v, state, batch.lengths, seen, return_state, donate)
    with no_autocast(q.device.type):  # it would cast the cache at every step
        out = _attend(q, *keys, 1 / math.sqrt(q.shape[3]) if scale is None else float(scale), seen)
    out = masked(out, asked)
    if not return_state:
        return out
    assert end is not None
    return out, end


# What each query sees: all keys; or as many before its own as the number says, and its own; or the first so many keys,
# for each row (B, 1) or query (B, T).
Seen = int | Tensor | None


def _remember(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KVCache | None,
    counts: Int[Tensor, " B"] | None,
    seen: Seen,
    return_state: bool,
    donate: bool,
) -> tuple[KVCache, tuple[Tensor, Tensor], Seen]:
    """The cache with the new tokens, all the keys and values, and what of them each query sees."""
    start = _blank(k, v) if state is None else state
    before, first, time = start.extent, start.lengths, k.shape[1]
    if start.static:
        first = first.clone()  # a donated static cache counts in place
    followed = has_gradient(q, k, v, start.k, start.v)
    in_place = donate or (return_state and is_plain(q, k, v, start.k, start.v))
    end = start.append(k, v, counts, in_place=in_place, donate=donate)
    if before.longest == 0:
        return end, (k, v), seen
    keys, values = end.filled()
    if followed and time == 0:
        keys, values = keys.clone(), values.clone()  # autograd would hold on to buffers that others append to
    if seen is None or isinstance(seen, Tensor):
        return end, (keys, values), None if end.extent.equal else _all_of(end.lengths)
    if before.equal and end.extent.equal and end.extent.longest == before.longest + time:
        return end, (keys, values), before.longest
    return end, (keys, values), first[:, None] + torch.arange(1, time + 1, device=q.device)


def _blank(k: Tensor, v: Tensor) -> KVCache:
    return KVCache.empty(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype, device=k.device)


def _attend(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B S K D"],
    v: Float[Tensor, "B S K M"],
    scale: float,
    seen: Seen,
) -> Float[Tensor, "B T H M"]:
    """Attention of each query to the keys that it sees, without a mask where none is needed."""
    time, keys = q.shape[1], k.shape[1]
    if seen is None or (isinstance(seen, int) and time == 1):
        return _one_width(q, k, v, scale)
    if isinstance(seen, int) and seen == 0:
        return _one_width(q, k, v, scale, is_causal=True)
    blocks = []
    for i in range(0, max(time, 1), QUERIES):
        block = q[:, i : i + QUERIES]
        last = keys
        if isinstance(seen, int):
            last = seen + i + block.shape[1]
            count = torch.arange(seen + i + 1, last + 1, device=q.device)[None]
        else:
            count = seen if seen.shape[1] == 1 else seen[:, i : i + QUERIES]
        # A row without keys is shown one, all zeros: of nothing at all, some kernels make NaN.
        mask = torch.arange(last, device=q.device) < count.clamp_min(1)[..., None]
        blocks.append(_one_width(block, k[:, :last], v[:, :last], scale, mask[:, None]))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)


def _one_width(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B S K D"],
    v: Float[Tensor, "B S K M"],
    scale: float,
    mask: Bool[Tensor, "B_or_1 1 T_or_1 S"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "B T H M"]:
    """The fused CPU kernel wants values as wide as keys; without it torch builds T × S weights and copies k and v."""
    width, values = k.shape[3], v.shape[3]
    if width == values or q.device.type != "cpu":
        return _fused(q, k, v, scale, mask, is_causal)
    if values < width:
        return _fused(q, k, _widened(v, width), scale, mask, is_causal)[..., :values]
    starts = [min(i, values - width) for i in range(0, values, width)]  # the last slice overlaps the one before
    slices = [_fused(q, k, v[..., i : i + width], scale, mask, is_causal) for i in starts]
    return torch.cat([*slices[:-1], slices[-1][..., -(values - width * (len(starts) - 1)) :]], -1)


def _widened(v: Float[Tensor, "B S K M"], width: int) -> Float[Tensor, "B S K D"]:
    """Values with any columns added: they become columns of the output that nobody reads."""
    more = width - v.shape[3]
    if is_plain(v) and v.stride(3) == 1 and v.numel():
        last = v.storage_offset() + sum((n - 1) * step for n, step in zip(v.shape, v.stride(), strict=True))
        if (last + more) * v.element_size() < v.untyped_storage().nbytes():
            return v.as_strided((*v.shape[:3], width), v.stride())  # what lies behind each row: a cache is not copied
    return F.pad(v, (0, more))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> Float[Tensor, "B T H M"]:
    time, heads, shared = q.shape[1], q.shape[2], k.shape[2]
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if time == 1 and heads != shared:
        # The query heads of one key head as queries of one head: two to ten times the speed of enable_gqa on the CPU.
        out = F.scaled_dot_product_attention(q.unflatten(2, (shared, -1)).squeeze(1), k, v, mask, scale=scale)
        return out.flatten(1, 2).unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=heads != shared
    )
    return out.transpose(1, 2)


def _all_of(lengths: Tensor | None) -> Int[Tensor, "B 1"] | None:
    return None if lengths is None else lengths[:, None]


def _no_keys(
    q: Tensor, k: Tensor | None, v: Tensor | None, state: KVCache | None, causal: bool
) -> tuple[Tensor, Tensor]:
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        raise ValueError(f"q must be a tensor (batch, time, heads, width), got {described(q)}")
    if k is not None or v is not None:
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{given} was given without {missing}: pass both, or None for both to read a cache")
    if state is None:
        raise ValueError("k and v are None: that reads a cache without adding to it, so state= is needed")
    if causal:
        raise ValueError("k and v are None and causal=True: reading a cache adds no keys, pass causal=False")
    check_cache(state, KVCache)
    return q.new_empty(q.shape[0], 0, *state.k.shape[2:]), q.new_empty(q.shape[0], 0, *state.v.shape[2:])
