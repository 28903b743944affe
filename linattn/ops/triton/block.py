"""The rest of a transformer layer for one token: two launches a layer for few rows, norms for many.

    attend    x ← norm(x + attention's out)…   q, k, v = W x    out of one head    its part of W_out out
    feed      x ← norm(x + Σ parts)            h = act(W_in x) of one block        its part of W_leave h

With few rows a step is as long as its chain of launches, so each kernel takes along what stands between two products:
whoever reads a token sums the parts that the launch before left, adds the bias and the residual, and normalises, each
program for itself. A product whose sum runs over heads (or hidden blocks) is left in parts, one for each program, so no
program waits for another and sums have one order.

`add_norm` and `embed` are for any number of rows; there the products are cuBLAS's.

Axes:  W width of a token   D key width   M values   F a block of hidden numbers   P parts       a program has one row
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.decode import counted, features, read_recent, read_sums, weigh
from linattn.ops.triton.jit import device, kernel
from linattn.ops.triton.tiles import divisor


@kernel
def embed(
    values,
    weight,
    table,
    seen,
    counts,
    live,
    x,
    W: tl.constexpr,
    E: tl.constexpr,
    BW: tl.constexpr,
    PLACES: tl.constexpr,
    FOLD: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """A step begins: x = [embedding, 0] + the table's row of this place. Each row counts its token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BW)
    place = tl.load(seen + row)
    more = counted(counts + row, live + row, True, FOLD, RAGGED)
    tl.store(seen + row, place + more)
    y = tl.load(table + tl.minimum(place, PLACES - 1) * W + column, mask=column < W, other=0.0).to(tl.float32)
    y += tl.load(weight + tl.load(values + row) * E + column, mask=column < E, other=0.0).to(tl.float32)
    tl.store(x + row * W + column, y.to(x.dtype.element_ty), mask=column < W)


@kernel
def add_norm(
    x,
    y,
    total,
    out,
    weight,
    bias,
    rows,
    eps,
    W: tl.constexpr,
    BW: tl.constexpr,
    ROWS: tl.constexpr,
    RMS: tl.constexpr,
    BIAS: tl.constexpr,
    TOTAL: tl.constexpr,
):
    """out = norm(x + y), and the sum itself (TOTAL) where the norm comes first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BW)
    mask = (row < rows)[:, None] & (column < W)[None, :]
    at = row[:, None] * W + column[None, :]
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
    if TOTAL:
        tl.store(total + at, s.to(total.dtype.element_ty), mask=mask)
    if not RMS:
        s = tl.where(mask, s - (tl.sum(s, 1) / W)[:, None], 0.0)
    s = s / tl.sqrt(tl.sum(s * s, 1) / W + eps)[:, None]
    s *= tl.load(weight + column, mask=column < W, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        s += tl.load(bias + column, mask=column < W, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, s.to(out.dtype.element_ty), mask=mask)


@device
def vector(x, column, W: tl.constexpr):
    return tl.load(x + column, mask=column < W, other=0.0).to(tl.float32)


@device
def gathered(x, bias, parts, row, column, W: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr):
    """The residual, the bias and the parts of a product."""
    y = vector(x + row * W, column, W)
    if PARTS:
        part = tl.arange(0, BP)
        mask = (part < PARTS)[:, None] & (column < W)[None, :]
        y += tl.sum(tl.load(parts + (row * PARTS + part)[:, None] * W + column[None, :], mask=mask, other=0.0), 0)
        y += vector(bias, column, W)
    return y


@device
def normed(y, weight, bias, column, eps, W: tl.constexpr, RMS: tl.constexpr):
    if not RMS:
        y = tl.where(column < W, y - tl.sum(y, 0) / W, 0.0)
    y = y / tl.sqrt(tl.sum(y * y, 0) / W + eps) * vector(weight, column, W)
    return y + vector(bias, column, W)


@device
def load_rows(weight, first, count, column, W: tl.constexpr, BLOCK: tl.constexpr):
    """Rows first … first + count - 1 of a matrix."""
    row = tl.arange(0, BLOCK)
    mask = (row < count)[:, None] & (column < W)[None, :]
    return tl.load(weight + (first + row)[:, None] * W + column[None, :], mask=mask, other=0.0)


@device
def times(w, x, bias, first, count, BLOCK: tl.constexpr):
    """Rows w of a matrix, times x, plus the bias."""
    row = tl.arange(0, BLOCK)
    b = tl.load(bias + first + row, mask=row < count, other=0.0).to(tl.float32)
    return tl.sum(w.to(tl.float32) * x[None, :], 1) + b


@device
def token(
    x, bias, parts, residual, norm_w, norm_b, before_w, before_b, row, column, writes, eps,
    W: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, RMS: tl.constexpr, AFTER: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """What a product reads. AFTER: the sum is normalised (post-norm); BEFORE: only what the product reads of it."""
    y = gathered(x, bias, parts, row, column, W, PARTS, BP)
    if AFTER:
        y = normed(y, norm_w, norm_b, column, eps, W, RMS)
    tl.store(residual + row * W + column, y, mask=(column < W) & writes)
    if BEFORE:
        y = normed(y, before_w, before_b, column, eps, W, RMS)
    return y


@kernel
def attend(
    x, bias, parts, residual, norm_w, norm_b, before_w, before_b, qkv_w, qkv_b, out_w, made, kv, z, keys, values,
    counts, live, heads, root, eps, W: tl.constexpr, D: tl.constexpr, M: tl.constexpr, BW: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr, FOLD: tl.constexpr, RMS: tl.constexpr,
    AFTER: tl.constexpr, BEFORE: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    RAGGED: tl.constexpr, NORM_EPS: tl.constexpr,
):  # fmt: skip
    """One head of one row. qkv_w: rows of all queries, all keys, all values; out_w transposed: a row for each value."""
    pid = tl.program_id(0)
    head, row = pid % heads, (pid // heads).to(tl.int64)
    column, feature, value = tl.arange(0, BW), tl.arange(0, BD), tl.arange(0, BM)
    inside, at = feature < D, row * heads + head
    own = tl.load(counts + row) - 1
    enters = True
    if RAGGED:
        enters = tl.load(live + row) > 0
    # Weights come first: they are on their way while the token is put together.
    w_q = load_rows(qkv_w, head * D, D, column, W, BD)
    w_k = load_rows(qkv_w, (heads + head) * D, D, column, W, BD)
    w_v = load_rows(qkv_w, 2 * heads * D + head * M, M, column, W, BM)
    w_out = load_rows(out_w, head * M, M, column, W, BM)
    n = token(
        x, bias, parts, residual, norm_w, norm_b, before_w, before_b, row, column, head == 0, NORM_EPS,
        W, PARTS, BP, RMS, AFTER, BEFORE,
    )  # fmt: skip
    phi_q = features(times(w_q, n, qkv_b, head * D, D, BD), root, inside, MAP)
    x_k = times(w_k, n, qkv_b, (heads + head) * D, D, BD).to(keys.dtype.element_ty)
    x_v = times(w_v, n, qkv_b, 2 * heads * D + head * M, M, BM).to(values.dtype.element_ty)
    tl.store(keys + (at * FOLD + own) * D + feature, x_k, mask=inside & enters)
    tl.store(values + (at * FOLD + own) * M + value, x_v, mask=(value < M) & enters)

    weights = weigh(keys, phi_q, at, own, feature, root, D, FOLD, MAP)
    own_weight = tl.sum(features(x_k, root, inside, MAP) * phi_q, 0)
    num = read_sums(kv, phi_q, at, feature, value, D, M) + read_recent(values, weights, at, own, value, M, FOLD)
    num += own_weight * x_v.to(tl.float32)
    if NORMALIZE:
        den = tl.sum(phi_q * tl.load(z + at * D + feature, mask=inside, other=0.0), 0)
        num = num / divisor(den + tl.sum(weights, 0) + own_weight, eps, EPS)
    part = tl.sum(w_out.to(tl.float32) * num[:, None], 0)
    tl.store(made + at * W + column, part, mask=column < W)


@kernel
def feed(
    x, bias, parts, residual, norm_w, norm_b, before_w, before_b, enter_w, enter_b, leave_w, made, eps,
    W: tl.constexpr, HIDDEN: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr, PARTS: tl.constexpr, BP: tl.constexpr,
    RMS: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One block of hidden numbers of one row. leave_w transposed: a row for each hidden number."""
    BLOCKS: tl.constexpr = (HIDDEN + BF - 1) // BF
    pid = tl.program_id(0)
    block, row = pid % BLOCKS, (pid // BLOCKS).to(tl.int64)
    column, first = tl.arange(0, BW), block * BF
    count = tl.minimum(HIDDEN - first, BF)
    w_enter = load_rows(enter_w, first, count, column, W, BF)  # first, as in `attend`
    w_leave = load_rows(leave_w, first, count, column, W, BF)
    n = token(
        x, bias, parts, residual, norm_w, norm_b, before_w, before_b, row, column, block == 0, eps,
        W, PARTS, BP, RMS, AFTER, BEFORE,
    )  # fmt: skip
    h = times(w_enter, n, enter_b, first, count, BF)
    if ACTIVATION == "relu":
        h = tl.maximum(h, 0.0)
    elif ACTIVATION == "gelu":
        h = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "swiglu", "an activation that the kernels do not know")
        w_value = load_rows(enter_w, HIDDEN + first, count, column, W, BF)
        h = h * tl.sigmoid(h) * times(w_value, n, enter_b, HIDDEN + first, count, BF)
    part = tl.sum(w_leave.to(tl.float32) * h[:, None], 0)
    tl.store(made + (row * BLOCKS + block) * W + column, part, mask=column < W)


@kernel
def finish(
    x, bias, parts, norm_w, norm_b, last_w, last_b, out, eps, W: tl.constexpr, BW: tl.constexpr, PARTS: tl.constexpr,
    BP: tl.constexpr, RMS: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """What the head reads: after the last parts, the stack's own norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BW)
    y = gathered(x, bias, parts, row, column, W, PARTS, BP)
    if AFTER:
        y = normed(y, norm_w, norm_b, column, eps, W, RMS)
    y = normed(y, last_w, last_b, column, eps, W, RMS)
    tl.store(out + row * W + column, y.to(out.dtype.element_ty), mask=column < W)
