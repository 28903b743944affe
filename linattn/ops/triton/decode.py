"""One token of many sequences: φ, update and read-out in one launch a layer, sums in place.

    out = (φq·S + Σ_p (φq·φk_p) v_p) / (φq·z + Σ_p φq·φk_p)          p: the tokens since the last fold, and this one

(equation 11). The last keys and values lie beside the sums as they came, so most steps only read S. Once FOLD of them
are there, all layers' sums take them in together, exactly (equation 12): kv and kv_low, z and z_low are those of
`linattn.State`. Each row counts its own tokens on the device, so one CUDA graph serves every step, and a row that has
ended stands still while others go on.

NARROW: S is read from a bfloat16 copy, which each fold rounds anew from the exact sums. z stays float32.

Axes:  [P, D] recent keys   [P, M] recent values   S [D, M]   z [D]       a program of `decode` has one head, one block
       of M; those of `fold` go round all heads of all layers
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import device, kernel
from linattn.ops.triton.maps import phi
from linattn.ops.triton.tiles import divisor


@device
def features(x, root, inside, MAP: tl.constexpr):
    """φ(root · x) in float32, 0 outside."""
    return tl.where(inside, phi(x.to(tl.float32), root, MAP), 0.0)


@kernel
def decode(
    q,
    k,
    v,
    out,
    kv,
    z,
    keys,
    values,
    counts,
    live,
    q_row,
    k_row,
    v_row,
    heads,
    group,
    root,
    eps,
    D: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BLOCKS: tl.constexpr,
    FOLD: tl.constexpr,
    MAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """counts: the recent tokens of each row, this one included; live: 0 for rows that have ended."""
    pid = tl.program_id(0)
    block, head, row = pid % BLOCKS, pid // BLOCKS % heads, (pid // BLOCKS // heads).to(tl.int64)
    key_head = head // group
    at = row * (heads // group) + key_head
    value = block * BM + tl.arange(0, BM)
    own = tl.load(counts + row) - 1  # the place of this token
    enters = True
    if RAGGED:
        enters = tl.load(live + row) > 0
    x_v = tl.load(v + row * v_row + key_head * M + value, mask=value < M, other=0.0).to(tl.float32)

    # One query head of a group, and one block of values, write what the others share. Nobody reads it in this launch.
    first = head % group == 0
    tl.store(values + (at * FOLD + own) * M + value, x_v.to(values.dtype.element_ty), mask=(value < M) & first & enters)
    num, den, own_weight, weights = tl.zeros([BM], tl.float32), 0.0, 0.0, tl.zeros([FOLD], tl.float32)
    for begin in tl.static_range(0, D, BD):
        feature = begin + tl.arange(0, BD)
        inside = feature < D
        x_k = tl.load(k + row * k_row + key_head * D + feature, mask=inside, other=0.0)
        phi_q = features(tl.load(q + row * q_row + head * D + feature, mask=inside, other=0.0), root, inside, MAP)
        tl.store(keys + (at * FOLD + own) * D + feature, x_k, mask=inside & first & (block == 0) & enters)
        own_weight += tl.sum(features(x_k, root, inside, MAP) * phi_q, 0)
        num += read_sums(kv, phi_q, at, feature, value, D, M)
        weights += weigh(keys, phi_q, at, own, feature, root, D, FOLD, MAP)
        if NORMALIZE:
            den += tl.sum(phi_q * tl.load(z + at * D + feature, mask=inside, other=0.0), 0)
    num += read_recent(values, weights, at, own, value, M, FOLD) + own_weight * x_v
    den += tl.sum(weights, 0) + own_weight
    if NORMALIZE:
        num = num / divisor(den, eps, EPS)
    tl.store(out + (row * heads + head) * M + value, num.to(out.dtype.element_ty), mask=value < M)


@device
def read_sums(kv, phi_q, at, feature, value, D: tl.constexpr, M: tl.constexpr):
    """φq·S over a block of features."""
    S = tl.load(
        kv + (at * D + feature)[:, None] * M + value[None, :],
        mask=(feature < D)[:, None] & (value < M)[None, :],
        other=0.0,
        eviction_policy="evict_first",  # a whole step lies between two uses
    )
    return tl.sum(phi_q[:, None] * S.to(tl.float32), 0)


@device
def weigh(keys, phi_q, at, own, feature, root, D: tl.constexpr, FOLD: tl.constexpr, MAP: tl.constexpr):
    """φq·φk of the recent keys before this one, over a block of features."""
    place, inside = tl.arange(0, FOLD), (feature < D)[None, :]
    recent = (place < own)[:, None]
    x = tl.load(keys + (at * FOLD + place)[:, None] * D + feature[None, :], mask=recent & inside, other=0.0)
    return tl.sum(features(x, root, recent & inside, MAP) * phi_q[None, :], 1)


@device
def read_recent(values, weights, at, own, value, M: tl.constexpr, FOLD: tl.constexpr):
    """The recent values, weighed."""
    place = tl.arange(0, FOLD)
    mask = (place < own)[:, None] & (value < M)[None, :]
    x = tl.load(values + (at * FOLD + place)[:, None] * M + value[None, :], mask=mask, other=0.0)
    return tl.sum(weights[:, None] * x.to(tl.float32), 0)


@kernel
def fold(
    kv,
    kv_low,
    z,
    z_low,
    copy,
    keys,
    values,
    counts,
    rows,
    heads,
    least,
    root,
    LAYERS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    FOLD: tl.constexpr,
    MAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Recent keys and values enter the sums, in rows that have at least so many of them."""
    for item in range(tl.program_id(0), LAYERS * rows * heads, tl.num_programs(0)):
        count = tl.load(counts + item // heads % rows)
        if count >= least:
            at = tl.cast(item, tl.int64)
            for first in range(0, D, BD):
                feature = first + tl.arange(0, BD)
                inside = feature < D
                for left in range(0, M, BM):
                    value = left + tl.arange(0, BM)
                    mask = inside[:, None] & (value < M)[None, :]
                    add, add_z = tl.zeros([BD, BM], tl.float32), tl.zeros([BD], tl.float32)
                    for p in tl.static_range(FOLD):  # unrolled, so that all loads are under way at once
                        entered = p < count
                        x_k = tl.load(keys + (at * FOLD + p) * D + feature, mask=inside & entered, other=0.0)
                        x_v = tl.load(values + (at * FOLD + p) * M + value, mask=(value < M) & entered, other=0.0)
                        phi_k = features(x_k, root, inside & entered, MAP)
                        add += phi_k[:, None] * x_v.to(tl.float32)[None, :]
                        add_z += phi_k
                    where = (at * D + feature)[:, None] * M + value[None, :]
                    S = add_exactly(kv + where, kv_low + where, add, mask)
                    if NARROW:
                        tl.store(copy + where, S.to(copy.dtype.element_ty), mask=mask)
                    if NORMALIZE and left == 0:
                        add_exactly(z + at * D + feature, z_low + at * D + feature, add_z, inside)


@device
def add_exactly(high, low, x, mask):
    """(high, low) + x in memory (equation 12); the new high."""
    before = tl.load(high, mask=mask, other=0.0)
    x += tl.load(low, mask=mask, other=0.0)
    total = before + x
    tl.store(high, total, mask=mask)
    tl.store(low, x - (total - before), mask=mask)
    return total


@kernel
def count(counts, live, rows, FOLD: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr):
    """Before a step: each row that goes on has one recent token more."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counted(counts + row, live + row, row < rows, FOLD, RAGGED)


@device
def counted(counts, live, mask, FOLD: tl.constexpr, RAGGED: tl.constexpr):
    """Count one token more where rows are live. FOLD of them have been folded, and are not recent any more."""
    had = tl.load(counts, mask=mask, other=0)
    more = had * 0 + 1
    if RAGGED:
        more = tl.where(tl.load(live, mask=mask, other=0) > 0, 1, 0)
    tl.store(counts, tl.where(had == FOLD, 0, had) + more, mask=mask)
    return more
