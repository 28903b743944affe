"""What a call of the operator must look like, and what is said when it does not.

Shapes, dtypes and devices are checked at every call. The values of lengths and cu_seqlens are checked where that costs
no synchronisation: lists, and CPU tensors in eager mode; elsewhere `linattn.check` does it on request.

Axes:  B batch   T time of queries   U time of keys   H heads   K key/value heads   D key width   C features   M values
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from linattn._typing import Tensor
from linattn.features import FeatureMap
from linattn.ops.form import Batch, sum_dtype
from linattn.state import State

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Lengths = Tensor | Sequence[int] | None


def check_operands(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    if not _plainly_fit(q, k, v):
        _check_each(q, k, v, causal)


def _plainly_fit(q: object, k: object, v: object) -> bool:
    """The commonest case in one go, since each question costs a call some of its time: equal shapes, nothing empty."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    shape = q.shape
    if len(shape) != 4 or k.shape != shape or v.shape != shape or shape[2] == 0 or shape[3] == 0:
        return False
    return q.dtype in DTYPES and q.dtype == k.dtype == v.dtype and q.device == k.device == v.device


def _check_each(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor (batch, time, heads, width), got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 axes (batch, time, heads, width), got {x.dim()}: {tuple(x.shape)}. "
                f"Note the order: time comes before heads"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}: cast it first")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them to one")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}: move them")
    _check_shapes(q, k, v, causal)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    shapes = f"found q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, time and heads; {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch; {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same width (their features are multiplied); {shapes}")
    if q.shape[3] == 0 or v.shape[3] == 0 or q.shape[2] == 0 or k.shape[2] == 0:
        raise ValueError(f"heads and widths must be at least 1; {shapes}")
    if q.shape[2] % k.shape[2]:
        heads = f"{q.shape[2]} % {k.shape[2]} != 0"
        raise ValueError(f"query heads must be a multiple of key/value heads: {heads}; {shapes}")
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"causal=True is self-attention: q and k must have the same time; {shapes}. "
            f"For cross-attention pass causal=False"
        )


def check_scale(scale: float | None, eps: float | None) -> None:
    for name, x in (("scale", scale), ("eps", eps)):
        if x is None:
            continue
        if isinstance(x, bool) or not isinstance(x, (int, float)):
            raise ValueError(f"{name} must be a number or None, got {type(x).__name__} {x!r}")
        if not (x > 0 and math.isfinite(x)):
            raise ValueError(f"{name} must be positive and finite, got {x}")


def check_signed(feature_map: FeatureMap, normalize: bool, eps: float | None) -> None:
    if normalize and eps is None and feature_map.kind == "signed":
        raise ValueError(
            f"the feature map {feature_map.name!r} is signed: its weights may sum to 0, so normalize=True needs eps= "
            f"(the least size of the sum, for example eps=1e-3); or pass normalize=False"
        )
    if not normalize and eps is not None:
        raise ValueError(f"eps={eps} bounds the normaliser, but normalize=False: drop one of them")


def check_state(state: State, q: Tensor, k: Tensor, v: Tensor, features: int, rows: int, normalize: bool) -> None:
    if not isinstance(state, State):
        raise ValueError(f"state must be a linattn.State, got {type(state).__name__}")
    kv = state.kv
    want = (rows, k.shape[2], features, v.shape[3])
    if tuple(kv.shape) != want:
        raise ValueError(
            f"state.kv must be (batch or packed sequences, key/value heads, features, values) = {want} for these "
            f"operands, got {tuple(kv.shape)}: was the state made with another feature map or another batch?"
        )
    if kv.dtype != sum_dtype(q.dtype):
        raise ValueError(f"state.kv must be {sum_dtype(q.dtype)} for {q.dtype} inputs, got {kv.dtype}")
    if kv.device != q.device:
        raise ValueError(f"state is on {kv.device} and q on {q.device}: use state.to({str(q.device)!r})")
    if normalize != (state.z is not None):
        has, wants = ("no z", "one with z") if normalize else ("a z", "one without")
        raise ValueError(
            f"normalize={normalize} needs {wants}, this state has {has}: states of normalised and unnormalised "
            f"attention do not mix"
        )
    for name, x, shape in (("z", state.z, want[:3]), ("kv_low", state.kv_low, want), ("z_low", state.z_low, want[:3])):
        if x is not None and (tuple(x.shape) != shape or x.dtype != kv.dtype or x.device != kv.device):
            raise ValueError(
                f"state.{name} must be {shape} {kv.dtype} on {kv.device}, like kv; "
                f"got {tuple(x.shape)} {x.dtype} on {x.device}"
            )


def read_batch(
    q: Tensor, k: Tensor, causal: bool, lengths: Lengths, q_lengths: Lengths, cu_seqlens: Lengths, cu_seqlens_q: Lengths
) -> Batch:
    """Checked tensors on q's device."""
    if lengths is None and q_lengths is None and cu_seqlens is None and cu_seqlens_q is None:
        return NO_BATCH
    if cu_seqlens_q is not None and cu_seqlens is None:
        raise ValueError("cu_seqlens_q (queries) was given without cu_seqlens (keys and values): pass both")
    if cu_seqlens is not None and (lengths is not None or q_lengths is not None):
        raise ValueError("lengths (a padded batch) and cu_seqlens (a packed one) were both given: pass one of them")
    for name, x in (("q_lengths", q_lengths), ("cu_seqlens_q", cu_seqlens_q)):
        if causal and x is not None:
            raise ValueError(f"{name} is for causal=False: with causal=True queries and keys are the same tokens")
    if cu_seqlens is not None:
        return _read_packed(q, k, cu_seqlens, cu_seqlens_q)
    return Batch(
        None if lengths is None else _read_lengths("lengths", lengths, k, q.device),
        None if q_lengths is None else _read_lengths("q_lengths", q_lengths, q, q.device),
    )


NO_BATCH = Batch()


def _read_packed(q: Tensor, k: Tensor, cu_seqlens: Lengths, cu_seqlens_q: Lengths) -> Batch:
    if q.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens describes sequences packed into one row: batch must be 1, got {q.shape[0]}. "
            f"For a padded batch pass lengths"
        )
    if cu_seqlens_q is None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} packed tokens and k {k.shape[1]}: cross-attention between packed batches needs "
            f"cu_seqlens_q"
        )
    keys = _read_cuts("cu_seqlens", cu_seqlens, k, q.device)
    if cu_seqlens_q is None:
        return Batch(cu_seqlens=keys)
    queries = _read_cuts("cu_seqlens_q", cu_seqlens_q, q, q.device)
    if keys.shape != queries.shape:
        raise ValueError(
            f"cu_seqlens has {keys.shape[0] - 1} sequences and cu_seqlens_q {queries.shape[0] - 1}: they must pair up"
        )
    return Batch(cu_seqlens=keys, cu_seqlens_q=queries)


def _read_lengths(name: str, lengths: Lengths, x: Tensor, device: torch.device) -> Tensor:
    tensor = _integers(name, lengths)
    if tensor.shape != (x.shape[0],):
        raise ValueError(f"{name} must hold one length per row, shape ({x.shape[0]},), got shape {tuple(tensor.shape)}")
    if _readable(tensor):
        check_lengths(name, tensor, x.shape[1])
    return tensor.to(device)


def _read_cuts(name: str, cuts: Lengths, x: Tensor, device: torch.device) -> Tensor:
    tensor = _integers(name, cuts)
    if tensor.dim() != 1 or tensor.shape[0] < 1:
        raise ValueError(
            f"{name} must be one axis of cumulative lengths that begins with 0, (sequences + 1,), "
            f"got {tuple(tensor.shape)}"
        )
    if _readable(tensor):
        check_cuts(name, tensor, x.shape[1])
    return tensor.to(device)


def _integers(name: str, given: Lengths) -> Tensor:
    if not isinstance(given, torch.Tensor):
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
            found = f"{type(given).__name__} {given!r}"
            raise ValueError(f"{name} must be a list of ints or an integer tensor, got {found}")
        bad = next((x for x in given if isinstance(x, bool) or not isinstance(x, int)), None)
        if bad is not None:
            raise ValueError(f"{name} must hold ints, got {type(bad).__name__} {bad!r}")
        return torch.tensor(given, dtype=torch.int64)
    if given.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise ValueError(f"{name} must be an integer tensor, got {given.dtype}: use .to(torch.int64)")
    return given.to(torch.int64)


def _readable(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and type(x) is torch.Tensor


def check_lengths(name: str, lengths: Tensor, time: int) -> None:
    wrong = lengths[(lengths < 0) | (lengths > time)]
    if wrong.numel():
        found = f"{int(wrong[0])} in {lengths.tolist()}"
        raise ValueError(f"{name} must lie between 0 and the time axis, {time}; got {found}")


def check_cuts(name: str, cuts: Tensor, time: int) -> None:
    values = cuts.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {values[0]}")
    for place, (start, end) in enumerate(itertools.pairwise(values)):
        if end < start:
            raise ValueError(f"{name} must never decrease: entry {place + 1} is {end} after {start}")
    if values[-1] > time:
        raise ValueError(f"{name} ends at {values[-1]}, beyond the {time} packed tokens")
