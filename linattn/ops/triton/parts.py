"""The backward kernels for wide heads, and for sums over all keys: queries first, then keys and values.

    dq_kernel     dφq = (tril(do v'ᵀ + e 1ᵀ) φk + do S'ᵀ + e z) / den    forward in time, S running (or all of it, not
                  causal); keeps e = −ψ·(tril(do v'ᵀ) φk + do S'ᵀ)
    dkv_kernel    dφk = tril(do v'ᵀ + e 1ᵀ)ᵀ ψ + v' dSᵀ + dz    dv = tril(ψ φkᵀ)ᵀ do + φk dS
                  backward in time, dS running (or all of it)

ψ = φq / den, and e is dden times den (equations 6 to 8; v' and S' by equation 9). See sweep.py for why.

One state is held at a time, where the single sweep of sweep.py holds two. When even one is too much for the registers,
a program of dq has a block of features and one of dkv either a block of features (for dk) or one of values (for dv).

Axes:  [T, D] a tile of queries or keys   [T, M] of values   S, dS [D, M]   z, dz [D, 16 columns to be added]
       BF features, BV values a block
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import kernel
from linattn.ops.triton.maps import mapped, slope
from linattn.ops.triton.tiles import (
    COLUMNS,
    aligned,
    bounds,
    column,
    digits,
    divisor,
    load_sum,
    load_sums,
    load_tile,
    place,
    store_sum,
    store_tile,
)


@kernel
def dq_kernel(
    q,
    k,
    v,
    do,
    out,
    den_in,
    e_out,
    center,
    ends_kv,
    ends_z,
    kv_in,
    z_in,
    dq,
    lengths,
    q_row,
    q_time,
    q_head,
    k_row,
    k_time,
    k_head,
    v_row,
    v_time,
    v_head,
    do_row,
    do_time,
    do_head,
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
    BF: tl.constexpr,
    BT: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    LAYOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STATE_IN: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """kv_in, z_in: the sums before the first token; not causal, those of all keys."""
    pid = tl.program_id(0)
    block, head, item = pid % BLOCKS, pid // BLOCKS % heads, pid // BLOCKS // heads
    key_head, key_heads = head // group, heads // group
    row, unit, begin, stop = place(item, T, lengths, rows, SEG, LAYOUT, SPLIT)
    at_row, start, size, real = bounds(row, T, lengths, LAYOUT)

    value, step = tl.arange(0, BM), tl.arange(0, BT)
    mine = block * BF + tl.arange(0, BF)
    at = at_row.to(tl.int64)
    q_time, k_time = aligned(q_time, ALIGNED), aligned(k_time, ALIGNED)
    v_time, do_time = aligned(v_time, ALIGNED), aligned(do_time, ALIGNED)
    q += at * aligned(q_row, ALIGNED) + start * q_time + head * aligned(q_head, ALIGNED)
    k += at * aligned(k_row, ALIGNED) + start * k_time + key_head * aligned(k_head, ALIGNED)
    v += at * aligned(v_row, ALIGNED) + start * v_time + key_head * aligned(v_head, ALIGNED)
    do += at * aligned(do_row, ALIGNED) + start * do_time + head * aligned(do_head, ALIGNED)
    out += ((at * T + start) * heads + head) * M
    dq += ((at * T + start) * heads + head) * D
    d_time, m_time = heads.to(tl.int64) * D, heads.to(tl.int64) * M
    den_in += (at * heads + head) * T + start
    e_out += (at * heads + head) * T + start

    state = row.to(tl.int64) * key_heads + key_head
    c = tl.zeros([BM], tl.float32)
    if CENTER:
        c = tl.load(center + state * M + value, mask=value < M, other=0.0).to(tl.float32)
    S, z = tl.zeros([BF, BM], tl.float32), tl.zeros([BF, COLUMNS], tl.float32)
    inside = (mine < D)[:, None] & (value < M)[None, :]
    if SPLIT and CAUSAL:
        earlier = begin > 0
        before = (unit + begin // SEG - 1).to(tl.int64) * key_heads + key_head
        pointers = ends_kv + before * D * M + mine[:, None] * M + value[None, :]
        S = tl.load(pointers, mask=inside & earlier, other=0.0)
        if NORMALIZE:
            z = load_sum(ends_z + before * D, mine, (mine < D) & earlier)
    else:
        earlier = False
    if STATE_IN:
        if not earlier:
            S = load_sums(kv_in + state * D * M, mine, value, D, M)
            if NORMALIZE:
                z = load_sum(z_in + state * D, mine, mine < D)

    for chunk in tl.range(begin, stop, BT, num_stages=STAGES):
        token = chunk + step
        live = token < real
        x_q = load_tile(q, q_time, token, real, mine, D, BF)
        x_do = load_tile(do, do_time, token, real, value, M, BM).to(NARROW)
        until = tl.sum(z, 1)
        if CENTER:
            counted = (S - until[:, None] * c[None, :]).to(NARROW)
        else:
            counted = S.to(NARROW)
        dphi_q = tl.dot(x_do, tl.trans(counted), input_precision=PRECISION)
        if CAUSAL:
            x_k = load_tile(k, k_time, token, real, mine, D, BF)
            x_v = load_tile(v, v_time, token, real, value, M, BM).to(NARROW)
            phi_k = mapped(x_k, root, mine, MAP, D, BF).to(NARROW)
            seen = step[:, None] >= step[None, :]
            S = tl.dot(tl.trans(phi_k), x_v, S, input_precision=PRECISION)
            if CENTER:
                x_v -= c.to(NARROW)[None, :]
            dweights = tl.dot(x_do, tl.trans(x_v), input_precision=PRECISION)
            dweights = tl.where(seen, dweights, 0.0).to(NARROW)
            dphi_q = tl.dot(dweights, phi_k, dphi_q, input_precision=PRECISION)
            if NORMALIZE:
                z = tl.dot(tl.trans(phi_k), column(live, NARROW), z, input_precision=PRECISION)
        steep = slope(x_q.to(tl.float32), root, MAP)
        if NORMALIZE:
            den = tl.load(den_in + token, mask=live, other=float("inf"))  # then dq is 0
            inverse = 1.0 / divisor(den, eps, EPS)
            if BLOCKS == 1:
                e = -tl.sum(mapped(x_q, root, mine, MAP, D, BF) * dphi_q, 1) * inverse
            else:  # φ(q) is not whole here, but the output tells the same
                y = load_tile(out, m_time, token, real, value, M, BM).to(tl.float32)
                e = -tl.sum(x_do.to(tl.float32) * (y - c[None, :]), 1)
            if EPS:
                e = tl.where(tl.abs(den) < eps, 0.0, e)
            if block == 0:
                tl.store(e_out + token, e, mask=token < size)
            steep *= inverse[:, None]
            dphi_q += e[:, None] * until[None, :]
            if CAUSAL:
                within = tl.where(seen, e[:, None], 0.0).to(NARROW)
                dphi_q = tl.dot(within, phi_k, dphi_q, input_precision=PRECISION)
        dphi_q *= steep
        if LAYOUT == "padded" and not NORMALIZE:
            dphi_q = tl.where(live[:, None], dphi_q, 0.0)
        store_tile(dq, d_time, token, size, mine, dphi_q, D, BF)


@kernel
def dkv_kernel(
    q,
    k,
    v,
    do,
    den_in,
    e_in,
    center,
    later_kv,
    later_z,
    dkv_end,
    dz_end,
    dk,
    dv,
    dkv,
    dz,
    lengths,
    q_row,
    q_time,
    q_head,
    k_row,
    k_time,
    k_head,
    v_row,
    v_time,
    v_head,
    do_row,
    do_time,
    do_head,
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
    BF: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    LAYOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    GRADIENT_IN: tl.constexpr,
    GRADIENT_OUT: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """KEYS: make dk (of a block of BF features; BV is then all values). VALUES: make dv (BV values; BF all features).

    dkv_end, dz_end: the gradient of the final sums (GRADIENT_IN); not causal, that of the sums of all keys.
    """
    pid = tl.program_id(0)
    block, head, item = pid % BLOCKS, pid // BLOCKS % heads, pid // BLOCKS // heads
    key_head = head // group
    row, unit, begin, stop = place(item, T, lengths, rows, SEG, LAYOUT, SPLIT)
    at_row, start, size, real = bounds(row, T, lengths, LAYOUT)

    step = tl.arange(0, BT)
    feature, value = tl.arange(0, BF), tl.arange(0, BV)
    if KEYS:
        feature += block * BF
    else:
        value += block * BV
    at = at_row.to(tl.int64)
    q_time, k_time = aligned(q_time, ALIGNED), aligned(k_time, ALIGNED)
    v_time, do_time = aligned(v_time, ALIGNED), aligned(do_time, ALIGNED)
    q += at * aligned(q_row, ALIGNED) + start * q_time + head * aligned(q_head, ALIGNED)
    k += at * aligned(k_row, ALIGNED) + start * k_time + key_head * aligned(k_head, ALIGNED)
    v += at * aligned(v_row, ALIGNED) + start * v_time + key_head * aligned(v_head, ALIGNED)
    do += at * aligned(do_row, ALIGNED) + start * do_time + head * aligned(do_head, ALIGNED)
    dk += ((at * T + start) * heads + head) * D
    dv += ((at * T + start) * heads + head) * M
    d_time, m_time = heads.to(tl.int64) * D, heads.to(tl.int64) * M
    den_in += (at * heads + head) * T + start
    e_in += (at * heads + head) * T + start

    c = tl.zeros([BV], tl.float32)
    if CENTER:
        state = row.to(tl.int64) * (heads // group) + key_head
        c = tl.load(center + state * M + value, mask=value < M, other=0.0).to(tl.float32)
    dS, dz_sum = tl.zeros([BF, BV], tl.float32), tl.zeros([BF, COLUMNS], tl.float32)
    into = row.to(tl.int64) * heads + head
    if GRADIENT_IN:
        if stop == size or not CAUSAL:
            dS = load_sums(dkv_end + into * D * M, feature, value, D, M)
            if NORMALIZE:
                dz_sum = load_sum(dz_end + into * D, feature, feature < D)
    if SPLIT and CAUSAL:
        if stop < size:
            after = (unit + begin // SEG + 1).to(tl.int64) * heads + head
            dS = load_sums(later_kv + after * D * M, feature, value, D, M)
            if NORMALIZE:
                dz_sum = load_sum(later_z + after * D, feature, feature < D)

    chunks = tl.cdiv(stop - begin, BT)
    for n in tl.range(0, chunks, num_stages=STAGES):
        token = begin + (chunks - 1 - n) * BT + step
        live = token < real
        later = step[:, None] <= step[None, :]
        x_k = load_tile(k, k_time, token, real, feature, D, BF)
        narrow = dS.to(NARROW)
        if CAUSAL:
            x_q = load_tile(q, q_time, token, real, feature, D, BF)
            x_do = load_tile(do, do_time, token, real, value, M, BV).to(NARROW)
            psi = mapped(x_q, root, feature, MAP, D, BF)
            if NORMALIZE:
                den = tl.load(den_in + token, mask=live, other=float("inf"))  # ψ is 0 there, so e may be anything
                e = tl.load(e_in + tl.minimum(token, stop - 1))
                psi *= (1.0 / divisor(den, eps, EPS))[:, None]
            psi = psi.to(NARROW)
        if KEYS:
            x_v = load_tile(v, v_time, token, real, value, M, BV).to(NARROW)
            if CENTER:
                x_v -= c.to(NARROW)[None, :]
            dphi_k = tl.dot(x_v, tl.trans(narrow), input_precision=PRECISION)
            if CAUSAL:
                turned = tl.dot(x_v, tl.trans(x_do), input_precision=PRECISION)
                if NORMALIZE:
                    turned += e[None, :]
                turned = tl.where(later, turned, 0.0).to(NARROW)
                dphi_k = tl.dot(turned, psi, dphi_k, input_precision=PRECISION)
            if NORMALIZE:
                dphi_k += tl.sum(dz_sum, 1)[None, :]
            dphi_k *= slope(x_k.to(tl.float32), root, MAP)
            if LAYOUT == "padded":
                dphi_k = tl.where(live[:, None], dphi_k, 0.0)
            store_tile(dk, d_time, token, size, feature, dphi_k, D, BF)
        if VALUES:
            phi_k = mapped(x_k, root, feature, MAP, D, BF).to(NARROW)
            x_dv = tl.dot(phi_k, narrow, input_precision=PRECISION)
            if CAUSAL:
                turned = tl.dot(phi_k, tl.trans(psi), input_precision=PRECISION)
                turned = tl.where(later, turned, 0.0).to(NARROW)
                x_dv = tl.dot(turned, x_do, x_dv, input_precision=PRECISION)
            if LAYOUT == "padded":
                x_dv = tl.where(live[:, None], x_dv, 0.0)
            store_tile(dv, m_time, token, size, value, x_dv, M, BV)
        if CAUSAL:
            dS = tl.dot(tl.trans(psi), x_do, dS, input_precision=PRECISION)
            if NORMALIZE:
                dz_sum = tl.dot(tl.trans(psi), digits(e, NARROW), dz_sum, input_precision=PRECISION)

    if GRADIENT_OUT and CAUSAL:
        if begin == 0:
            inside = (feature < D)[:, None] & (value < M)[None, :]
            tl.store(dkv + into * D * M + feature[:, None] * M + value[None, :], dS, mask=inside)
            if NORMALIZE and (KEYS or block == 0):
                store_sum(dz + into * D, feature, dz_sum, D)
