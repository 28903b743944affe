"""Linear attention in plain torch, on any device: quadratic within chunks, recurrent between them.

Time is cut into chunks of L tokens. Within a chunk every pair is weighed (an L × L table); what earlier chunks say
comes through the sums S, z that they left behind (equation 5). A block is several chunks worked on at once: large
enough that calls cost little, small enough that it stays in the cache. A short sequence is one chunk, which is the
quadratic order.

The backward pass (equations 6 to 9) keeps nothing but the inputs. It sums the keys once more to know where each block
started, then walks back from the last block, holding S and its gradient. No N × C × M tensor ever exists.

Axes:  B batch   T time of queries   U time of keys   H heads   K key/value heads   G = H / K   D key width
       C features   M values   N chunks in a block   L tokens in a chunk   R = B·K rows that never meet
"""

from __future__ import annotations

import torch

from linattn._typing import Bool, Float, Tensor
from linattn.ops import memory, short
from linattn.ops import sums as sums_of
from linattn.ops.form import Form
from linattn.ops.sums import Sums
from linattn.ops.tiles import Span, Tiles
from linattn.state import State


def forward(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B U K D"],
    v: Float[Tensor, "B U K M"],
    form: Form,
    state: State | None = None,
    live: Bool[Tensor, "B U"] | None = None,
    asked: Bool[Tensor, "B T"] | None = None,
    want_state: bool = True,
) -> tuple[Float[Tensor, "B T H M"], State | None]:
    """Outputs, and the state after the last key where it is wanted. `live` and `asked` mark real keys and queries."""
    if not want_state and short.fits(q, k, form, state, live):
        return short.forward(q, k, v, form), None
    tiles = Tiles(q, k, v, form, live, asked)
    out = memory.empty((*q.shape[:3], v.shape[-1]), v)
    if not form.causal:
        end = sums_of.total(tiles, state)
        for span in tiles.query_spans():
            tiles.store(out, span, _read(form, tiles.queries(span).phi, sums_of.of_state(end)))
        return out, end if want_state else None

    spans, now = tiles.key_spans(), state
    for span in spans:
        phi_q, phi_k, v_tile = tiles.queries(span).phi, tiles.keys(span).phi, tiles.values(span)
        # 1. Within each chunk: every pair, the future weighing nothing.
        weights = _mask_future(torch.bmm(phi_q, phi_k.transpose(1, 2)), span)
        num = torch.bmm(weights, v_tile)
        den = weights.sum(-1) if form.normalize else None
        # 2. What each chunk starts from, and what it leaves behind.
        last = span is spans[-1] and not want_state
        add = None if last and span.chunks == 1 else sums_of.added(phi_k, v_tile, form)
        before = _starts(None if now is None else sums_of.of_state(now), add, span)
        if before is not None:
            before.read(phi_q, num, den)
        # 3. Normalise.
        tiles.store(out, span, num if den is None else num.div_(form.divisor(den)[..., None]))
        if add is not None and not last:
            now = sums_of.plus_block(now, add, span, tiles)
    if not want_state:
        return out, None
    if now is state:  # no keys at all
        now = tiles.empty_state() if state is None else state.clone()
    return out, now


def backward(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B U K D"],
    v: Float[Tensor, "B U K M"],
    form: Form,
    state: State | None,
    live: Bool[Tensor, "B U"] | None,
    asked: Bool[Tensor, "B T"] | None,
    dout: Float[Tensor, "B T H M"] | None,
    dkv: Float[Tensor, "B K C M"] | None,
    dz: Float[Tensor, "B K C"] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the state's kv and z, from those of the output and of the final state."""
    if dout is not None and dkv is None and dz is None and short.fits(q, k, form, state, live):
        return *short.backward(q, k, v, form, dout), None, None
    tiles = Tiles(q, k, v, form, live, asked)
    grads = tuple(memory.empty(x.shape, x) for x in (q, k, v))
    if dout is None:
        dout = torch.zeros((), dtype=v.dtype, device=v.device).expand(*q.shape[:3], v.shape[-1])
    after = _end_gradients(tiles, dkv, dz)
    if form.causal:
        for span, before in reversed(sums_of.boundaries(tiles, state)):
            after = _causal_block(tiles, span, before, dout, after, grads)
    else:
        after = _full_backward(tiles, state, dout, after, grads)
    rows = (q.shape[0], k.shape[2])
    return *grads, after.kv.unflatten(0, rows), None if after.z is None else after.z.unflatten(0, rows)  # type: ignore[return-value]


def _causal_block(
    tiles: Tiles, span: Span, state: State | None, dout: Tensor, after: Sums, grads: tuple[Tensor, ...]
) -> Sums:
    """Equations 6 to 9 on one block, given the state it started from and the gradient of the sums it left; returns the
    gradient of those it started from."""
    form = tiles.form
    queries, keys, v_tile = tiles.queries(span), tiles.keys(span), tiles.values(span)
    phi_q, phi_k, do = queries.phi, keys.phi, tiles.output_gradients(dout, span)
    center = None if state is None else sums_of.weighted_mean(state, form)
    first = None if state is None else sums_of.counted_from(state, center)
    if center is not None:
        v_tile = v_tile - tiles.per_chunk(center, span)[:, None]
        after = sums_of.recount(after, center, 1)

    weights = _mask_future(torch.bmm(phi_q, phi_k.transpose(1, 2)), span)
    before = _starts(first, sums_of.added(phi_k, v_tile, form) if span.chunks > 1 else None, span)
    if form.normalize:
        den = weights.sum(-1)
        if before is not None and before.z is not None:
            den += sums_of.dot(phi_q, before.z)
        do, inverse = _divide(do, den, form)

    # 1. The queries' side (equations 6 and 7): dw = do·v, and through the normaliser −(do·num) / den.
    dweights = torch.bmm(do, v_tile.transpose(1, 2))
    dphi_q = None if before is None else torch.bmm(do, before.kv.transpose(1, 2))
    dden = None
    if form.normalize:
        through = (weights * dweights).sum(-1)
        if dphi_q is not None:
            through += (phi_q * dphi_q).sum(-1)
        dden = through.mul_(inverse).neg_()
        dweights += dden[..., None]
        if dphi_q is not None and before is not None and before.z is not None:
            dphi_q += dden[..., None] * before.z[:, None]
    _mask_future(dweights, span)
    dphi_q = torch.bmm(dweights, phi_k) if dphi_q is None else dphi_q.baddbmm_(dweights, phi_k)

    # 2. The keys' and values' side (equation 8), with what later chunks and blocks have asked of them.
    ends, after = sums_of.ends(after, sums_of.added(phi_q, do, form, dden), span)
    dphi_k = torch.bmm(dweights.transpose(1, 2), phi_q).baddbmm_(v_tile, ends.kv.transpose(1, 2))
    if ends.z is not None:
        dphi_k += ends.z[:, None]
    dv = torch.bmm(weights.transpose(1, 2), do).baddbmm_(phi_k, ends.kv)
    tiles.store(grads[0], span, tiles.through_map(dphi_q, queries, tiles.asked, span))
    tiles.store(grads[1], span, tiles.through_map(dphi_k, keys, tiles.live, span))
    tiles.store(grads[2], span, dv)
    return sums_of.recount(after, center, -1)


def _full_backward(tiles: Tiles, state: State | None, dout: Tensor, after: Sums, grads: tuple[Tensor, ...]) -> Sums:
    """All keys for every query: gradients of the sums from all queries, then those of keys and values from the sums."""
    form = tiles.form
    center = sums_of.plain_mean(tiles)
    sums = sums_of.of_state(sums_of.total(tiles, state, center))
    after = sums_of.recount(after, center, 1)
    for span in tiles.query_spans():
        queries, do, dden = tiles.queries(span), tiles.output_gradients(dout, span), None
        if sums.z is None:
            dphi_q = torch.bmm(do, sums.kv.transpose(1, 2))
        else:
            do, inverse = _divide(do, sums_of.dot(queries.phi, sums.z), form)
            dphi_q = torch.bmm(do, sums.kv.transpose(1, 2))
            dden = (queries.phi * dphi_q).sum(-1).mul_(inverse).neg_()
            dphi_q += dden[..., None] * sums.z[:, None]
        after = after.plus(sums_of.added(queries.phi, do, form, dden))
        tiles.store(grads[0], span, tiles.through_map(dphi_q, queries, tiles.asked, span))
    for span in tiles.key_spans():
        keys, v_tile = tiles.keys(span), tiles.values(span)
        dphi_k = torch.bmm(v_tile if center is None else v_tile - center[:, None], after.kv.transpose(1, 2))
        if after.z is not None:
            dphi_k += after.z[:, None]
        tiles.store(grads[1], span, tiles.through_map(dphi_k, keys, tiles.live, span))
        tiles.store(grads[2], span, torch.bmm(keys.phi, after.kv))
    return sums_of.recount(after, center, -1)


def _end_gradients(tiles: Tiles, dkv: Tensor | None, dz: Tensor | None) -> Sums:
    shape = (tiles.rows, tiles.num_features, tiles.v.shape[-1])

    def of(given: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        if given is None:
            return torch.zeros(shape, dtype=tiles.dtype, device=tiles.q.device)
        return given.to(tiles.dtype).reshape(shape)

    return Sums(of(dkv, shape), of(dz, shape[:2]) if tiles.form.normalize else None)


def _starts(first: Sums | None, add: Sums | None, span: Span) -> Sums | None:
    """What each chunk starts from; None where nothing came before, so that a lone chunk is spared the products."""
    if span.chunks == 1:
        return first
    assert add is not None
    return sums_of.starts(first, add, span)


def _read(form: Form, phi_q: Tensor, sums: Sums) -> Tensor:
    out = torch.bmm(phi_q, sums.kv)
    if sums.z is None:
        return out
    return out.div_(form.divisor(sums_of.dot(phi_q, sums.z))[..., None])


def _divide(do: Tensor, den: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """dout / den, and the factor that the gradient of den takes: 1 / den, or 0 where `divisor` does not follow den."""
    divisor = form.divisor(den)
    do = do.div_(divisor[..., None])
    inverse = divisor.reciprocal()
    return do, inverse if form.eps is None else inverse.masked_fill(den.abs() < form.eps, 0)


def _mask_future(weights: Float[Tensor, "rows GL L"], span: Span) -> Float[Tensor, "rows GL L"]:
    """Zero what a query must not see, in place; each of the G groups is an L × L table of its own."""
    (weights if weights.shape[1] == span.length else weights.unflatten(1, (-1, span.length))).tril_()
    return weights
