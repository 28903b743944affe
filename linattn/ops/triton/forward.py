"""The forward kernel: outputs of one sequence, or of one segment of it, with the sums in registers.

    A = tril(φq φkᵀ)    out = (A v + φq S) / (A 1 + φq·z)    S += φkᵀ v    z += φkᵀ 1      (equation 5, chunk by chunk)

Products take tiles in the inputs' precision (bf16; tf32 once or three times for float32 and float16), sums are float32.
Not causal: S and z are the sums of all keys, made beforehand, and there is nothing within a chunk.

Axes:  [T, D] a tile of queries or keys   [T, M] of values   S [D, M]   z [D, 16 columns to be added]
       A program has one head, and one block of M.
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
    load_sum,
    load_sums,
    load_tile,
    place,
    store_sum,
    store_sums,
    store_tile,
)


@kernel
def forward(
    q,
    k,
    v,
    out,
    den_out,
    kv_in,
    z_in,
    kv_end,
    z_end,
    center,
    ends_kv,
    ends_z,
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
    BT: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    STATE_IN: tl.constexpr,
    STATE_OUT: tl.constexpr,
    SAVE_DEN: tl.constexpr,
    SAVE_CENTER: tl.constexpr,
    SAVE_ENDS: tl.constexpr,
    ADDED: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ADDED: of a call that is one chunk, leave what its keys add to the state, to be added exactly."""
    pid = tl.program_id(0)
    block, head, item = pid % BLOCKS, pid // BLOCKS % heads, pid // BLOCKS // heads
    key_head, key_heads = head // group, heads // group
    row, unit, begin, stop = place(item, T, lengths, rows, SEG, LAYOUT, SPLIT)
    at_row, start, size, real = bounds(row, T, lengths, LAYOUT)

    feature, value = tl.arange(0, BD), block * BM + tl.arange(0, BM)
    step = tl.arange(0, BT)
    at = at_row.to(tl.int64)
    q_time, k_time, v_time = aligned(q_time, ALIGNED), aligned(k_time, ALIGNED), aligned(v_time, ALIGNED)
    q += at * aligned(q_row, ALIGNED) + start * q_time + head * aligned(q_head, ALIGNED)
    k += at * aligned(k_row, ALIGNED) + start * k_time + key_head * aligned(k_head, ALIGNED)
    v += at * aligned(v_row, ALIGNED) + start * v_time + key_head * aligned(v_head, ALIGNED)
    out += ((at * T + start) * heads + head) * M
    out_time = heads.to(tl.int64) * M

    # 1. What came before: the given state, and in a segment of a longer sequence the sums of the segments before.
    state = row.to(tl.int64) * key_heads + key_head
    if SPLIT and CAUSAL:
        before = (unit + begin // SEG - 1).to(tl.int64) * key_heads + key_head
        earlier = begin > 0
        S = tl.load(
            ends_kv + before * D * M + feature[:, None] * M + value[None, :],
            mask=(feature < D)[:, None] & (value < M)[None, :] & earlier,
            other=0.0,
        )
        z = load_sum(ends_z + before * D, feature, (feature < D) & earlier)
    else:
        earlier = False
        S = tl.zeros([BD, BM], tl.float32)
        z = tl.zeros([BD, COLUMNS], tl.float32)
    if STATE_IN:
        if not earlier:
            S = load_sums(kv_in + state * D * M, feature, value, D, M)
            if NORMALIZE:
                z = load_sum(z_in + state * D, feature, feature < D)

    added_kv, added_z = tl.zeros([BD, BM], tl.float32), tl.zeros([BD, COLUMNS], tl.float32)

    # 2. Chunk by chunk, one segment after the other.
    mine = head % group == 0  # one query head of a group writes what its heads share
    for segment in range(begin, stop, SEG):
        for chunk in tl.range(segment, tl.minimum(segment + SEG, stop), BT, num_stages=STAGES):
            token = chunk + step
            x_q = load_tile(q, q_time, token, real, feature, D, BD)
            phi_q = mapped(x_q, root, feature, MAP, D, BD).to(NARROW)
            if CAUSAL:
                x_k = load_tile(k, k_time, token, real, feature, D, BD)
                x_v = load_tile(v, v_time, token, real, value, M, BM).to(NARROW)
                phi_k = mapped(x_k, root, feature, MAP, D, BD).to(NARROW)
                weights = tl.dot(phi_q, tl.trans(phi_k), input_precision=PRECISION)
                weights = tl.where(step[:, None] >= step[None, :], weights, 0.0)
                num = tl.dot(phi_q, S.to(NARROW), input_precision=PRECISION)
                num = tl.dot(weights.to(NARROW), x_v, num, input_precision=PRECISION)
            else:
                num = tl.dot(phi_q, S.to(NARROW), input_precision=PRECISION)
            if NORMALIZE:
                den = tl.sum(tl.dot(phi_q, digits(tl.sum(z, 1), NARROW), input_precision=PRECISION), 1)
                if CAUSAL:
                    den += tl.sum(weights, 1)
                num *= (1.0 / divisor(den, eps, EPS))[:, None]
                if SAVE_DEN and block == 0:
                    tl.store(den_out + (at * heads + head) * T + start + token, den, mask=token < size)
            if LAYOUT == "padded":
                num = tl.where((token < real)[:, None], num, 0.0)
            store_tile(out, out_time, token, size, value, num, M, BM)
            if CAUSAL:
                turned = tl.trans(phi_k)
                if ADDED:
                    added_kv = tl.dot(turned, x_v, added_kv, input_precision=PRECISION)
                else:
                    S = tl.dot(turned, x_v, S, input_precision=PRECISION)
                if NORMALIZE:  # φ(0) need not be 0: padding must not enter z
                    live = column(token < real, NARROW)
                    if ADDED:
                        added_z = tl.dot(turned, live, added_z, input_precision=PRECISION)
                    else:
                        z = tl.dot(turned, live, z, input_precision=PRECISION)
        if SAVE_ENDS and mine:
            here = (unit + segment // SEG).to(tl.int64) * key_heads + key_head
            store_sums(ends_kv + here * D * M, feature, value, S, D, M)
            if NORMALIZE and block == 0:
                store_sum(ends_z + here * D, feature, z, D)

    # 3. What is left behind.
    if STATE_OUT and mine:
        store_sums(kv_end + state * D * M, feature, value, added_kv if ADDED else S, D, M)
        if NORMALIZE and block == 0:
            store_sum(z_end + state * D, feature, added_z if ADDED else z, D)
    if SAVE_CENTER and mine:
        S, z = S + added_kv, z + added_z
        weight = tl.sum(tl.sum(z, 1), 0)
        mean = tl.sum(S, 0) / tl.where(weight == 0, float("inf"), weight)
        tl.store(center + state * M + value, mean, mask=value < M)
