"""From a call of the operator to its kernels: how long sequences are cut, what is kept for the backward pass, launches.

Whether and how a sequence is cut into segments follows from shapes alone, so that the backward pass comes to the same
answer as the forward pass, and nothing is ever read from the device.

Axes:  B batch   T time of queries   U time of keys   H heads   K key/value heads   D features   M values   R sequences
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from linattn._typing import Tensor
from linattn.ops.form import Batch, Form
from linattn.ops.triton.forward import forward as forward_kernel
from linattn.ops.triton.launch import INTERPRETED, block, launch, multiprocessors, stand_in
from linattn.ops.triton.parts import dkv_kernel, dq_kernel
from linattn.ops.triton.sums import scan as scan_kernel
from linattn.ops.triton.sums import sums as sums_kernel
from linattn.ops.triton.sweep import sweep as sweep_kernel
from linattn.ops.triton.table import filling, tile, widest_sweep
from linattn.state import State

SHORT = 512  # up to here the sweep makes its own sums: reading keys twice costs less than keeping states
REWIND = 4096  # tokens over which a state may be run backwards: the rounding of its sums then stays below bfloat16's
WHOLE = 1 << 30  # a segment that no sequence outgrows


class Saved(NamedTuple):
    """What the backward pass needs besides the inputs and the output; None where there is no use for it.

    den (B, H, T); center (R, K, M); kv (N, K, D, M) and z (N, K, D): sums at the ends of segments, or of all keys.
    """

    den: Tensor | None
    center: Tensor | None
    kv: Tensor | None
    z: Tensor | None


NOTHING = Saved(None, None, None, None)


@dataclass(frozen=True)
class Plan:
    """What shapes decide. seg: tokens of a segment; split: a program has one segment, not a whole sequence; ends: the
    sums at the ends of segments are kept for the backward pass; sweep: which form that takes."""

    seg: int
    split: bool
    ends: bool
    sweep: bool


@functools.lru_cache(maxsize=4096)
def plan(rows: int, heads: int, time: int, size: int, half: bool, packed: bool, cores: int) -> Plan:
    """For sequences of at most `time` tokens (packed: in all), features and values of at most `size`; half: 16 bits."""
    sweep = half and block(size) <= widest_sweep()  # float32 is rewound too coarsely: see sweep.py
    fill = filling("forward", size)
    wanted, most = fill.programs * cores, REWIND if sweep else WHOLE
    split = rows * heads < 0.75 * wanted and time >= 2 * fill.tokens
    if not split:
        ends = sweep and time > SHORT
        return Plan(REWIND if ends else WHOLE, False, ends, sweep)
    pieces = max(2, wanted // (rows * heads)) * (rows if packed else 1)
    seg = max(fill.tokens, -(-time // pieces))
    return Plan(min(most, -(-seg // 128) * 128), True, True, sweep)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Form,
    state: State | None,
    batch: Batch,
    want_state: bool,
    keep: bool,
) -> tuple[Tensor, State | None, Saved]:
    """Outputs, the state after the last key where it is wanted, and with `keep` what the backward pass needs."""
    call = _Call(q, k, v, form, batch)
    zeros_or_empty = torch.zeros if batch.packed else torch.empty  # places that belong to no sequence
    out = zeros_or_empty(*q.shape[:3], call.M, dtype=v.dtype, device=q.device)
    saved = call.saved(keep)
    den, center = saved.den, saved.center
    start = _whole_sums(state)
    plan = call.plan
    if not form.causal:
        part_kv, part_z = call.parts(call.keys, call.K)
        _sums(call, call.keys, part_kv, part_z)
        totals = call.totals(call.K)
        _scan(call, call.keys, call.K, (part_kv, part_z), None, start, totals, center, False, reverse=False)
        _forward(call, out, den, totals, None, None, None, added=False)
        if not want_state:
            return out, None, Saved(den, center, *totals) if keep else NOTHING
        copies = (None if x is None else x.clone() for x in totals)  # an output of autograd is one thing only
        return out, _state(*totals), Saved(den, center, *copies) if keep else NOTHING

    ends = None
    if plan.split:
        part_kv, part_z = call.parts(call.keys, call.K)
        _sums(call, call.keys, part_kv, part_z)
        totals, sums_z = call.totals(call.K), torch.empty_like(part_z) if part_z is not None else None
        _scan(call, call.keys, call.K, (part_kv, part_z), sums_z, start, totals, center, True, reverse=False)
        ends = (part_kv, sums_z)
        _forward(call, out, den, start, None, ends, None, added=False)
        return out, _state(*totals) if want_state else None, Saved(den, center, *ends) if keep else NOTHING

    added = state is not None and want_state and q.shape[1] <= call.tile("forward").tokens
    totals = call.totals(call.K) if want_state else None
    if keep and plan.ends:
        ends = call.parts(call.keys, call.K)
    _forward(call, out, den, start, totals, ends, center, added)
    end = None
    if totals is not None:
        end = state.plus(*totals) if added and state is not None else _state(*totals)
    return out, end, Saved(den, center, *(ends or (None, None))) if keep else NOTHING


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Form,
    state: State | None,
    batch: Batch,
    dout: Tensor | None,
    dkv: Tensor | None,
    dz: Tensor | None,
    out: Tensor,
    *kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the state's kv and z, from those of the output and of the final state."""
    call, saved = _Call(q, k, v, form, batch), Saved(*kept)
    do = _readable(torch.zeros_like(out) if dout is None else dout.to(v.dtype))
    later = _incoming(call, dkv, dz, saved.center)
    make = torch.zeros_like if batch.packed else torch.empty_like
    dq = make(call.q, memory_format=torch.contiguous_format)
    wanted = state is not None
    if form.causal:
        dk, dv = (call.gradient(x, call.H) for x in (call.k, call.v))
        dstate = _causal_backward(call, do, out, saved, _whole_sums(state), later, (dq, dk, dv), wanted)
        dk, dv = call.grouped(dk, k), call.grouped(dv, v)
    else:
        dk, dv = (call.gradient(x, call.K) for x in (call.k, call.v))
        dstate = _full_backward(call, do, out, saved, later, (dq, dk, dv))
    if not wanted or dstate is None:
        return dq, dk, dv, None, None
    return dq, dk, dv, *_outgoing(call, *dstate, saved.center)


def kept(q: Tensor, k: Tensor, v: Tensor, form: Form, batch: Batch) -> Saved:
    """Blanks of what `forward` keeps."""
    call = _Call(q, k, v, form, batch)
    saved = call.saved(keep=True)
    if not form.causal:
        return saved._replace(**dict(zip(("kv", "z"), call.totals(call.K), strict=True)))
    if not call.plan.ends:
        return saved
    return saved._replace(**dict(zip(("kv", "z"), call.parts(call.keys, call.K), strict=True)))


def _causal_backward(call: _Call, do, out, saved: Saved, start, later, grads, wanted: bool):
    """-> the gradients of the sums before the first token, per query head."""
    plan, later_parts, dstate = call.plan, None, None
    if plan.split:
        part_kv, part_z = call.parts(call.queries, call.H)
        _sums(call, call.queries, part_kv, part_z, do, out, saved)
        dstate, totals_z = call.totals(call.H), torch.empty_like(part_z) if part_z is not None else None
        _scan(call, call.queries, call.H, (part_kv, part_z), totals_z, later, dstate, None, True, reverse=True)
        later_parts = (part_kv, totals_z)
    elif wanted:
        dstate = call.totals(call.H)
    leaves = None if plan.split else dstate
    if plan.sweep:
        _sweep(call, do, saved, start, later, later_parts, grads, leaves)
    else:
        e = torch.empty_like(saved.den) if saved.den is not None else None
        _dq(call, do, out, saved, start, e, grads[0])
        _dkv(call, do, saved, e, later, later_parts, grads, leaves)
    return dstate


def _full_backward(call: _Call, do, out, saved: Saved, later, grads):
    """All keys for every query: gradients of the sums from all queries, then those of keys and values from the sums."""
    e = torch.empty_like(saved.den) if saved.den is not None else None
    _dq(call, do, out, saved, (saved.kv, saved.z), e, grads[0])
    part_kv, part_z = call.parts(call.queries, call.H)
    _sums(call, call.queries, part_kv, part_z, do, out, saved)
    dstate = call.totals(call.H)
    _scan(call, call.queries, call.H, (part_kv, part_z), None, later, dstate, None, False, reverse=True)
    shared = tuple(None if x is None else x.unflatten(1, (call.K, -1)).sum(2) for x in dstate)
    _dkv(call, do, saved, e, shared if call.G > 1 else dstate, None, grads, None)
    return dstate


class _Call:
    """The operands as kernels read them, and what follows from their shapes."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, form: Form, batch: Batch):
        self.q, self.k, self.v, self.form = _readable(q), _readable(k), _readable(v), form
        self.H, self.K, self.D, self.M = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        self.G = self.H // self.K
        self.device = q.device
        self.rows = batch.num_rows(k)
        self.narrow = v.dtype == torch.bfloat16
        size = max(self.D, self.M)
        cores = multiprocessors(q.device)
        time = max(q.shape[1], k.shape[1])
        self.plan = plan(self.rows, self.H, time, size, v.dtype.itemsize == 2, batch.packed, cores)
        if not form.causal:
            seg = 512 if time > 512 else 128
            self.plan = Plan(seg, True, True, False)
        self.centered = form.normalize and form.eps is None
        cuts_q = batch.cu_seqlens if batch.cu_seqlens_q is None else batch.cu_seqlens_q
        q_lengths = batch.lengths if form.causal else batch.q_lengths
        self.keys = _Geometry.of(k.shape[1], self.rows, batch.cu_seqlens, batch.lengths, self.plan.seg)
        self.queries = _Geometry.of(q.shape[1], self.rows, cuts_q, q_lengths, self.plan.seg)
        # tf32 once where torch's own products may use it, and where float16 is all that there is to lose; else in three
        single = v.dtype == torch.float16 or torch.backends.cuda.matmul.allow_tf32
        # the interpreter multiplies bfloat16 as the integers that it keeps them in
        tiles = tl.bfloat16 if self.narrow and not INTERPRETED else tl.float32
        self.products = (tiles, "tf32" if self.narrow or single else "tf32x3")
        self.root, self.eps = math.sqrt(form.scale), 0.0 if form.eps is None else form.eps

    def tile(self, kernel: str):
        return tile(kernel, self.narrow, block(self.D), block(self.M))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def parts(self, geometry: _Geometry, heads: int) -> tuple[Tensor, Tensor | None]:
        """Sums for each unit."""
        kv = self.empty(geometry.units, heads, self.D, self.M)
        return kv, self.empty(geometry.units, heads, self.D) if self.form.normalize else None

    def totals(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """Sums for each sequence."""
        kv = self.empty(self.rows, heads, self.D, self.M)
        return kv, self.empty(self.rows, heads, self.D) if self.form.normalize else None

    def saved(self, keep: bool) -> Saved:
        """Room for what every forward pass keeps."""
        den = self.empty(self.q.shape[0], self.H, self.q.shape[1]) if keep and self.form.normalize else None
        center = None
        if keep and self.centered:  # any c is exact; values less a c in their own dtype take half the instructions
            dtype = torch.bfloat16 if self.narrow else torch.float32
            center = torch.empty(self.rows, self.K, self.M, dtype=dtype, device=self.device)
        return Saved(den, center, None, None)

    def gradient(self, x: Tensor, heads: int) -> Tensor:
        """Room for the gradient of keys or values; in float32 where several query heads are to be added up."""
        dtype = x.dtype if heads == x.shape[2] else torch.float32
        make = torch.zeros if self.keys.layout == "packed" else torch.empty
        return make(x.shape[0], x.shape[1], heads, x.shape[3], dtype=dtype, device=x.device)

    def grouped(self, x: Tensor, like: Tensor) -> Tensor:
        return x if self.G == 1 else x.unflatten(2, (self.K, self.G)).sum(3).to(like.dtype)


class _Geometry(NamedTuple):
    """Where sequences lie in a tensor (see tiles.py)."""

    time: int
    rows: int
    lengths: Tensor | None
    layout: str
    seg: int
    units: int

    @staticmethod
    def of(time: int, rows: int, cuts: Tensor | None, lengths: Tensor | None, seg: int) -> _Geometry:
        if cuts is not None:
            return _Geometry(time, rows, cuts, "packed", seg, time // seg + rows)
        layout = "plain" if lengths is None else "padded"
        return _Geometry(time, rows, lengths, layout, seg, rows * -(-time // seg))


def _forward(call: _Call, out, den, start, totals, ends, center, added: bool) -> None:
    form, where, size = call.form, call.queries, call.tile("forward")
    BD, BM = block(call.D), _part(size.block, block(call.M))
    blocks = -(-call.M // BM)
    none, split = stand_in(call.device), call.plan.split
    kv_in, z_in = start or (none, none)
    kv_end, z_end = totals or (none, none)
    ends_kv, ends_z = ends or (none, none)
    q, k, v = call.q, call.k, call.v
    operands = (q, k, v, out, den, kv_in, z_in, kv_end, z_end, center, ends_kv, ends_z, where.lengths)
    aligned = _aligned(q, k, v)
    constants = (call.D, call.M, BD, BM, size.tokens, blocks, form.feature_map.name, form.causal, form.normalize)
    constants += (form.eps is not None, where.layout, split, aligned, start is not None, totals is not None)
    constants += (den is not None, center is not None, ends is not None and not split, added)
    launch(
        forward_kernel,
        (where.units if split else where.rows) * call.H * blocks,
        (*_filled(operands, none), *_strides(q, k, v), *_sizes(call, where, call.H, call.G)),
        (*constants, *call.products, size.stages),
        size.warps,
    )


def _sums(call: _Call, where: _Geometry, part_kv, part_z, do=None, out=None, saved: Saved = NOTHING) -> None:
    """Of keys and values; or with `do`, of queries and the gradient of the output."""
    form, size = call.form, call.tile("sums")
    gradient = do is not None
    x, y = (call.q, do) if gradient else (call.k, call.v)
    heads = call.H if gradient else call.K
    BD, BM = block(call.D), _part(size.block, block(call.M))
    blocks = -(-call.M // BM)
    operands = (x, y, out, saved.den, saved.center, part_kv, part_z, where.lengths)
    constants = (call.D, call.M, BD, BM, block(call.M), size.tokens, blocks, form.feature_map.name, gradient)
    constants += (form.normalize, form.eps is not None, saved.center is not None, where.layout, _aligned(x, y))
    launch(
        sums_kernel,
        where.units * heads * blocks,
        (
            *_filled(operands, stand_in(call.device)),
            *_strides(x, y),
            *_sizes(call, where, heads, call.G if gradient else 1),
        ),
        (*constants, *call.products, size.stages),
        size.warps,
    )


def _scan(
    call: _Call, where: _Geometry, heads: int, parts, total_z, start, totals, center, running: bool, reverse: bool
) -> None:
    BD, BM = block(call.D), 8
    units = max(1, 4096 // (BD * BM))
    kv_in, z_in = start or (None, None)
    operands = (*parts, parts[1] if total_z is None else total_z, kv_in, z_in, *totals, center, where.lengths)
    constants = (call.D, call.M, BD, BM, units, call.form.normalize, reverse, start is not None)
    launch(
        scan_kernel,
        where.rows * heads * -(-call.M // BM),
        (*_filled(operands, stand_in(call.device)), where.time, where.rows, heads, where.seg),
        (*constants, running, center is not None, where.layout),
        4,
    )


def _sweep(call: _Call, do, saved: Saved, start, later, later_parts, grads, leaves) -> None:
    form, where, size, split = call.form, call.keys, call.tile("sweep"), call.plan.split
    none = stand_in(call.device)
    q, k, v = call.q, call.k, call.v
    operands = (q, k, v, do, saved.den, saved.center, saved.kv, saved.z, *(start or (none, none)))
    operands += (*(later_parts or (none, none)), *(later or (none, none)), *grads, *(leaves or (none, none)))
    constants = (call.D, call.M, block(call.D), block(call.M), size.tokens, form.feature_map.name, form.normalize)
    constants += (form.eps is not None, saved.center is not None, where.layout, split, _aligned(q, k, v, do))
    constants += (saved.kv is not None, start is not None, later is not None, leaves is not None)
    launch(
        sweep_kernel,
        (where.units if split else where.rows) * call.H,
        (
            *_filled((*operands, where.lengths), none),
            *_strides(q, k, v, do),
            *_sizes(call, where, call.H, call.G),
        ),
        (*constants, *call.products, size.stages),
        size.warps,
    )


def _dq(call: _Call, do, out, saved: Saved, start, e, dq) -> None:
    form, where, size, split = call.form, call.queries, call.tile("dq"), call.plan.split
    none = stand_in(call.device)
    q, k, v = call.q, call.k, call.v
    BD, BM = block(call.D), block(call.M)
    BF = _part(size.block, BD)
    blocks = -(-call.D // BF)
    ends = (saved.kv, saved.z) if split and form.causal else (none, none)
    operands = (q, k, v, do, out, saved.den, e, saved.center, *ends, *(start or (none, none)), dq, where.lengths)
    constants = (call.D, call.M, BD, BM, BF, size.tokens, blocks, form.feature_map.name, form.causal, form.normalize)
    constants += (form.eps is not None, saved.center is not None, where.layout, split, _aligned(q, k, v, do))
    launch(
        dq_kernel,
        (where.units if split else where.rows) * call.H * blocks,
        (*_filled(operands, none), *_strides(q, k, v, do), *_sizes(call, where, call.H, call.G)),
        (*constants, start is not None, *call.products, size.stages),
        size.warps,
    )


def _dkv(call: _Call, do, saved: Saved, e, later, later_parts, grads, leaves) -> None:
    """dk and dv at once where one state fits a program, else one after the other."""
    form, where, size, split = call.form, call.keys, call.tile("dkv"), call.plan.split
    none = stand_in(call.device)
    q, k, v = call.q, call.k, call.v
    BD, BM = block(call.D), block(call.M)
    heads, group = (call.H, call.G) if form.causal else (call.K, 1)
    operands = (q, k, v, do, saved.den, e, saved.center, *(later_parts or (none, none)), *(later or (none, none)))
    operands += (*grads[1:], *(leaves or (none, none)), where.lengths)
    aligned = _aligned(q, k, v, do)
    whole = not size.block or size.block >= max(BD, BM)
    for keys, values in ((True, True),) if whole else ((True, False), (False, True)):
        BF, BV = BD if values else min(size.block, BD), BM if keys else min(size.block, BM)
        blocks = 1 if keys and values else -(-call.D // BF) if keys else -(-call.M // BV)
        constants = (call.D, call.M, BD, BM, BF, BV, size.tokens, blocks, keys, values, form.feature_map.name)
        constants += (form.causal, form.normalize, form.eps is not None, saved.center is not None, where.layout, split)
        constants += (aligned, later is not None, leaves is not None)
        launch(
            dkv_kernel,
            (where.units if split else where.rows) * heads * blocks,
            (*_filled(operands, none), *_strides(q, k, v, do), *_sizes(call, where, heads, group)),
            (*constants, *call.products, size.stages),
            size.warps,
        )


def _readable(x: Tensor) -> Tensor:
    """x with its last axis contiguous and beginning on 16 bytes: a copy where it is not."""
    if x.stride(3) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _aligned(*tensors: Tensor) -> bool:
    return not any(s % 8 for x in tensors for s in x.stride()[:3])


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def _sizes(call: _Call, where: _Geometry, heads: int, group: int) -> tuple[Any, ...]:
    return where.time, where.rows, heads, group, where.seg, call.root, call.eps


def _filled(operands: tuple[Tensor | None, ...], none: Tensor) -> tuple[Tensor, ...]:
    return tuple(none if x is None else x for x in operands)


def _part(given: int, whole: int) -> int:
    return min(given, whole) if given else whole


def _whole_sums(state: State | None) -> tuple[Tensor, Tensor | None] | None:
    """The sums with their low parts added, contiguous."""
    if state is None:
        return None
    kv = state.kv if state.kv_low is None else state.kv + state.kv_low
    z = state.z if state.z is None or state.z_low is None else state.z + state.z_low
    return _dense(kv), None if z is None else _dense(z)


def _state(kv: Tensor, z: Tensor | None) -> State:
    return State(kv, z).with_low_parts()


def _incoming(call: _Call, dkv: Tensor | None, dz: Tensor | None, center: Tensor | None):
    """The gradient of the final sums for each query head (the first of a group has it), dz counted from the center."""
    if dkv is None and dz is None:
        return None
    kv, z = call.totals(call.K)
    kv = torch.zeros_like(kv) if dkv is None else dkv.float()
    if z is not None:
        z = torch.zeros_like(z) if dz is None else dz.float()
        if center is not None:
            z = z + (kv @ center.float()[..., None])[..., 0]
    if call.G > 1:
        kv, z = (None if x is None else _to_first(x, call.G) for x in (kv, z))
    return tuple(None if x is None else _dense(x) for x in (kv, z))


def _dense(x: Tensor) -> Tensor:
    """x contiguous and beginning on 16 bytes, which a gradient that is a slice of another need not be."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _to_first(x: Tensor, group: int) -> Tensor:
    spread = x.new_zeros(x.shape[0], x.shape[1], group, *x.shape[2:])
    spread[:, :, 0] = x
    return spread.flatten(1, 2)


def _outgoing(call: _Call, dkv: Tensor, dz: Tensor | None, center: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gradient of the first sums: over all heads of a group, dz counted from 0 again."""
    if call.G > 1:
        dkv = dkv.unflatten(1, (call.K, call.G)).sum(2)
        dz = None if dz is None else dz.unflatten(1, (call.K, call.G)).sum(2)
    if dz is not None and center is not None:
        dz = dz - (dkv @ center.float()[..., None])[..., 0]
    return dkv, dz
