"""One token at a time, prepared once: a token then costs no checks and no copies.

    out = φ(q)·(S + Σ_p φ(k_p) v_pᵀ) / φ(q)·(z + Σ_p φ(k_p))          p: the tokens since the last fold  (equation 11)

The last FOLD keys and values are kept beside the sums and enter them together: most steps only read S, and adding FOLD
terms at once, exactly (equation 12), keeps the sums right for any number of tokens. z is one more column of S, whose
value is always 1. The buffers have fixed sizes; unused places hold zero keys, which weigh nothing.

Axes:  B batch   H heads   K key/value heads   G = H / K   D key width   C features   M values   R = B·K rows
"""

from __future__ import annotations

import torch

from linattn._typing import Float, Tensor
from linattn.features import FeatureMap, resolve
from linattn.ops import checks
from linattn.ops.form import Form, sum_dtype
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
    ):
        """Takes `state` over: its next use elsewhere raises. Normalises if the state has a z."""
        if not isinstance(state, State):
            raise ValueError(f"Step needs a linattn.State, got {type(state).__name__}")
        self._map = resolve(feature_map)
        checks.check_scale(scale, eps)
        self._normalize = state.z is not None
        checks.check_signed(self._map, self._normalize, eps)
        self._fixed_scale, self._eps = scale, eps
        self._form: Form | None = None
        batch, heads, features, values = state.kv.shape
        width = values + self._normalize
        like = {"dtype": state.kv.dtype, "device": state.kv.device}
        self._sums = torch.zeros(batch * heads, features, width, **like)
        self._low = torch.zeros_like(self._sums) if state.kv.dtype == torch.float32 else None
        self._keys = torch.zeros(batch * heads, FOLD, features, **like)
        self._values = torch.ones(batch * heads, FOLD, width, **like)
        self._pending, self._spent = 0, False
        self._shape = (batch, heads, features, values)
        self._fill(state)  # a state without low parts has zeros for them
        state.consume()

    @torch.no_grad()
    def __call__(
        self, q: Float[Tensor, "B *one H D"], k: Float[Tensor, "B *one K D"], v: Float[Tensor, "B *one K M"]
    ) -> Float[Tensor, "B *one H M"]:
        """Add one token and read: (B, H, D) in, (B, H, M) out; or with a time axis of 1, in and out."""
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
        if wanted != found or sum_dtype(q.dtype) != self._sums.dtype or q.device != self._sums.device:
            raise ValueError(
                f"the state is (batch, key/value heads, features, values) = {wanted}, {self._sums.dtype} on "
                f"{self._sums.device}; this token needs {found}, {sum_dtype(q.dtype)} on {q.device}"
            )
        scale = self._map.default_scale(q.shape[-1]) if self._fixed_scale is None else float(self._fixed_scale)
        self._form = Form(self._map, scale, True, self._normalize, self._eps)
        return self._form

    def _alive(self) -> None:
        if self._spent:
            raise ValueError("this Step is spent: step.state() returned its state, make a new Step from it")
