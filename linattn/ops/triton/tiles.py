"""Where a program works: which sequence, which of its tokens, and how tiles of them are read and written.

A sequence is a row of the batch, or one of several packed into a single row. Its tokens are cut into segments of SEG;
a *unit* is one segment of one sequence. Units are numbered without knowing any length on the host:

    padded    unit = row · (segments of T) + segment
    packed    unit = ⌊start_row / SEG⌋ + row + segment       (gaps allowed: ⌈length / SEG⌉ units fit before the next)

Lengths and cuts are clamped, so that values which nobody checked cannot lead out of the tensors.

Axes:  [T, W] a tile of T tokens and W numbers of each
"""

# Kernels are compiled by Triton and not run by Python, whose type checker cannot follow them.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

import triton.language as tl

from linattn.ops.triton.jit import device

COLUMNS = tl.constexpr(16)  # of z, all equal: the narrowest matrix that a product of tiles takes


@device
def bounds(row, T, lengths, LAYOUT: tl.constexpr):
    """Of a sequence: its row of the tensors, its first token there, its places (padding included), its real tokens."""
    if LAYOUT == "packed":
        start = tl.minimum(tl.maximum(tl.load(lengths + row).to(tl.int32), 0), T)
        end = tl.minimum(tl.maximum(tl.load(lengths + row + 1).to(tl.int32), start), T)
        return row * 0, start, end - start, end - start
    elif LAYOUT == "padded":
        real = tl.minimum(tl.maximum(tl.load(lengths + row).to(tl.int32), 0), T)
        return row, row * 0, row * 0 + T, real
    else:
        return row, row * 0, row * 0 + T, row * 0 + T


@device
def first_unit(row, T, lengths, SEG, LAYOUT: tl.constexpr):
    """The number of a sequence's first unit."""
    if LAYOUT == "packed":
        start = tl.minimum(tl.maximum(tl.load(lengths + row).to(tl.int32), 0), T)
        return start // SEG + row
    else:
        return row * tl.cdiv(T, SEG)


@device
def row_of(unit, T, lengths, rows, SEG, LAYOUT: tl.constexpr):
    """The sequence that a unit belongs to."""
    if LAYOUT == "packed":
        low = unit * 0
        high = low + rows - 1
        while low < high:  # the last row whose first unit is not beyond this one
            middle = (low + high + 1) // 2
            if first_unit(middle, T, lengths, SEG, LAYOUT) <= unit:
                low = middle
            else:
                high = middle - 1
        return low
    else:
        return unit // tl.cdiv(T, SEG)


@device
def place(pid, T, lengths, rows, SEG, LAYOUT: tl.constexpr, SPLIT: tl.constexpr):
    """What a program works on: (row, its first unit, first token, end). SPLIT: one unit of a row; else all of it."""
    if SPLIT:
        row = row_of(pid, T, lengths, rows, SEG, LAYOUT)
        unit = first_unit(row, T, lengths, SEG, LAYOUT)
        _, _, size, _ = bounds(row, T, lengths, LAYOUT)
        begin = tl.minimum((pid - unit) * SEG, size)
        return row, unit, begin, tl.minimum(begin + SEG, size)
    else:
        _, _, size, _ = bounds(pid, T, lengths, LAYOUT)
        return pid, first_unit(pid, T, lengths, SEG, LAYOUT), pid * 0, size


@device
def aligned(stride, ALIGNED: tl.constexpr):
    """A stride, known to keep rows of tiles on 16 bytes.

    tl.multiple_of would be lost here: on an argument it says nothing, and then tiles are read two bytes at a time, and
    none ahead of time.
    """
    if ALIGNED:
        return stride // 8 * 8
    else:
        return stride


@device
def load_tile(base, stride, token, end, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[T, BLOCK] numbers from `base`; zeros from token `end` on and in the columns beyond WIDTH."""
    pointers = base + token[:, None] * stride + column[None, :]
    if WIDTH == BLOCK:
        return tl.load(pointers, mask=(token < end)[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=(token < end)[:, None] & (column < WIDTH)[None, :], other=0.0)


@device
def store_tile(base, stride, token, end, column, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pointers = base + token[:, None] * stride + column[None, :]
    if WIDTH == BLOCK:
        tl.store(pointers, x.to(base.dtype.element_ty), mask=(token < end)[:, None])
    else:
        tl.store(pointers, x.to(base.dtype.element_ty), mask=(token < end)[:, None] & (column < WIDTH)[None, :])


@device
def load_sums(base, row, column, D: tl.constexpr, M: tl.constexpr):
    """[BD, BM] of a matrix (D, M) of sums; zeros outside."""
    inside = (row < D)[:, None] & (column < M)[None, :]
    return tl.load(base + row[:, None] * M + column[None, :], mask=inside, other=0.0)


@device
def store_sums(base, row, column, x, D: tl.constexpr, M: tl.constexpr):
    inside = (row < D)[:, None] & (column < M)[None, :]
    tl.store(base + row[:, None] * M + column[None, :], x, mask=inside)


@device
def load_sum(base, row, inside):
    """[BD, COLUMNS]: a vector of sums, of which the columns are parts."""
    x = tl.load(base + row, mask=inside, other=0.0)
    return tl.where(tl.arange(0, COLUMNS)[None, :] == 0, x[:, None], 0.0)


@device
def store_sum(base, row, x, D: tl.constexpr):
    tl.store(base + row, tl.sum(x, 1), mask=row < D)


@device
def column(live, NARROW: tl.constexpr):
    """[T, COLUMNS]: in the first column ones where a token is live. φᵀ times it adds features up, as φᵀ v does.

    A sum is then one more product, at tensor cores' speed, in the registers where the products are: added up as a
    vector beside S it took 100 registers of each thread more.
    """
    first = tl.arange(0, COLUMNS)[None, :] == 0
    return tl.where(first & live[:, None], 1.0, 0.0).to(NARROW)


@device
def digits(x, NARROW: tl.constexpr):
    """[T, COLUMNS]: a vector of float32 as a sum of two columns, so that a product loses nothing of it to bfloat16."""
    high = x.to(NARROW)
    low = (x - high.to(tl.float32)).to(NARROW)
    number = tl.arange(0, COLUMNS)[None, :]
    return tl.where(number == 0, high[:, None], tl.where(number == 1, low[:, None], 0.0).to(NARROW))


@device
def divisor(den, eps, EPS: tl.constexpr):
    """What a weighted sum is divided by (equation 4): infinite where nothing was seen."""
    if EPS:
        den = tl.where(den < 0, -1.0, 1.0) * tl.maximum(tl.abs(den), eps)
    return tl.where(den == 0, float("inf"), den)
