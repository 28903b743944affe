"""How autograd, vmap and the compiler see the operator.

Eager calls go to an autograd.Function (a custom op costs 19 µs a call); under compile and export there is one opaque
op, `linattn::attention`, with a fake kernel. Both end in the same two functions: those of batches.py, or of the GPU's
kernels, which also keep a little of the forward pass for the backward pass (`Kept`). The backward pass is written by
hand (docs/mathematics.md, equations 6 to 9) and is itself not differentiable: `impl="quadratic"` is.

Axes:  B batch   T time   H heads   K key/value heads   D key width   C features   M values
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from linattn._typing import Tensor
from linattn.features import resolve
from linattn.features.base import AUTOCAST
from linattn.ops import cpu, gpu
from linattn.ops.batches import run_backward, run_forward
from linattn.ops.form import Batch, Form, sum_dtype
from linattn.state import State

TWICE = (
    "linear_attention with impl={impl!r} can be differentiated once: its backward pass is written by hand. "
    'For second derivatives pass impl="quadratic".'
)


@dataclass(frozen=True)
class Call:
    """The static part of one call."""

    form: Form
    impl: str
    want_state: bool


Operands = tuple[Any, ...]  # q k v | kv z kv_low z_low | lengths q_lengths cu_seqlens cu_seqlens_q
ALONE: Operands = (None,) * 8  # what follows q k v where there are no states, lengths and cuts
Kept = tuple[Any, ...]  # the output, and four tensors of the GPU's forward pass; all None elsewhere
NOTHING: Kept = (None,) * 5


def call_eager(call: Call, operands: Operands) -> tuple[Tensor, State | None]:
    if call.impl == "quadratic":
        return _forward(call, operands)[:2]  # plain torch: autograd sees into it, as often as it likes
    if torch._C._are_functorch_transforms_active():
        out, *sums = _Attention.apply(call, *operands)[:5]  # type: ignore[misc,index]
    elif not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in operands):
        return _forward(call, operands)[:2]
    elif call.impl != "triton" and not call.want_state and all(x is None for x in operands[3:]):
        return super(torch.autograd.Function, _Alone).apply(call, *operands[:3]), None  # type: ignore[misc]
    else:
        # Function.apply, without its inspect.signature at every call (30 µs) that only functorch needs
        out, *sums = super(torch.autograd.Function, _Attention).apply(call, *operands)[:5]  # type: ignore[misc]
    return out, State(*sums) if call.want_state else None


def call_compiled(call: Call, operands: Operands) -> tuple[Tensor, State | None]:
    form, keep = call.form, torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    options = (form.feature_map.name, form.causal, form.normalize, form.scale, form.eps, call.impl)
    out, kv, z, kv_low, z_low, *_ = torch.ops.linattn.attention(*operands, *options, call.want_state, keep)
    if not call.want_state:
        return out, None
    pair = kv.dtype == torch.float32
    z, z_low = (z, z_low) if form.normalize else (None, None)
    return out, State(kv, z, kv_low, z_low) if pair else State(kv, z)


def _forward(call: Call, operands: Operands, keep: bool = False) -> tuple[Tensor, State | None, Kept]:
    q, k, v, *rest = operands
    if autocast_is_on(q.device.type):
        with no_autocast(q.device.type):
            return _forward(call, operands, keep)
    state, batch = _state(rest[:4]), Batch(*rest[4:])
    if call.impl == "triton":
        out, end, kept = gpu.forward(q, k, v, call.form, state, batch, call.want_state, keep)
        return out, end, (out, *kept)
    if call.impl == "native":
        return *cpu.forward(q, k, v, call.form, state, batch, call.want_state), NOTHING
    return *run_forward(call.impl, q, k, v, call.form, state, batch, call.want_state), NOTHING


def _backward(call: Call, operands: Operands, kept: Kept, dout: Tensor | None, dkv: Tensor | None, dz: Tensor | None):
    q, k, v, *rest = operands
    if autocast_is_on(q.device.type):
        with no_autocast(q.device.type):
            return _backward(call, operands, kept, dout, dkv, dz)
    state, batch = _state(rest[:4]), Batch(*rest[4:])
    if call.impl == "triton":
        return gpu.backward(q, k, v, call.form, state, batch, dout, dkv, dz, *kept)
    if call.impl == "native":
        return cpu.backward(q, k, v, call.form, state, batch, dout, dkv, dz)
    return run_backward(q, k, v, call.form, state, batch, dout, dkv, dz)


def no_autocast(device: str) -> Any:
    # Autocast would run the fp32 sums in bf16. Entering its context costs microseconds, so only where it is on.
    return torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext()


def autocast_is_on(device: str) -> bool:
    return device in AUTOCAST and torch.is_autocast_enabled(device)


def _state(sums: list[Tensor | None]) -> State | None:
    return None if sums[0] is None else State(*sums)  # type: ignore[arg-type]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(call: Call, *operands: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        out, state, kept = _forward(call, operands, keep=True)
        return out, *_sums(state), *kept[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.call = inputs[0]
        out = output[0] if ctx.call.impl == "triton" else None
        ctx.save_for_backward(*inputs[1:], out, *output[5:])
        ctx.mark_non_differentiable(*(x for x in output[3:] if x is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dkv: Tensor | None, dz: Tensor | None, *_: None):  # type: ignore[override]
        tensors = (*ctx.saved_tensors, dout, dkv, dz)
        if torch.is_grad_enabled():  # create_graph=True, or functorch: refuse a second derivative, let vmap through
            grads = _AttentionBackward.apply(ctx.call, *tensors)
        else:
            grads = _backward(ctx.call, tensors[:11], tensors[11:16], *tensors[16:])
        needs = ctx.needs_input_grad
        return None, *(g if need else None for g, need in zip(grads, needs[1:6], strict=True)), *(None,) * 6  # type: ignore[misc]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *operands: Tensor | None):
        return _vmapped(_Attention, OUTPUT_HEADS, info.batch_size, in_dims[1:], call, operands)


class _Alone(torch.autograd.Function):
    """The commonest call: q, k and v only. What _Attention does for operands that are None costs 32 tokens."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        ctx.call = call
        ctx.save_for_backward(q, k, v)
        return _forward(call, (q, k, v, *ALONE))[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor):  # type: ignore[override]
        operands = (*ctx.saved_tensors, *ALONE)
        if torch.is_grad_enabled():  # create_graph=True: refuse a second derivative
            dq, dk, dv, *_ = _AttentionBackward.apply(ctx.call, *operands, *NOTHING, dout, None, None)  # type: ignore[misc]
        else:
            dq, dk, dv, *_ = _backward(ctx.call, operands, NOTHING, dout, None, None)
        _, of_q, of_k, of_v = ctx.needs_input_grad
        return None, dq if of_q else None, dk if of_k else None, dv if of_v else None


class _AttentionBackward(torch.autograd.Function):
    """The hand-written backward pass as a function: vmap sees it, and a second derivative is refused."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor | None):  # type: ignore[override]
        return _backward(call, tensors[:11], tensors[11:16], *tensors[16:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.impl = inputs[0].impl

    @staticmethod
    def backward(ctx: Any, *_: Tensor):  # type: ignore[override]
        raise RuntimeError(TWICE.format(impl=ctx.impl))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, *tensors: Tensor | None):
        return _vmapped(_AttentionBackward, GRADIENT_HEADS, info.batch_size, in_dims[1:], call, tensors)


# Where each operand (then what was kept, then dout, dkv, dz) and each result holds its heads, which never meet: vmap's
# axis joins them.
OPERAND_HEADS = (2, 2, 2, 1, 1, 1, 1, None, None, None, None, 2, 1, 1, 1, 1, 2, 1, 1)
OUTPUT_HEADS = (2, 1, 1, 1, 1, 1, 1, 1, 1)
GRADIENT_HEADS = (2, 2, 2, 1, 1)


def _vmapped(function: Any, heads: tuple[int, ...], size: int, dims: tuple[Any, ...], call: Call, tensors: Operands):
    folded = []
    for x, dim, axis in zip(tensors, dims, OPERAND_HEADS[: len(tensors)], strict=True):
        if x is not None and axis is not None:
            x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            x = x.movedim(0, axis).flatten(axis, axis + 1)
        elif dim is not None:
            raise ValueError("vmap cannot map over lengths or cu_seqlens: all mapped calls share them")
        folded.append(x)
    results = function.apply(call, *folded)
    unfolded = (None if x is None else x.unflatten(axis, (size, -1)) for x, axis in zip(results, heads, strict=True))
    return tuple(unfolded), tuple(None if x is None else axis for x, axis in zip(results, heads, strict=True))


OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? kv, Tensor? z, Tensor? kv_low, Tensor? z_low, "
    "Tensor? lengths, Tensor? q_lengths, Tensor? cu_seqlens, Tensor? cu_seqlens_q"
)
OPTIONS = "str feature_map, bool causal, bool normalize, float scale, float? eps"
KEPT = "Tensor? out, Tensor? den, Tensor? center, Tensor? ends_kv, Tensor? ends_z"


def _attention_op(*arguments: Any) -> tuple[Tensor, ...]:
    operands, (*options, impl, want_state, keep) = arguments[:11], arguments[11:]
    out, state, kept = _forward(_call(*options, impl=impl, want_state=want_state), operands, keep)
    # An op returns tensors, never None: an empty one stands for what there is not.
    blank = out.new_empty(0, dtype=sum_dtype(operands[0].dtype))
    return out.contiguous(), *(blank.clone() if x is None else x for x in (*_sums(state), *kept[1:]))


def _attention_fake(*arguments: Any) -> tuple[Tensor, ...]:
    (q, k, v), (*options, impl, want_state, keep) = arguments[:3], arguments[11:]
    kv, z = _fake_sums(arguments, options[0])
    call = _call(*options, impl=impl, want_state=want_state)
    pair, normalize = want_state and kv.dtype == torch.float32, call.form.normalize
    sums = (kv if want_state else None, z if want_state and normalize else None)
    low = (torch.empty_like(kv) if pair else None, torch.empty_like(z) if pair and normalize else None)
    kept = gpu.kept(q, k, v, call.form, Batch(*arguments[7:11])) if impl == "triton" and keep else NOTHING[1:]
    out = v.new_empty(*q.shape[:3], v.shape[3])
    return out, *(kv.new_empty(0) if x is None else x for x in (*sums, *low, *kept))


def _attention_backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    operands, kept, grads, options = arguments[:11], arguments[11:16], arguments[16:19], arguments[19:]
    *options, impl = options
    dq, dk, dv, *sums = _backward(_call(*options, impl=impl, want_state=False), operands, kept, *grads)
    blank = _backward_sums(arguments)
    dkv, dz = (b.zero_() if x is None else x for x, b in zip(sums, blank, strict=True))
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), dkv, dz


def _attention_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in arguments[:3]), *_backward_sums(arguments)


def _backward_sums(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    feature_map, _, normalize = arguments[19:22]
    dkv, dz = _fake_sums(arguments, feature_map)
    return dkv, dz if normalize else dkv.new_empty(0)


def _sums(state: State | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if state is None else (state.kv, state.z, state.kv_low, state.z_low)


def _fake_sums(arguments: tuple[Any, ...], feature_map: str) -> tuple[Tensor, Tensor]:
    q, k, v = arguments[:3]
    rows, features = Batch(cu_seqlens=arguments[9]).num_rows(k), resolve(feature_map).num_features(q.shape[3])
    kv = q.new_empty(rows, k.shape[2], features, v.shape[3], dtype=sum_dtype(q.dtype))
    return kv, kv.new_empty(rows, k.shape[2], features)


def _call(
    feature_map: str, causal: bool, normalize: bool, scale: float, eps: float | None, impl: str, want_state: bool
) -> Call:
    return Call(Form(resolve(feature_map), scale, causal, normalize, eps), impl, want_state)


def _setup_op(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    kept = (output[0], *(x if x.numel() else None for x in output[5:])) if inputs[16] == "triton" else NOTHING
    ctx.save_for_backward(*inputs[:11], *kept)
    ctx.options, ctx.want_state = inputs[11:17], inputs[17]
    ctx.mark_non_differentiable(*output[3:])


def _backward_op(ctx: Any, dout: Tensor | None, dkv: Tensor | None, dz: Tensor | None, *_: Any):
    normalize, had_state = ctx.options[2], ctx.saved_tensors[3] is not None
    dkv, dz = (dkv if ctx.want_state else None), (dz if ctx.want_state and normalize else None)
    *grads, dkv, dz = torch.ops.linattn.attention_backward(*ctx.saved_tensors, dout, dkv, dz, *ctx.options)
    return *grads, dkv if had_state else None, dz if had_state and normalize else None, *(None,) * 14


_op = torch.library.custom_op(
    "linattn::attention",
    _attention_op,
    mutates_args=(),
    schema=f"({OPERANDS}, {OPTIONS}, str impl, bool want_state, bool keep) -> ({', '.join(['Tensor'] * 9)})",
)
_op.register_fake(_attention_fake)
_op.register_autograd(_backward_op, setup_context=_setup_op)
_backward_definition = torch.library.custom_op(
    "linattn::attention_backward",
    _attention_backward_op,
    mutates_args=(),
    schema=f"({OPERANDS}, {KEPT}, Tensor? dout, Tensor? dkv, Tensor? dz, {OPTIONS}, str impl) -> "
    f"({', '.join(['Tensor'] * 5)})",
)
_backward_definition.register_fake(_attention_backward_fake)
