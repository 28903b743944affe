"""The door to the native CPU library (csrc/): loads it, says whether it can run, and wraps its calls.

The library has a plain C interface and checks nothing: every size and stride is checked here, before the call. ctypes
releases the GIL while a call runs. LINATTN_ISA in the environment forces an instruction set, for tests.

Axes:  B batch   T time of queries   U time of keys   H heads   K key/value heads   D features   M values
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from pathlib import Path

import torch

from linattn._typing import Tensor
from linattn.ops.form import Batch, Form
from linattn.state import State

ABI_VERSION = 1  # csrc/linattn.h
MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "softplus": 3, "exp": 4, "identity": 5}  # in the order of its enum
DTYPES = (torch.float32, torch.bfloat16)
CALL = struct.Struct("@26q2d24q")  # linattn_attention in csrc/linattn.h: sizes, strides, options; numbers; pointers
NAMES = ("_native.so", "_native.dylib", "_native.dll")
PLAIN = (torch.Tensor, torch.nn.Parameter)


def status() -> tuple[bool, str]:
    """Whether the library can run on this machine, and why not (or what it is)."""
    if LIBRARY is None:
        return False, REASON
    return True, f"native CPU library, {LIBRARY.linattn_isa().decode()} instructions"


def library() -> ctypes.CDLL:
    """The library, where `status` says that it can run."""
    if LIBRARY is None:
        raise ValueError(f"the native CPU library cannot run here: {REASON}")
    return LIBRARY


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """What keeps the library from running a call of q features and v; None where nothing does."""
    if LIBRARY is None:
        return REASON
    if q.device.type != "cpu":
        return f"it runs on the CPU, and q is on {q.device}"
    if q.dtype not in DTYPES or v.dtype not in DTYPES:  # features of a map that is not fused are float32
        return f"it takes float32 and bfloat16, and the inputs are {v.dtype}"
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return "it reads the memory of plain tensors, and these are others (fake ones, perhaps)"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, form: Form, state: State | None, batch: Batch, want_state: bool
) -> tuple[Tensor, State | None]:
    """The output, and the state after the last key where it is wanted."""
    blank, shape = _blank(batch), (*q.shape[:3], v.shape[3])
    out = blank(v) if v.shape == shape else blank(v.new_empty(1).expand(shape))
    end = (None,) * 4
    if want_state:
        shape = (batch.num_rows(k), k.shape[2], q.shape[3], v.shape[3])
        shapes = (shape, shape[:3] if form.normalize else None) * 2
        end = tuple(None if shape is None else torch.empty(shape) for shape in shapes)
    _run("forward", q, k, v, form, state, batch, (out, *end), (None,) * 8)
    return out, State(*end) if want_state else None  # type: ignore[arg-type]


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the state's kv and z, from those of the output and of the final state."""
    blank = _blank(batch)
    grads = (blank(q), blank(k), blank(v))
    start = (None, None)
    if state is not None:
        start = (torch.empty(state.kv.shape), None if state.z is None else torch.empty(state.z.shape))
    if dout is not None:
        dout = _rows(dout)
    shape = (batch.num_rows(k), k.shape[2], q.shape[3], v.shape[3])
    dz = dz if form.normalize else None
    ends = tuple(None if x is None else x.float().contiguous() for x in (dkv, dz))
    _check(all(x is None or x.shape == size for x, size in zip(ends, (shape, shape[:3]), strict=True)), *ends)
    _run("backward", q, k, v, form, state, batch, (None,) * 5, (dout, *ends, *grads, *start))
    return *grads, *start  # type: ignore[return-value]


def feature_map(name: str, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """φ(√scale·x) and its derivative there, as the library computes them (fp32, contiguous): for tests."""
    if name not in MAPS or x.dtype != torch.float32 or not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(f"needs one of {', '.join(MAPS)} and contiguous fp32 on the CPU, got {name!r}, {x.dtype}")
    y, slope = torch.empty_like(x), torch.empty_like(x)
    library().linattn_feature_map(
        MAPS[name], scale**0.5, x.data_ptr(), y.data_ptr(), slope.data_ptr(), x.numel(), torch.get_num_threads()
    )
    return y, slope


def _run(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: Form,
    state: State | None,
    batch: Batch,
    made: tuple[Tensor | None, ...],  # out, kv, z, kv_low, z_low
    gradients: tuple[Tensor | None, ...],  # dout, dkv, dz of the state returned, dq, dk, dv, dkv, dz of the one given
) -> None:
    reason = why_not(q, k, v)
    if reason is not None:
        raise ValueError(f"the native CPU library cannot run this call: {reason}")
    q, k, v = _rows(q), _rows(k), _rows(v)
    (B, T, H, D), (_, U, K, _), M = q.shape, k.shape, v.shape[3]
    rows, dout = batch.num_rows(k), gradients[0]
    _check(k.shape == (B, U, K, D) and v.shape == (B, U, K, M) and q.dtype == k.dtype and H % max(K, 1) == 0, q, k, v)
    _check(dout is None or (dout.shape == (B, T, H, M) and dout.dtype == v.dtype and dout.device == v.device), dout, v)
    sums = _sums(state, (rows, K, D, M), form)
    marks = _marks(batch, B, rows)
    strides = (0, 0, 0) if dout is None else dout.stride()[:3]
    pointers = [0 if x is None else x.data_ptr() for x in (q, k, v, *sums, *marks, *made, *gradients)]
    packed = CALL.pack(
        *(B, T, U, H, K, D, M, rows),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides),
        *(MAPS[form.feature_map.name], form.causal, form.normalize, torch.get_num_threads()),
        *(q.dtype == torch.bfloat16, v.dtype == torch.bfloat16),
        *(math.sqrt(form.scale), -1.0 if form.eps is None else form.eps),
        *pointers,
    )
    if getattr(library(), f"linattn_attention_{name}")(packed) != 0:
        raise MemoryError(f"the native CPU library could not get its working memory for {tuple(q.shape)}")


def _check(holds: object, *tensors: Tensor | None) -> None:
    """What the library relies on. Not an assert, which `python -O` would drop: it reads memory by these numbers."""
    if not holds:
        seen = ", ".join("None" if x is None else f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        raise ValueError(f"the native CPU library was called with tensors that do not belong together: {seen}")


def _blank(batch: Batch):
    """Makes a contiguous tensor like another. Padding, and what lies between packed sequences, is not written to."""
    return _empty_like if _whole(batch) else _zeros_like


def _whole(batch: Batch) -> bool:
    return batch.lengths is None and batch.q_lengths is None and batch.cu_seqlens is None


_empty_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
_zeros_like = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    """x, copied where the numbers of a row do not lie side by side."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _sums(state: State | None, shape: tuple[int, ...], form: Form) -> tuple[Tensor | None, ...]:
    if state is None:
        return (None,) * 4
    given = (state.kv, state.z, state.kv_low, state.z_low)
    for x, size in zip(given, (shape, shape[:3]) * 2, strict=True):
        _check((x is None) == (len(size) == 3 and not form.normalize), *given)  # z belongs to a normaliser
        _check(x is None or (x.shape == size and x.dtype == torch.float32 and x.device.type == "cpu"), *given)
    return tuple(None if x is None else x.contiguous() for x in given)


def _marks(batch: Batch, B: int, rows: int) -> tuple[Tensor | None, ...]:
    if _whole(batch):
        return (None,) * 4
    counts = (B, B, rows + 1, rows + 1)
    marks = (batch.lengths, batch.q_lengths, batch.cu_seqlens, batch.cu_seqlens_q)
    return tuple(_cuts(x, count) for x, count in zip(marks, counts, strict=True))


def _cuts(x: Tensor | None, count: int) -> Tensor | None:
    if x is None:
        return None
    _check(x.shape == (count,) and x.device.type == "cpu", x)
    return x.to(torch.int64).contiguous()


def _load() -> tuple[ctypes.CDLL | None, str]:
    found = [path for path in (Path(__file__).with_name(name) for name in NAMES) if path.exists()]
    if not found:
        return None, "it was not built: no compiler was found when linattn was installed, and no wheel brought it along"
    try:
        loaded = ctypes.CDLL(str(found[0]))
        version = loaded.linattn_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{found[0].name} could not be loaded ({error}): reinstall linattn"
    if version != ABI_VERSION:
        return None, f"{found[0].name} is of another version ({version}, expected {ABI_VERSION}): reinstall linattn"
    _declare(loaded)
    wanted = os.environ.get("LINATTN_ISA", "")
    if loaded.linattn_choose(wanted.encode()) != 0:
        names = loaded.linattn_available().decode().replace(" ", ", ")
        return None, f"LINATTN_ISA={wanted!r} is not available on this machine: unset it, or choose one of {names}"
    return loaded, ""


def _declare(loaded: ctypes.CDLL) -> None:
    i32, i64, f32, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    loaded.linattn_available.restype = loaded.linattn_isa.restype = ctypes.c_char_p
    loaded.linattn_choose.argtypes = [ctypes.c_char_p]
    loaded.linattn_feature_map.argtypes = [i32, f32, pointer, pointer, pointer, i64, i32]
    loaded.linattn_attention_forward.argtypes = loaded.linattn_attention_backward.argtypes = [ctypes.c_char_p]


LIBRARY, REASON = _load()  # a millisecond; and torch.compile, which chooses an implementation too, sees two constants
