"""Sums over units (segments of sequences), and their running totals: what segments tell each other.

    keys        kv_u = Σ φ(k)ᵀ v            z_u = Σ φ(k)                                        (equation 2)
    queries     dS_u = Σ ψᵀ dout            dz_u = Σ e ψ            ψ = φ(q) / den    e = −dout·(out − c)   (equation 8)

`sums` makes them for each unit, all at once; `scan` turns them into running totals, forward in time for keys,
backward for queries, and leaves the total of each sequence. c is where values are counted from (equation 9).

Axes:  [T, D] a tile of keys or queries   [T, M] of values or output gradients   [U, D, M] the sums of U units
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import kernel
from linattn.ops.triton.maps import mapped
from linattn.ops.triton.tiles import (
    COLUMNS,
    aligned,
    bounds,
    column,
    digits,
    divisor,
    first_unit,
    load_tile,
    place,
    store_sum,
    store_sums,
)


@kernel
def sums(
    x,
    y,
    out,
    den_in,
    center,
    part_kv,
    part_z,
    lengths,
    x_row,
    x_time,
    x_head,
    y_row,
    y_time,
    y_head,
    T,
    rows,
    heads,
    group,
    SEG,
    root,
    eps,
    D: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BMF: tl.constexpr,
    BT: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALIGNED: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x, y: keys and values, or with GRADIENT queries and the gradient of the output. `heads` are x's."""
    pid = tl.program_id(0)
    block, head, item = pid % BLOCKS, pid // BLOCKS % heads, pid // BLOCKS // heads
    row, unit, begin, stop = place(item, T, lengths, rows, SEG, LAYOUT, True)
    at_row, start, _, real = bounds(row, T, lengths, LAYOUT)

    feature, value = tl.arange(0, BD), block * BM + tl.arange(0, BM)
    step = tl.arange(0, BT)
    at = at_row.to(tl.int64)
    x_time, y_time = aligned(x_time, ALIGNED), aligned(y_time, ALIGNED)
    x += at * aligned(x_row, ALIGNED) + start * x_time + head * aligned(x_head, ALIGNED)
    y += at * aligned(y_row, ALIGNED) + start * y_time + head * aligned(y_head, ALIGNED)
    if GRADIENT and NORMALIZE:
        every = tl.arange(0, BMF)
        out += ((at * T + start) * heads + head) * M
        out_time = heads.to(tl.int64) * M
        den_in += (at * heads + head) * T + start
        c = tl.zeros([BMF], tl.float32)
        if CENTER:
            state = row.to(tl.int64) * (heads // group) + head // group
            c = tl.load(center + state * M + every, mask=every < M, other=0.0).to(tl.float32)

    kv = tl.zeros([BD, BM], tl.float32)
    z = tl.zeros([BD, COLUMNS], tl.float32)
    for chunk in tl.range(begin, stop, BT, num_stages=STAGES):
        token = chunk + step
        live = token < real
        phi_x = mapped(load_tile(x, x_time, token, real, feature, D, BD), root, feature, MAP, D, BD)
        y_tile = load_tile(y, y_time, token, real, value, M, BM)
        added = column(live, NARROW)
        if GRADIENT and NORMALIZE:
            den = tl.load(den_in + token, mask=live, other=1.0)
            phi_x *= (1.0 / divisor(den, eps, EPS))[:, None]
            seen = load_tile(out, out_time, token, real, every, M, BMF).to(tl.float32) - c[None, :]
            if BM == BMF:
                whole = y_tile.to(tl.float32)
            else:
                whole = load_tile(y, y_time, token, real, every, M, BMF).to(tl.float32)
            e = -tl.sum(whole * seen, 1)
            if EPS:
                e = tl.where(tl.abs(den) < eps, 0.0, e)
            added = digits(e, NARROW)
        turned = tl.trans(phi_x.to(NARROW))
        if NORMALIZE:
            z = tl.dot(turned, added, z, input_precision=PRECISION)
        kv = tl.dot(turned, y_tile.to(NARROW), kv, input_precision=PRECISION)

    if begin < stop:
        here = (unit + begin // SEG).to(tl.int64) * heads + head
        store_sums(part_kv + here * D * M, feature, value, kv, D, M)
        if NORMALIZE and block == 0:
            store_sum(part_z + here * D, feature, z, D)


@kernel
def scan(
    part_kv,
    part_z,
    total_z,
    kv_in,
    z_in,
    kv_end,
    z_end,
    center,
    lengths,
    T,
    rows,
    heads,
    SEG,
    D: tl.constexpr,
    M: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    UNITS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    REVERSE: tl.constexpr,
    STATE_IN: tl.constexpr,
    TOTALS: tl.constexpr,
    SAVE_CENTER: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Running totals over the units of each sequence; the program has one head and BM columns of its sums.

    With TOTALS those of kv are written in place; those of z go elsewhere, since every program reads its parts.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(M, BM)
    block, head, row = pid % blocks, pid // blocks % heads, pid // blocks // heads
    _, _, size, _ = bounds(row, T, lengths, LAYOUT)
    unit, count = first_unit(row, T, lengths, SEG, LAYOUT), tl.cdiv(size, SEG)

    feature, value, number = tl.arange(0, BD), block * BM + tl.arange(0, BM), tl.arange(0, UNITS)
    column = feature[:, None] * M + value[None, :]
    inside = (feature < D)[:, None] & (value < M)[None, :]
    state = row.to(tl.int64) * heads + head
    kv = tl.zeros([BD, BM], tl.float32)
    z = tl.zeros([BD], tl.float32)
    if STATE_IN:
        kv = tl.load(kv_in + state * D * M + column, mask=inside, other=0.0)
        if NORMALIZE:
            z = tl.load(z_in + state * D + feature, mask=feature < D, other=0.0)
    for first in range(0, count, UNITS):
        n = first + number
        there = (unit + (count - 1 - n if REVERSE else n)).to(tl.int64) * heads + head
        pointers = part_kv + there[:, None, None] * D * M + column[None, :, :]
        known = (n < count)[:, None, None] & inside[None, :, :]
        parts = tl.load(pointers, mask=known, other=0.0)
        if TOTALS:
            tl.store(pointers, tl.cumsum(parts, 0) + kv[None, :, :], mask=known)
        kv += tl.sum(parts, 0)
        if NORMALIZE:
            column_z = there[:, None] * D + feature[None, :]
            known = (n < count)[:, None] & (feature < D)[None, :]
            parts = tl.load(part_z + column_z, mask=known, other=0.0)
            if TOTALS and block == 0:
                tl.store(total_z + column_z, tl.cumsum(parts, 0) + z[None, :], mask=known)
            z += tl.sum(parts, 0)
    tl.store(kv_end + state * D * M + column, kv, mask=inside)
    if NORMALIZE and block == 0:
        tl.store(z_end + state * D + feature, z, mask=feature < D)
    if SAVE_CENTER:
        weight = tl.sum(z, 0)
        mean = tl.sum(kv, 0) / tl.where(weight == 0, float("inf"), weight)
        tl.store(center + state * M + value, mean, mask=value < M)
