"""The sums of a chunked pass: what each chunk leaves behind, what each starts from, and where to count values from.

    S' = S − zᵀ c      dz' = dz + dS cᵀ      with c the mean of the values so far               (equation 9)

Axes:  R rows that never meet   N chunks in a block   C features   M values   L tokens in a chunk
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from linattn._typing import Float, Tensor
from linattn.ops.form import Form
from linattn.ops.tiles import Span, Tiles
from linattn.state import State


class Sums(NamedTuple):
    """Σ φ xᵀ (rows, C, M), and Σ φ (rows, C) where there is a normaliser."""

    kv: Tensor
    z: Tensor | None

    def read(self, phi: Tensor, num: Tensor, den: Tensor | None) -> None:
        """Add to `num` and `den` what these sums say to features phi, in place."""
        num.baddbmm_(phi, self.kv)
        if den is not None and self.z is not None:
            den += dot(phi, self.z)

    def plus(self, other: Sums) -> Sums:
        return Sums(self.kv + other.kv, None if self.z is None or other.z is None else self.z + other.z)


def dot(phi: Tensor, z: Tensor) -> Tensor:
    """φ·z for each row. As a product of matrices, one of them a column, it takes up to six times as long."""
    return (phi * z[:, None]).sum(-1)


def of_state(state: State) -> Sums:
    return Sums(state.kv.flatten(0, 1), None if state.z is None else state.z.flatten(0, 1))


def added(phi: Tensor, x: Tensor, form: Form, weight: Tensor | None = None) -> Sums:
    """Each chunk's Σ φ xᵀ, and Σ φ (or Σ weight·φ) where there is a normaliser."""
    kv = torch.bmm(phi.transpose(1, 2), x)
    if not form.normalize:
        return Sums(kv, None)
    return Sums(kv, phi.sum(1) if weight is None else (phi * weight[..., None]).sum(1))


def starts(before: Sums | None, add: Sums, span: Span) -> Sums:
    """What each chunk of a block starts from, (R·N, ...), given what the block starts from and what its chunks add."""
    kv, _ = _exclusive_sum(None if before is None else before.kv, add.kv, span.chunks)
    if add.z is None:
        return Sums(kv, None)
    return Sums(kv, _exclusive_sum(None if before is None else before.z, add.z, span.chunks)[0])


def ends(after: Sums, add: Sums, span: Span) -> tuple[Sums, Sums]:
    """Backward in time: what follows each chunk of a block, and what the block's own chunks make of it."""
    if span.chunks == 1:
        return after, after.plus(add)
    kv, kv_before = _exclusive_sum(after.kv, add.kv, span.chunks, reverse=True)
    if add.z is None:
        return Sums(kv, None), Sums(kv_before, None)
    z, z_before = _exclusive_sum(after.z, add.z, span.chunks, reverse=True)
    return Sums(kv, z), Sums(kv_before, z_before)


def _exclusive_sum(first: Tensor | None, parts: Tensor, chunks: int, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """`first` plus the sum over the chunks before each one (after each one, if reversed), and the sum over all."""
    parts = parts.unflatten(0, (-1, chunks))
    sums = torch.empty_like(parts)
    running = torch.zeros_like(parts[:, 0]) if first is None else first
    for n in reversed(range(chunks)) if reverse else range(chunks):
        sums[:, n] = running
        running = running + parts[:, n]
    return sums.flatten(0, 1), running


def plus_block(state: State | None, add: Sums, span: Span, tiles: Tiles) -> State:
    """The state after a block: exact over any number of blocks (equation 12)."""
    state = tiles.empty_state() if state is None else state
    kv, z = (None if x is None else x.unflatten(0, (tiles.batch, tiles.heads, span.chunks)).sum(2) for x in add)
    assert kv is not None
    return state.plus(kv, z)


def boundaries(tiles: Tiles, state: State | None) -> list[tuple[Span, State | None]]:
    """Each block, and the state it starts from: one pass over keys and values, the last block's left out."""
    spans, made = tiles.key_spans(), []
    for span in spans:
        made.append((span, state))
        if span is not spans[-1]:
            state = plus_block(state, added(tiles.keys(span).phi, tiles.values(span), tiles.form), span, tiles)
    return made


def total(tiles: Tiles, state: State | None, center: Float[Tensor, "R M"] | None = None) -> State:
    """The state after all keys; with a center, that of values counted from it."""
    state = tiles.empty_state() if state is None else state.clone()
    if center is not None:
        kv = counted_from(state, center).kv.view(state.kv.shape)
        state = State(kv, state.z).with_low_parts()
    for span in tiles.key_spans():
        v_tile = tiles.values(span) if center is None else tiles.values(span) - center[:, None]
        state = plus_block(state, added(tiles.keys(span).phi, v_tile, tiles.form), span, tiles)
    return state


def weighted_mean(state: State, form: Form) -> Float[Tensor, "R M"] | None:
    """Where a causal block counts its values from: the weighted mean of the values before it (equation 9).

    dq is a difference of two terms as large as the values' mean times the number of keys (equation 7); counted from
    their mean, the values leave nothing to cancel. Exact in mathematics wherever the divisor is the sum of the weights.
    """
    sums = of_state(state)
    if sums.z is None or form.eps is not None:
        return None
    weight = sums.z.sum(1, keepdim=True)
    return sums.kv.sum(1) / weight.masked_fill(weight == 0, torch.inf)


def plain_mean(tiles: Tiles) -> Float[Tensor, "R M"] | None:
    """The same without causality, where all values are at hand."""
    if not tiles.form.normalize or tiles.form.eps is not None:
        return None
    parts = [tiles.values(span).sum(1) for span in tiles.key_spans()]
    return torch.stack(parts).sum(0) / tiles.k.shape[1] if parts else None


def counted_from(state: State, center: Float[Tensor, "R M"] | None) -> Sums:
    """S' = S − zᵀc, in fp64 with the sums' low parts: in fp32 S itself is already too coarse."""
    sums = of_state(state)
    if sums.z is None or center is None:
        return sums
    wide = sums.kv.dtype if sums.kv.device.type == "mps" else torch.float64  # Apple GPUs have no fp64
    kv, z = sums.kv.to(wide), sums.z.to(wide)
    if state.kv_low is not None and state.z_low is not None:
        kv, z = kv + state.kv_low.flatten(0, 1), z + state.z_low.flatten(0, 1)
    kv = torch.addcmul(kv, z[..., None], center.to(wide)[:, None], value=-1)
    return Sums(kv.to(sums.kv.dtype), sums.z)


def recount(sums: Sums, center: Float[Tensor, "R M"] | None, sign: int) -> Sums:
    """The gradients of the sums, when values begin (sign = 1) or cease (-1) to be counted from `center`: dz ± dS cᵀ."""
    if center is None or sums.z is None:
        return sums
    return Sums(sums.kv, sums.z + sign * torch.bmm(sums.kv, center[..., None])[..., 0])
