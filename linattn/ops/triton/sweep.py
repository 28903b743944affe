"""The backward kernel for narrow heads: all three gradients in one walk from the last token to the first.

    ψ = φq / den    e = −ψ·(tril(do v'ᵀ) φk + do S'ᵀ)                                  (6, 7; e is dden times den)
    dφq = (tril(do v'ᵀ + e 1ᵀ) φk + do S'ᵀ + e z) / den
    dφk = tril(do v'ᵀ + e 1ᵀ)ᵀ ψ + v' dSᵀ + dz    dv = tril(ψ φkᵀ)ᵀ do + φk dS    dS += ψᵀ do    dz += ψᵀ e        (8)

Only φq is divided by the denominators, so that v and the output's gradient enter products as they come from memory:
a chunk's time is that of its instructions as much as that of its bytes, and most of them are work on single numbers.

The sums S, z before a chunk are needed with those after it already known, so the state is run backwards: S −= φkᵀ v. It
starts anew from what the forward pass kept at the end of each segment (in a short sequence from its own sums, made in a
first walk over the keys). Values are counted from c, v' = v − c and S' = S − z c (equation 9), S itself from 0: it must
lose exactly what the forward pass added. What rounding leaves of that is 10⁻⁵ of dq after 500 tokens: nothing beside a
16-bit gradient, a hundred times too much for a float32 one, which takes parts.py. The transposed tables are products
of their own and not transposes of A and dA: Triton 3.4 to 3.7 gives wrong results for those on Hopper.

Axes:  [T, D] a tile of queries or keys   [T, M] of values   S, dS [D, M]   z, dz [D, 16 columns to be added]
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
    store_sums,
    store_tile,
)


@kernel
def sweep(
    q,
    k,
    v,
    do,
    den_in,
    center,
    ends_kv,
    ends_z,
    kv_in,
    z_in,
    later_kv,
    later_z,
    dkv_end,
    dz_end,
    dq,
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
    BT: tl.constexpr,
    MAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    LAYOUT: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    ENDS: tl.constexpr,
    STATE_IN: tl.constexpr,
    GRADIENT_IN: tl.constexpr,
    GRADIENT_OUT: tl.constexpr,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """ENDS: the sums at the end of each segment are given. SPLIT: a program has one segment, and `later` is given."""
    pid = tl.program_id(0)
    head, item = pid % heads, pid // heads
    key_head, key_heads = head // group, heads // group
    row, unit, begin, stop = place(item, T, lengths, rows, SEG, LAYOUT, SPLIT)
    at_row, start, size, real = bounds(row, T, lengths, LAYOUT)

    feature, value, step = tl.arange(0, BD), tl.arange(0, BM), tl.arange(0, BT)
    at = at_row.to(tl.int64)
    q_time, k_time = aligned(q_time, ALIGNED), aligned(k_time, ALIGNED)
    v_time, do_time = aligned(v_time, ALIGNED), aligned(do_time, ALIGNED)
    q += at * aligned(q_row, ALIGNED) + start * q_time + head * aligned(q_head, ALIGNED)
    k += at * aligned(k_row, ALIGNED) + start * k_time + key_head * aligned(k_head, ALIGNED)
    v += at * aligned(v_row, ALIGNED) + start * v_time + key_head * aligned(v_head, ALIGNED)
    do += at * aligned(do_row, ALIGNED) + start * do_time + head * aligned(do_head, ALIGNED)
    dq += ((at * T + start) * heads + head) * D
    dk += ((at * T + start) * heads + head) * D
    dv += ((at * T + start) * heads + head) * M
    den_in += (at * heads + head) * T + start
    d_time, m_time = heads.to(tl.int64) * D, heads.to(tl.int64) * M

    c = tl.zeros([BM], tl.float32)
    if CENTER:
        state = row.to(tl.int64) * key_heads + key_head
        c = tl.load(center + state * M + value, mask=value < M, other=0.0).to(tl.float32)

    # 1. What later segments ask of the sums.
    dS, dz_sum = tl.zeros([BD, BM], tl.float32), tl.zeros([BD, COLUMNS], tl.float32)
    if GRADIENT_IN:
        if stop == size:
            into = row.to(tl.int64) * heads + head
            dS = load_sums(dkv_end + into * D * M, feature, value, D, M)
            if NORMALIZE:
                dz_sum = load_sum(dz_end + into * D, feature, feature < D)
    if SPLIT:
        if stop < size:
            after = (unit + begin // SEG + 1).to(tl.int64) * heads + head
            dS = load_sums(later_kv + after * D * M, feature, value, D, M)
            if NORMALIZE:
                dz_sum = load_sum(later_z + after * D, feature, feature < D)

    segments = tl.cdiv(stop - begin, SEG)
    for number in range(segments):
        first = begin + (segments - 1 - number) * SEG
        last = tl.minimum(first + SEG, stop)
        # 2. The sums at the end of the segment.
        S, z = tl.zeros([BD, BM], tl.float32), tl.zeros([BD, COLUMNS], tl.float32)
        if ENDS:
            here = (unit + first // SEG).to(tl.int64) * key_heads + key_head
            S = load_sums(ends_kv + here * D * M, feature, value, D, M)
            if NORMALIZE:
                z = load_sum(ends_z + here * D, feature, feature < D)
        else:
            if STATE_IN:
                given = row.to(tl.int64) * key_heads + key_head
                S = load_sums(kv_in + given * D * M, feature, value, D, M)
                if NORMALIZE:
                    z = load_sum(z_in + given * D, feature, feature < D)
            for chunk in tl.range(first, last, BT, num_stages=STAGES):
                token = chunk + step
                x_k = load_tile(k, k_time, token, real, feature, D, BD)
                phi_k = mapped(x_k, root, feature, MAP, D, BD).to(NARROW)
                x_v = load_tile(v, v_time, token, real, value, M, BM).to(NARROW)
                S = tl.dot(tl.trans(phi_k), x_v, S, input_precision=PRECISION)
                if NORMALIZE:
                    z = tl.dot(tl.trans(phi_k), column(token < real, NARROW), z, input_precision=PRECISION)

        chunks = tl.cdiv(last - first, BT)
        owed, owed_z = -S, -z  # minus the sums, so that they are run backwards by adding
        for n in tl.range(0, chunks, num_stages=STAGES):
            token = first + (chunks - 1 - n) * BT + step
            live = token < real
            x_q = load_tile(q, q_time, token, real, feature, D, BD)
            x_k = load_tile(k, k_time, token, real, feature, D, BD)
            x_v = load_tile(v, v_time, token, real, value, M, BM).to(NARROW)
            x_do = load_tile(do, do_time, token, real, value, M, BM).to(NARROW)
            phi_k = mapped(x_k, root, feature, MAP, D, BD).to(NARROW)

            # 3. Back to the sums before this chunk, and their values counted from c.
            owed = tl.dot(tl.trans(phi_k), x_v, owed, input_precision=PRECISION)
            if NORMALIZE:
                owed_z = tl.dot(tl.trans(phi_k), column(live, NARROW), owed_z, input_precision=PRECISION)
            if CENTER:
                before_z = tl.sum(owed_z, 1)
                counted = (before_z[:, None] * c[None, :] - owed).to(NARROW)
                x_v -= c.to(NARROW)[None, :]
            else:
                counted = (-owed).to(NARROW)

            # 4. The queries.
            seen = step[:, None] >= step[None, :]
            dweights = tl.dot(x_do, tl.trans(x_v), input_precision=PRECISION)
            dweights = tl.where(seen, dweights, 0.0).to(NARROW)
            dphi_q = tl.dot(x_do, tl.trans(counted), input_precision=PRECISION)
            dphi_q = tl.dot(dweights, phi_k, dphi_q, input_precision=PRECISION)
            psi = mapped(x_q, root, feature, MAP, D, BD)
            steep = slope(x_q.to(tl.float32), root, MAP)
            if NORMALIZE:
                den = tl.load(den_in + token, mask=live, other=float("inf"))  # then ψ is 0, and e, and dq
                inverse = 1.0 / divisor(den, eps, EPS)
                psi *= inverse[:, None]
                steep *= inverse[:, None]
                e = -tl.sum(psi * dphi_q, 1)
                if EPS:
                    e = tl.where(tl.abs(den) < eps, 0.0, e)
                until = tl.broadcast_to(-tl.sum(owed_z, 1)[None, :], (BT, BD))
                until = tl.dot(tl.where(seen, 1.0, 0.0).to(NARROW), phi_k, until, input_precision=PRECISION)
                dphi_q += e[:, None] * until
            psi = psi.to(NARROW)
            dphi_q *= steep
            if LAYOUT == "padded" and not NORMALIZE:
                dphi_q = tl.where(live[:, None], dphi_q, 0.0)
            store_tile(dq, d_time, token, size, feature, dphi_q, D, BD)

            # 5. The keys and values.
            later = step[:, None] <= step[None, :]
            turned = tl.dot(x_v, tl.trans(x_do), input_precision=PRECISION)  # dA transposed, times den
            if NORMALIZE:
                turned += e[None, :]
            turned = tl.where(later, turned, 0.0).to(NARROW)
            narrow = dS.to(NARROW)
            dphi_k = tl.dot(x_v, tl.trans(narrow), input_precision=PRECISION)
            dphi_k = tl.dot(turned, psi, dphi_k, input_precision=PRECISION)
            if NORMALIZE:
                dphi_k += tl.sum(dz_sum, 1)[None, :]
            dphi_k *= slope(x_k.to(tl.float32), root, MAP)
            if LAYOUT == "padded":
                dphi_k = tl.where(live[:, None], dphi_k, 0.0)
            store_tile(dk, d_time, token, size, feature, dphi_k, D, BD)
            turned = tl.dot(phi_k, tl.trans(psi), input_precision=PRECISION)  # A transposed, over den
            turned = tl.where(later, turned, 0.0).to(NARROW)
            x_dv = tl.dot(phi_k, narrow, input_precision=PRECISION)
            x_dv = tl.dot(turned, x_do, x_dv, input_precision=PRECISION)
            if LAYOUT == "padded":
                x_dv = tl.where(live[:, None], x_dv, 0.0)
            store_tile(dv, m_time, token, size, value, x_dv, M, BM)

            # 6. What this chunk asks of the sums before it.
            dS = tl.dot(tl.trans(psi), x_do, dS, input_precision=PRECISION)
            if NORMALIZE:
                dz_sum = tl.dot(tl.trans(psi), digits(e, NARROW), dz_sum, input_precision=PRECISION)

    if GRADIENT_OUT:
        if begin == 0:
            into = row.to(tl.int64) * heads + head
            store_sums(dkv + into * D * M, feature, value, dS, D, M)
            if NORMALIZE:
                store_sum(dz + into * D, feature, dz_sum, D)
