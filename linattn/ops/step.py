"""One token at a time, prepared once: a token then costs no checks and no copies.

    out = φ(q)·(S + Σ_p φ(k_p) v_pᵀ) / φ(q)·(z + Σ_p φ(k_p))          p: the tokens since the last fold  (equation 11)

The last FOLD keys and values are kept beside the sums and enter them together: most steps only read S, and adding FOLD
terms at once, exactly (equation 12), keeps the sums right for any number of tokens. z is one more column of S, whose
value is always 1. The buffers have fixed sizes; unused places hold zero keys, which weigh nothing.

On a CPU the native library does it, where it can (fp32 sums, a map that is fused): in place, each token folded at once
and as exactly, since reading and writing S from the cache costs less there than the calls that would avoid it.

Axes:  B batch   H heads   K key/value heads   G = H / K   D key width   C features   M values   R = B·K rows
"""

from __future__ import annotations

import ctypes

import torch

from linattn._typing import Float, Tensor
from linattn.features import FeatureMap, resolve
from linattn.ops import checks, cpu
from linattn.ops.attention import is_fused
from linattn.ops.form import Form, sum_dtype
from linattn.ops.parts import BlockPart
from linattn.state import State, add_exactly

FOLD = 16


class Step:
    """A prepared recurrent step that owns its state.

    >>> step = Step(State.empty(1, 2, 8, 8))
    >>> q = k = v = torch.randn(1, 2, 8)
    >>> out = step(q, k, v)  # (batch, heads, values): attention over all tokens so far
    >>> state = step.state()  # the sums as a value again; the handle is then spent
    """

    def __init__(
        self,
        state: State,
        feature_map: str | FeatureMap = "elu",
        *,
        scale: float | None = None,
        eps: float | None = None,
        impl: str = "auto",
    ):
        """Takes `state` over: its next use elsewhere raises. Normalises if the state has a z.

        impl: "auto", "native" or "torch".
        """
        if not isinstance(state, State):
            raise ValueError(f"Step needs a linattn.State, got {type(state).__name__}")
        self._map = resolve(feature_map)
        checks.check_scale(scale, eps)
        self._normalize = state.z is not None
        checks.check_signed(self._map, self._normalize, eps)
        self._fixed_scale, self._eps = scale, eps
        self._form: Form | None = None
        self._dtype, self._device = state.kv.dtype, state.kv.device
        self._native: _NativeSums | None = None
        self._shape = tuple(state.kv.shape)
        if _takes_native(impl, state, self._map):
            self._native = _NativeSums(state, self._map.name, eps)
        else:
            self._lay_out(state)
        self._spent = False
        state.consume()

    def _lay_out(self, state: State) -> None:
        batch, heads, features, values = self._shape
        width = values + self._normalize
        like = {"dtype": state.kv.dtype, "device": state.kv.device}
        self._sums = torch.zeros(batch * heads, features, width, **like)
        self._low = torch.zeros_like(self._sums) if state.kv.dtype == torch.float32 else None
        self._keys = torch.zeros(batch * heads, FOLD, features, **like)
        self._values = torch.ones(batch * heads, FOLD, width, **like)
        self._pending = 0
        self._fill(state)  # a state without low parts has zeros for them

    def __call__(
        self, q: Float[Tensor, "B *one H D"], k: Float[Tensor, "B *one K D"], v: Float[Tensor, "B *one K M"]
    ) -> Float[Tensor, "B *one H M"]:
        """Add one token and read: (B, H, D) in, (B, H, M) out; or with a time axis of 1, in and out."""
        if self._native is not None:
            if self._native.fit(q, k, v):
                return self._native.step(q, k, v)
            self._first(q, k, v)
            return self._native.step_of_any(q, k, v)
        return self._by_torch(q, k, v)

    @torch.no_grad()
    def _by_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        form = self._form or self._first(q, k, v)
        batch, heads, _, values = self._shape
        rows = batch * heads
        place = self._pending
        self._keys[:, place].copy_(form.features(k).reshape(rows, -1))
        self._values[:, place, :values].copy_(v.reshape(rows, values))
        self._pending = place + 1

        phi_q = form.features(q).reshape(rows, -1, self._shape[2])
        weights = torch.bmm(phi_q, self._keys.transpose(1, 2))
        out = torch.baddbmm(torch.bmm(phi_q, self._sums), weights, self._values)
        if self._normalize:
            out = out[..., :values] / form.divisor(out[..., values:])
        if self._pending == FOLD:
            self._fold()
        return out.view(*q.shape[:-1], values).to(v.dtype)

    @torch.no_grad()
    def state(self) -> State:
        """The sums as a value again. The handle is spent: its next use raises."""
        self._alive()
        if self._native is not None:
            self._spent, self._form, native, self._native = True, None, self._native, None
            return native.state.clone()
        self._fold()
        values = self._shape[3]
        shape, self._form = self._shape[:3], None

        def split(sums: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
            if sums is None:
                return None, None
            z = sums[..., values].reshape(shape) if self._normalize else None
            return sums[..., :values].reshape(self._shape), z

        (kv, z), (kv_low, z_low) = split(self._sums), split(self._low)
        assert kv is not None
        self._spent = True
        return State(*(None if x is None else x.contiguous().clone() for x in (kv, z, kv_low, z_low)))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """What this sequence's memory costs, now and after any number of tokens."""
        if self._native is not None:
            return self._native.state.nbytes
        held = (self._sums, self._low, self._keys, self._values)
        return sum(x.numel() * x.element_size() for x in held if x is not None)

    def _fill(self, state: State) -> None:
        values = self._shape[3]
        for sums, kv, z in ((self._sums, state.kv, state.z), (self._low, state.kv_low, state.z_low)):
            if sums is not None and kv is not None:
                sums[..., :values].copy_(kv.flatten(0, 1))
                if z is not None:
                    sums[..., values].copy_(z.flatten(0, 1))

    def _fold(self) -> None:
        self._sums, self._low = add_exactly(self._sums, self._low, torch.bmm(self._keys.transpose(1, 2), self._values))
        self._keys.zero_()
        self._pending = 0

    def _first(self, q: Tensor, k: Tensor, v: Tensor) -> Form:
        """Check the first token's operands; later ones are taken to be like it."""
        self._alive()
        batch, heads, features, values = self._shape
        operands = [x if x.dim() == 4 else x[:, None] for x in (q, k, v)]
        checks.check_operands(*operands, causal=True)
        if operands[0].shape[1] != 1:
            raise ValueError(f"a step takes one token, (B, H, D) or (B, 1, H, D); got q {tuple(q.shape)}")
        wanted = (batch, heads, features, values)
        found = (k.shape[0], k.shape[-2], self._map.num_features(k.shape[-1]), v.shape[-1])
        if wanted != found or sum_dtype(q.dtype) != self._dtype or q.device != self._device:
            raise ValueError(
                f"the state is (batch, key/value heads, features, values) = {wanted}, {self._dtype} on "
                f"{self._device}; this token needs {found}, {sum_dtype(q.dtype)} on {q.device}"
            )
        scale = self._map.default_scale(q.shape[-1]) if self._fixed_scale is None else float(self._fixed_scale)
        if self._native is not None:
            self._native.prepare(operands[0].shape[2], scale)
        self._form = Form(self._map, scale, True, self._normalize, self._eps)
        return self._form

    def _alive(self) -> None:
        if self._spent:
            raise ValueError("this Step is spent: step.state() returned its state, make a new Step from it")


class _NativeSums:
    """A state, stepped in place by the native library."""

    def __init__(self, state: State, feature_map: str, eps: float | None):
        self.state = state.with_low_parts().map(lambda x: x.detach().clone(memory_format=torch.contiguous_format))
        held, shape = self.state, self.state.kv.shape
        self._rows, self._heads, self._width, self._values = shape
        self._part = BlockPart(kv_heads=shape[1], key_width=shape[2], value_width=shape[3])
        self._part.map, self._part.eps = cpu.MAPS[feature_map], eps or 0.0
        for name in ("kv", "kv_low", "z", "z_low"):
            x = getattr(held, name)
            setattr(self._part, name, None if x is None else x.data_ptr())
        self._address, self._call = ctypes.byref(self._part), cpu.library().linattn_attend
        self._shapes: tuple[torch.Size, torch.Size, torch.Size] | None = None

    def prepare(self, heads: int, scale: float) -> None:
        self._part.heads, self._part.root_scale = heads, scale**0.5
        self._shapes = tuple(  # type: ignore[assignment]
            torch.Size((self._rows, n, width))
            for n, width in ((heads, self._width), (self._heads, self._width), (self._heads, self._values))
        )
        self._out = torch.Size((self._rows, heads, self._values))
        self._threads = max(1, self._rows * self._heads * self._width * self._values // SHARE)

    def fit(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these are what the library reads, as they are. Each call is checked: nothing is checked in C."""
        return (
            self._shapes == (q.shape, k.shape, v.shape)
            and q.dtype is k.dtype is v.dtype is torch.float32
            and (q.is_cpu and k.is_cpu and v.is_cpu)
            and q.is_contiguous()
            and k.is_contiguous()
            and v.is_contiguous()
        )

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(self._out)
        threads = 1 if self._threads == 1 else min(self._threads, torch.get_num_threads())
        data = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr())
        if self._call(self._address, self._rows, *map(ctypes.c_void_p, data), threads) != 0:
            raise MemoryError("no memory for a step")
        return out

    def step_of_any(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With a time axis, in half precision, or strided."""
        rows = [x.detach().reshape(self._rows, *x.shape[-2:]).to(torch.float32).contiguous() for x in (q, k, v)]
        return self.step(*rows).view(*q.shape[:-1], self._values).to(v.dtype)


SHARE = 2**19  # numbers of the state that are worth a thread: beginning a parallel task takes some microseconds


def _takes_native(impl: str, state: State, feature_map: FeatureMap) -> bool:
    """Whether the native library makes the steps."""
    if impl not in ("auto", "torch", "native"):
        raise ValueError(f"impl must be 'auto', 'torch' or 'native', got {impl!r}")
    can_run, reason = cpu.status()
    if can_run and (state.kv.dtype != torch.float32 or state.kv.device.type != "cpu"):
        reason, can_run = f"the state is {state.kv.dtype} on {state.kv.device}, not torch.float32 on the CPU", False
    if can_run and not is_fused(feature_map):
        reason, can_run = f"the feature map {feature_map.name!r} is not elementwise", False
    if impl == "native" and not can_run:
        raise ValueError(f"impl='native' cannot run here: {reason}. Pass impl='auto'")
    return can_run and impl != "torch"
