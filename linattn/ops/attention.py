"""Linear attention: the one public function. It checks, applies what cannot be fused, and chooses the implementation.

    out_i = φ(q_i) · Σ_j φ(k_j) v_jᵀ  /  φ(q_i) · Σ_j φ(k_j)          causal: j ≤ i        (docs/mathematics.md, 2 to 4)

This is the one place that looks at device and length.

Axes:  B batch   T time of queries   U time of keys   H heads   K key/value heads   D key width   C features   M values
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from linattn._typing import Float, Tensor
from linattn.features import FeatureMap, resolve
from linattn.ops import checks, cpu, gpu
from linattn.ops.autograd import Call, autocast_is_on, call_compiled, call_eager
from linattn.ops.batches import IMPLEMENTATIONS
from linattn.ops.checks import Lengths
from linattn.ops.form import Batch, Form, live_tokens
from linattn.state import State

Impl = Literal["auto", "quadratic", "chunked", "recurrent", "native", "triton"]


@overload
def linear_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, *, return_state: Literal[False] = ..., **options: Any
) -> Tensor: ...
@overload
def linear_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, *, return_state: Literal[True], **options: Any
) -> tuple[Tensor, State]: ...
def linear_attention(  # pyright: ignore[reportInconsistentOverload]  (the options, listed once)
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B U K D"] | None,
    v: Float[Tensor, "B U K M"] | None,
    *,
    feature_map: str | FeatureMap = "elu",
    causal: bool = True,
    normalize: bool = True,
    scale: float | None = None,
    eps: float | None = None,
    state: State | None = None,
    return_state: bool = False,
    lengths: Lengths = None,
    q_lengths: Lengths = None,
    cu_seqlens: Lengths = None,
    cu_seqlens_q: Lengths = None,
    impl: Impl = "auto",
    donate: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Attention in linear time: S_t = S_{t-1} + φ(k_t) v_tᵀ,  out_t = φ(q_t) S_t / (φ(q_t)·z_t).

    Args:
        q, k, v: (batch, time, heads, width), any strides, one floating dtype. Keys and values may have fewer heads (a
            divisor of q's), v another width, and with causal=False another time.
        feature_map: φ, a name of FEATURE_MAPS or a module. Learned and random maps are modules, built once.
        causal: each query sees its own key and earlier ones; False: all keys (encoders, cross-attention).
        normalize: divide by the sum of the weights. A signed map then needs `eps`.
        scale: multiplies q and k by √scale before the map; None takes the map's own default.
        eps: the least size of the divisor; its sign is kept.
        state: what earlier keys left behind. Never written to, unless donated.
        return_state: also return the state after the last (real) key of each row or packed sequence.
        lengths: (B,) real keys of each row of a padded batch. With causal=True the queries share them, with
            causal=False `q_lengths` describes the queries. Padded outputs are 0; padding reaches nothing, NaN or not.
        cu_seqlens: (sequences + 1,) cumulative lengths of sequences packed into one row; `cu_seqlens_q` where the
            queries are packed otherwise. States then have one row for each sequence.
        impl: how: "auto" chooses; the others raise where they cannot run (see `backends()`).
        donate: let the call write into `state`, which is then gone: its next use raises. For generation; no gradients.

    Pass the returned state to go on where this call ended:

    >>> q = k = v = torch.randn(1, 16, 2, 8)
    >>> whole = linear_attention(q, k, v)
    >>> left, s = linear_attention(q[:, :7], k[:, :7], v[:, :7], return_state=True)
    >>> right = linear_attention(q[:, 7:], k[:, 7:], v[:, 7:], state=s)
    >>> torch.allclose(torch.cat([left, right], 1), whole, atol=1e-5)
    True

    With k = v = None and causal=False a state is read and nothing is added to it.
    """
    if k is None or v is None:
        k, v = _no_keys(q, k, v, state, causal)
    q, k, v = same_dtype_under_autocast(q, k, v)
    checks.check_operands(q, k, v, causal)
    checks.check_scale(scale, eps)
    module = resolve(feature_map)
    checks.check_signed(module, normalize, eps)
    batch = checks.read_batch(q, k, causal, lengths, q_lengths, cu_seqlens, cu_seqlens_q)
    scale = module.default_scale(q.shape[3]) if scale is None else float(scale)
    features, rows = module.num_features(q.shape[3]), batch.num_rows(k)
    if state is not None:
        checks.check_state(state, q, k, v, features, rows, normalize)
    if donate:
        _check_donation(state, return_state, q, k, v)

    form = Form(module, scale, causal, normalize, None if eps is None else float(eps))
    if not is_fused(module):
        q, k, form = _apply_map(q, k, v, form, batch)
    call = Call(form, _choose(impl, q, k, v, batch), return_state)
    start = None if state is None else state.with_low_parts()
    sums = (None,) * 4 if start is None else (start.kv, start.z, start.kv_low, start.z_low)
    operands = (q, k, v, *sums, batch.lengths, batch.q_lengths, batch.cu_seqlens, batch.cu_seqlens_q)
    if torch.compiler.is_compiling():
        out, end = call_compiled(call, operands)
    else:
        out, end = call_eager(call, operands)
    if not return_state:
        return out
    assert end is not None
    return out, _into_donated(state, end) if donate and state is not None else end


def backends() -> dict[str, tuple[bool, str]]:
    """Every implementation by name: whether it can run here, and why not (or what it is)."""
    return {
        "quadratic": (True, "plain torch, a table of all pairs: the definition; twice differentiable"),
        "chunked": (True, "plain torch on any device, linear time"),
        "recurrent": (True, "plain torch, token by token"),
        "native": cpu.status(),
        "triton": gpu.status(),
    }


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    lengths: Lengths = None,
    q_lengths: Lengths = None,
    cu_seqlens: Lengths = None,
    cu_seqlens_q: Lengths = None,
) -> None:
    """Check a call's operands, with the values of lengths and cu_seqlens wherever they are.

    Reading them waits for the device, which is why the calls themselves do not do it.
    """

    def read(x: Lengths) -> Lengths:
        return x.cpu() if isinstance(x, torch.Tensor) else x

    checks.check_operands(q, k, v, causal)
    checks.read_batch(q, k, causal, *map(read, (lengths, q_lengths, cu_seqlens, cu_seqlens_q)))


def is_fused(feature_map: FeatureMap) -> bool:
    """Whether the implementations apply the map themselves, tile by tile: φ(q) and φ(k) never exist as a whole."""
    return feature_map.name in FUSED and type(feature_map) is type(resolve(feature_map.name))


FUSED = ("elu", "relu", "squared_relu", "softplus", "exp", "identity")


def _choose(impl: str, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> str:
    """By device, dtype and shape. q and k are what the implementation sees: features, where the map is not fused."""
    if impl == "auto":
        if k.shape[1] == 1 and not batch.packed:
            return "recurrent"
        if q.device.type == "cuda":
            return "triton" if gpu.why_not(q, v) is None else "chunked"
        return "native" if cpu.why_not(q, k, v) is None else "chunked"
    if impl in ("native", "triton"):
        reason = cpu.why_not(q, k, v) if impl == "native" else gpu.why_not(q, v)
        if reason is None:
            return impl
        raise ValueError(f"impl={impl!r} cannot run here: {reason}. Pass impl='auto', or one of {_available()}")
    if impl in IMPLEMENTATIONS:
        return impl
    raise ValueError(f"unknown impl {impl!r}: choose 'auto' or one of {', '.join(map(repr, backends()))}")


def _available() -> str:
    return ", ".join(repr(name) for name, (can_run, _) in backends().items() if can_run)


def _no_keys(q: Tensor, k: Tensor | None, v: Tensor | None, state: State | None, causal: bool) -> tuple[Tensor, Tensor]:
    if not isinstance(q, torch.Tensor) or q.dim() != 4:
        raise ValueError(f"q must be a tensor (batch, time, heads, width), got {described(q)}")
    if k is not None or v is not None:
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{given} was given without {missing}: pass both, or None for both to read a state")
    if state is None:
        raise ValueError("k and v are None: that reads a state without adding to it, so state= is needed")
    if causal:
        raise ValueError("k and v are None and causal=True: reading a state adds no keys, pass causal=False")
    heads, values = state.kv.shape[1], state.kv.shape[3]
    return q.new_empty(q.shape[0], 0, heads, q.shape[3]), q.new_empty(q.shape[0], 0, heads, values)


def described(x: object) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def same_dtype_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Rotary positions or a norm often leave q and k in fp32 and v in bf16: under autocast that is not an error.
    tensors = all(isinstance(x, torch.Tensor) for x in (q, k, v))
    if tensors and not (q.dtype == k.dtype == v.dtype) and autocast_is_on(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _apply_map(q: Tensor, k: Tensor, v: Tensor, form: Form, batch: Batch) -> tuple[Tensor, Tensor, Form]:
    """Apply a map that is not fused; the operator then sees its features, with the identity as their map."""
    live, asked = _real(batch.lengths, batch.cu_seqlens, k), _real(batch.q_lengths, batch.cu_seqlens_q, q)
    if form.causal or (batch.cu_seqlens is not None and batch.cu_seqlens_q is None):
        asked = live
    q, k = (x if real is None else torch.where(real[..., None, None], x, 0) for x, real in ((q, asked), (k, live)))
    return form.features(q), form.features(k), Form(resolve("identity"), 1.0, form.causal, form.normalize, form.eps)


def _real(lengths: Tensor | None, cuts: Tensor | None, x: Tensor) -> Tensor | None:
    return live_tokens(lengths if cuts is None else cuts[-1:], x.shape[1])


def _check_donation(state: State | None, return_state: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
    if state is None:
        raise ValueError("donate=True gives state= away, but there is no state")
    if not return_state:
        raise ValueError("donate=True without return_state=True would lose the state: pass return_state=True")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *state.tensors().values())):
        raise ValueError("donate=True writes into the state, which gradients need: use torch.no_grad() or donate=False")


def _into_donated(state: State, end: State) -> State:
    """The new sums in the old state's memory."""
    held = state.tensors()
    state.consume()
    for name, x in end.tensors().items():
        setattr(end, name, held[name].copy_(x) if name in held else x)
    return end
