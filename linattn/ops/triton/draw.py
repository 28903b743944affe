"""Random numbers and values drawn with them, on the device: what the host's forms make, without waiting for the host.

    uniforms         u(seed, row, place) of linattn/generate/uniforms.py, bit for bit: Philox-4×64 with ten rounds
    draw_logistics   MixtureOfLogistics.draw: a component, a point of its logistic, the bin in which the point lies

Axes:  [N, K] components of N rows
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import kernel

MULTIPLY_0, MULTIPLY_1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
WEYL_0, WEYL_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@kernel
def uniforms(seed, numbers, starts, out, rows, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """out (AHEAD, rows) float64: places starts … starts + AHEAD - 1 of each row."""
    pid = tl.program_id(0)
    step, row = pid % AHEAD, pid // AHEAD * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    place = (tl.load(starts + row, mask=inside, other=0) + step).to(tl.uint64)
    left = tl.load(seed).to(tl.uint64, bitcast=True) + place * 0
    right = tl.load(numbers + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    a, b, c, d = (place >> 2) + 1, place * 0, place * 0, place * 0
    m0, m1 = tl.full([BLOCK], MULTIPLY_0, tl.uint64), tl.full([BLOCK], MULTIPLY_1, tl.uint64)
    w0, w1 = tl.full([BLOCK], WEYL_0, tl.uint64), tl.full([BLOCK], WEYL_1, tl.uint64)
    for _ in tl.static_range(10):
        upper, other = tl.umulhi(a, m0), tl.umulhi(c, m1)
        a, b, c, d = other ^ b ^ left, c * m1, upper ^ d ^ right, a * m0
        left += w0
        right += w1
    word = place & 3
    word = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    u = (word >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
    tl.store(out + step.to(tl.int64) * rows + row, u, mask=inside)


@kernel
def draw_logistics(
    params,
    uniforms,
    pending,
    live,
    out,
    rows,
    K: tl.constexpr,
    BK: tl.constexpr,
    V: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    FARTHEST: tl.constexpr,
    LOG_HALF: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """params (N, 3K): logits, means, log-scales -> values (N,). In float64, as on the host."""
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BK)
    inside = row < rows
    mask = inside[:, None] & (k < K)[None, :]
    at = params + row[:, None] * 3 * K + k[None, :]
    logits = tl.load(at, mask=mask, other=float("-inf")).to(tl.float64)
    logits = tl.where(inside[:, None], logits, 0.0)
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    ends = tl.cumsum(weights, 1)
    total = tl.max(ends, 1)
    # Rounding may carry u · total up to total itself, which lies beyond the last component that has any weight.
    u = tl.load(uniforms + row, mask=inside, other=0.5)
    u = tl.minimum(u * total, total * (1.0 - 1.1102230246251565e-16))
    index = tl.sum((ends <= u[:, None]).to(tl.int32), 1)
    chosen = k[None, :] == index[:, None]
    end, weight = tl.sum(tl.where(chosen, ends, 0.0), 1), tl.sum(tl.where(chosen, weights, 0.0), 1)
    rest = 1.0 - (end - u) / weight
    rest = tl.minimum(tl.maximum(rest, 1.1102230246251565e-16), 1.0 - 1.1102230246251565e-16)

    mean = tl.sum(tl.where(chosen, tl.load(at + K, mask=mask, other=0.0), 0.0).to(tl.float64), 1)
    log_scale = tl.sum(tl.where(chosen, tl.load(at + 2 * K, mask=mask, other=0.0), 0.0).to(tl.float64), 1)
    center = tl.minimum(tl.maximum(mean, -FARTHEST), FARTHEST) * ((V - 1) / 2)
    scale = tl.exp(tl.minimum(tl.maximum(log_scale, LEAST), MOST) + LOG_HALF)
    value = tl.floor(center + scale * tl.log(rest / (1.0 - rest)) + V / 2)
    value = tl.minimum(tl.maximum(value, 0.0), V - 1.0).to(tl.int64)
    if RAGGED:
        goes_on = tl.load(live + row, mask=inside, other=0) > 0
        value = tl.where(goes_on, value, tl.load(pending + row, mask=inside, other=0))
    tl.store(out + row, value, mask=inside)
