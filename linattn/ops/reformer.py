"""LSH attention (Kitaev, Kaiser, Levskaya 2020, arXiv 2001.04451) under the operator's call: the rival that sorts.

Queries are keys, k_j = q_j / |q_j|, and each attends to those that a random hash puts into its bucket (hashing.py). A
round sorts the tokens by (bucket, position) and cuts them into chunks. Token i sees the tokens j of its own bucket that
lie in its chunk or in the one before (the first has none: nothing wraps around), j < i if causal, and never itself.
With s_ij = q_i·k_j/√D and P_i^r what token i sees in round r, the rounds are joined by their normalisers:

    z_i^r = log Σ_{j∈P_i^r} exp s_ij              o_i^r = Σ_{j∈P_i^r} exp(s_ij - z_i^r) v_j
    z_i = log Σ_r exp z_i^r                       out_i = Σ_r exp(z_i^r - z_i) o_i^r

That is one softmax in which a key weighs as often as rounds have found it (the paper also has a form that divides by
this count). A token that finds nobody in any round attends to itself: out_i = v_i.

Unlike the other attentions here it is no function of the past alone: how many buckets there are and where chunks begin
depends on all tokens. A step is therefore *defined* as the last row of the whole sequence so far.

Axes:  B batch   T time   S all tokens   H heads   D width of queries and keys   M values   R rounds   C columns
       N chunks   L chunk length
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from linattn._typing import Float, Int, Tensor
from linattn.ops import checks
from linattn.ops.attention import same_dtype_under_autocast
from linattn.ops.autograd import no_autocast
from linattn.ops.buffers import LEAST, TokenCache
from linattn.ops.checks import Lengths
from linattn.ops.form import live_tokens, sum_dtype
from linattn.ops.hashing import NOWHERE, choose_rotations, hash_tokens
from linattn.ops.rival_checks import check_cache, check_donation, has_gradient, is_plain, is_transformed, masked
from linattn.state import value


@value
class LSHState(TokenCache):
    """The tokens so far, qk (B, capacity, H, D) and v (B, capacity, H, M), and the draw (B, R, 2, H, D, C)."""

    rotations: Tensor

    @property
    def qk(self) -> Tensor:
        return self.k

    @staticmethod
    def empty(
        batch: int,
        values: int,
        rotations: Float[Tensor, "R 2 H D C"],
        *,
        capacity: int = LEAST,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
    ) -> LSHState:
        """The state before any token; the draw says how many heads there are, and how wide."""
        draw = rotations.detach().to(device).expand(batch, *rotations.shape).clone()
        heads, width = draw.shape[3:5]
        return LSHState.blank((batch, heads, width, values), capacity, dtype, draw.device, rotations=draw)


@overload
def reformer_attention(qk: Tensor, v: Tensor, *, return_state: Literal[False] = ..., **options: Any) -> Tensor: ...
@overload
def reformer_attention(
    qk: Tensor, v: Tensor, *, return_state: Literal[True], **options: Any
) -> tuple[Tensor, LSHState]: ...
def reformer_attention(  # pyright: ignore[reportInconsistentOverload]  (the options, listed once)
    qk: Float[Tensor, "B T H D"],
    v: Float[Tensor, "B T H M"],
    *,
    rounds: int = 4,
    chunk_length: int = 32,
    causal: bool = True,
    rotations: Float[Tensor, "R 2 H D C"] | None = None,
    generator: torch.Generator | None = None,
    state: LSHState | None = None,
    return_state: bool = False,
    lengths: Lengths = None,
    donate: bool = False,
) -> Tensor | tuple[Tensor, LSHState]:
    """Attention within buckets of similar tokens, in N log N time.

    Args:
        qk, v: (batch, time, heads, width), any strides, one floating dtype; qk holds the queries, the keys too.
        rounds: how many hashes; what one of them separates, another may bring together.
        chunk_length: L. There are about 2·T/L buckets, so that two chunks hold four average ones. A sequence that fits
            one chunk is one bucket: softmax attention, but for the token itself.
        causal: each token sees earlier ones only.
        rotations: the draw (see `draw_rotations`). None draws anew, with `generator` if given; a state keeps its own.
        state: the tokens so far. Outputs are then the last rows of attention over all of them and the new ones.
        return_state: also return the tokens so far, and the draw.
        lengths: (B,) real tokens of each row of a padded batch; each is hashed as if it were alone.
        donate: `state` is given away: its next use raises. For generation; no gradients.

    A step equals the last row of the whole, with the same draw:

    >>> qk = v = torch.randn(1, 100, 2, 8)
    >>> draw = torch.randn(4, 2, 2, 8, 32)
    >>> _, state = reformer_attention(qk[:, :99], v[:, :99], rotations=draw, return_state=True)
    >>> step = reformer_attention(qk[:, 99:], v[:, 99:], state=state)
    >>> torch.allclose(step, reformer_attention(qk, v, rotations=draw)[:, 99:], atol=1e-5)
    True
    """
    qk, _, v = same_dtype_under_autocast(qk, qk, v)
    checks.check_operands(qk, qk, v, True)
    if qk.shape[2] != v.shape[2]:
        raise ValueError(f"qk and v must have the same heads; found qk {tuple(qk.shape)}, v {tuple(v.shape)}")
    _check_counts(rounds=rounds, chunk_length=chunk_length)
    batch = checks.read_batch(qk, qk, True, lengths, None, None, None)
    if state is not None:
        check_cache(state, LSHState, qk, v)
    if donate:
        check_donation(state, return_state, qk, v)
    draw = choose_rotations(qk, rounds, rotations, generator, None if state is None else state.rotations)
    live = live_tokens(batch.lengths, qk.shape[1])
    qk, v = masked(qk, live), masked(v, live)
    before = 0 if state is None else state.extent.longest
    end, first = None, None
    if state is not None or return_state:
        start = (
            LSHState.empty(qk.shape[0], v.shape[3], draw[0], dtype=qk.dtype, device=qk.device)
            if state is None
            else state
        )
        first = start.lengths
        in_place = donate or (return_state and is_plain(qk, v, start.k, start.v))
        end = start.append(qk, v, batch.lengths, in_place=in_place, donate=donate)
    with no_autocast(qk.device.type):
        if end is None or first is None or before == 0 or qk.shape[1] == 0:
            out = _whole(qk, v, draw, batch.lengths, chunk_length, causal)
        else:
            out = _last_rows(qk.shape[1], first, end, chunk_length, causal)
    out = masked(out, live)
    if not return_state:
        return out
    assert end is not None
    return out, end


def _last_rows(time: int, first: Tensor, state: LSHState, chunk_length: int, causal: bool) -> Float[Tensor, "B T H M"]:
    """The rows of the newest tokens: of each row of the batch those from `first` on."""
    k, v = state.filled()
    lengths = None if state.extent.equal else state.lengths
    if time == 1:
        return _last_row(k, v, state.rotations, state.lengths, lengths, chunk_length)
    out = _whole(k, v, state.rotations, lengths, chunk_length, causal)
    place = (first[:, None] + torch.arange(time, device=first.device)).clamp_max(k.shape[1] - 1)
    return torch.take_along_dim(out, place[..., None, None], 1)


def _whole(
    qk: Float[Tensor, "B S H D"],
    v: Float[Tensor, "B S H M"],
    draw: Float[Tensor, "B_or_1 R 2 H D C"],
    lengths: Int[Tensor, " B"] | None,
    chunk_length: int,
    causal: bool,
) -> Float[Tensor, "B S H M"]:
    """All rows: hash, sort, cut, attend, and join the rounds."""
    time = qk.shape[1]
    if time == 0:
        return v
    length = min(chunk_length, time)
    more = -time % length
    q, u = (F.pad(x.transpose(1, 2), (0, 0, 0, more)) for x in (qk, v))
    sums = None
    for r in range(draw.shape[1]):
        buckets = F.pad(hash_tokens(q[:, :, :time], draw[:, r], lengths, chunk_length), (0, more), value=NOWHERE)
        order = buckets.sort(dim=2, stable=True).indices
        arguments = (q, u, buckets, order, length, causal)
        # Recomputed in the backward pass: S × 2L weights of one round at a time, instead of all of them.
        if has_gradient(q, u) and not is_transformed():
            new = checkpoint(_round, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            new = _round(*arguments)
        sums = new if sums is None else _joined(sums, new)
    assert sums is not None
    num, den, _ = sums
    return _divided(num, den, u)[:, :, :time].transpose(1, 2).to(v.dtype)


# Σ_j exp(s_ij - top_i) v_j, Σ_j exp(s_ij - top_i), and top_i = max_j s_ij, for each token
Sums = tuple[Tensor, Tensor, Tensor]


def _round(
    q: Float[Tensor, "B H S D"],
    v: Float[Tensor, "B H S M"],
    buckets: Int[Tensor, "B H S"],
    order: Int[Tensor, "B H S"],
    length: int,
    causal: bool,
) -> Sums:
    """One round: softmax attention within chunks of sorted tokens, not yet divided."""

    # 1. Chunks of tokens that are neighbours in the order of (bucket, position), and for each the chunk before it.
    queries, values = (_at(x, order).unflatten(2, (-1, length)).to(sum_dtype(q.dtype)) for x in (q, v))
    keys, values = _with_previous(_keys(queries), 0), _with_previous(values, 0)
    bucket, place = (x.unflatten(2, (-1, length)) for x in (buckets.gather(2, order), order))

    # 2. Who sees whom: the same bucket, earlier or at least another token.
    key_bucket, key_place = _with_previous(bucket, -1)[..., None, :], _with_previous(place, -1)[..., None, :]
    in_order = key_place < place[..., None] if causal else key_place != place[..., None]
    visible = (key_bucket == bucket[..., None]) & in_order

    # 3. The weights, and their sums. `top` is finite also where nobody is seen: all weights are then 0, none NaN.
    scores = (queries @ keys.mT).masked_fill(~visible, -torch.inf)
    top = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    sums = (weights @ values, weights.sum(-1, keepdim=True), top)

    # 4. Back to the order of time.
    rank = order.argsort(2)
    num, den, top = (_at(x.flatten(2, 3), rank) for x in sums)
    return num, den, top


def _at(x: Float[Tensor, "B H S X"], place: Int[Tensor, "B H S"]) -> Float[Tensor, "B H S X"]:
    """The rows of x in another order. As rows of one table: several times the speed of gather."""
    batch, heads, time, _ = x.shape
    first = torch.arange(0, batch * heads * time, time, device=x.device).view(batch, heads, 1)
    return x.flatten(0, 2).index_select(0, (place + first).flatten()).view_as(x)


def _last_row(
    k: Float[Tensor, "B S H D"],
    v: Float[Tensor, "B S H M"],
    draw: Float[Tensor, "B R 2 H D C"],
    ends: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"] | None,
    chunk_length: int,
) -> Float[Tensor, "B 1 H M"]:
    """The row of the last token alone. Nothing is sorted: it is the last of its bucket.

    Scores are the same in each round, so a round only counts whom it finds: weights are n_j exp s_j.
    """
    x, u = (y.transpose(1, 2).to(sum_dtype(y.dtype)).contiguous() for y in (k, v))
    length = min(chunk_length, k.shape[1])
    place = (ends - 1).clamp_min(0)[:, None, None].expand(-1, x.shape[1], 1)
    found = torch.zeros(x.shape[:3], device=x.device, dtype=x.dtype)
    for r in range(draw.shape[1]):
        buckets = hash_tokens(x, draw[:, r], lengths, chunk_length)
        mine = buckets.gather(2, place)
        same = buckets == mine
        rank = (buckets < mine).sum(2, keepdim=True) + same.sum(2, keepdim=True) - 1
        reach = length + rank % length  # tokens before it in its chunk and the previous one
        ago = same.sum(2, keepdim=True) - same.cumsum(2)  # in its bucket: 0 for itself, 1 for the one before
        found += same & (ago <= reach)
    found = found.scatter(2, place, 0)
    query = torch.take_along_dim(x, place[..., None], 2)
    scores = (query @ _keys(x).mT).squeeze(2).masked_fill(found == 0, -torch.inf)
    weights = found * (scores - scores.detach().amax(2, keepdim=True).clamp_min(torch.finfo(x.dtype).min)).exp()
    weights = weights[:, :, None]
    out = _divided(weights @ u, weights.sum(-1, keepdim=True), torch.take_along_dim(u, place[..., None], 2))
    return out.transpose(1, 2).to(v.dtype)


def _joined(a: Sums, b: Sums) -> Sums:
    """The sums of two rounds together, relative to the larger of the two maxima."""
    top = torch.maximum(a[2], b[2])
    old, new = (a[2] - top).exp(), (b[2] - top).exp()
    return a[0] * old + b[0] * new, a[1] * old + b[1] * new, top


def _divided(num: Tensor, den: Tensor, own: Tensor) -> Tensor:
    """The mean of what was seen; a token that has seen nobody keeps its own value."""
    alone = den == 0
    return torch.where(alone, own.to(num.dtype), num / den.masked_fill(alone, 1))


def _keys(q: Float[Tensor, "*axes D"]) -> Float[Tensor, "*axes D"]:
    """q / |q| / √D; the small number is felt by a vector of zeros only."""
    return q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() / math.sqrt(q.shape[-1])


def _with_previous(x: Tensor, nothing: int) -> Tensor:
    """(B, H, N, L, …) -> (B, H, N, 2L, …): each chunk behind the one before it, the first behind `nothing`."""
    if x.shape[2] == 1:
        return x
    return torch.cat([torch.cat([torch.full_like(x[:, :, :1], nothing), x[:, :, :-1]], 2), x], 3)


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number, at least 1, got {count!r}")
