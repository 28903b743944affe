"""The definition, written to be read: linear attention as a table of weights, and as a recurrent network.

    w_ij = φ(q_i)·φ(k_j)             out_i = Σ_j w_ij v_j / Σ_j w_ij                             (equations 1 and 4)
    S_i = S_{i-1} + φ(k_i) v_iᵀ      z_i = z_{i-1} + φ(k_i)      out_i = φ(q_i) S_i / φ(q_i)·z_i         (equation 3)

Causal: j ≤ i. The state is what earlier keys have left behind. `live` marks the real keys, `asked` the real queries.
Nothing here is fast and everything is plain torch; `chunked` is compared with both, and shares no line with them.

Axes:  B batch   T time of queries   U time of keys   H heads   K key/value heads   D key width   C features   M values
"""

from __future__ import annotations

import torch

from linattn._typing import Bool, Float, Tensor
from linattn.ops.form import Form
from linattn.state import State


def quadratic(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B U K D"],
    v: Float[Tensor, "B U K M"],
    form: Form,
    state: State,
    live: Bool[Tensor, "B U"] | None = None,
    asked: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H M"], State]:
    """Attention as a T × U table of weights, differentiable any number of times."""
    phi_q, phi_k, v_live = _features(q, form, asked), _features(k, form, live), _masked(v, live)
    phi_q = phi_q.unflatten(2, (k.shape[2], -1)) if q.shape[2] else phi_q.unsqueeze(3)  # g query heads share a key head
    v_live = v_live.to(phi_k.dtype)

    # 1. The weight of every key for every query; the future weighs nothing.
    weights = torch.einsum("btkgc,bukc->bkgtu", phi_q, phi_k)
    if form.causal:
        weights = weights.tril()

    # 2. The weighted sum of the values, and what the state adds to it.
    num = torch.einsum("bkgtu,bukm->btkgm", weights, v_live)
    num = num + torch.einsum("btkgc,bkcm->btkgm", phi_q, state.kv)

    # 3. The normaliser.
    if form.normalize:
        den = weights.sum(-1).permute(0, 3, 1, 2) + torch.einsum("btkgc,bkc->btkg", phi_q, state.z)
        num = num / form.divisor(den)[..., None]

    # 4. What all keys leave behind.
    out = _masked(num.flatten(2, 3), asked).to(v.dtype)
    return out, state.plus(torch.einsum("bukc,bukm->bkcm", phi_k, v_live), phi_k.sum(1))


def recurrent(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B U K D"],
    v: Float[Tensor, "B U K M"],
    form: Form,
    state: State,
    live: Bool[Tensor, "B U"] | None = None,
    asked: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H M"], State]:
    """Attention as a recurrent network: one token after the other, with a memory that never grows."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for t in range(k.shape[1]):
        # 1. The key's features and its value enter the sums: S += φ(k) vᵀ, z += φ(k).
        now = None if live is None else live[:, t : t + 1]
        phi_k = _features(k[:, t : t + 1], form, now).squeeze(1)
        v_t = _masked(v[:, t : t + 1], now).squeeze(1).to(phi_k.dtype)
        state = state.plus(phi_k[..., :, None] * v_t[..., None, :], phi_k)
        # 2. The query reads them.
        if form.causal:
            out[:, t] = _read(q, t, form, state, asked)
    if not form.causal:
        for t in range(q.shape[1]):
            out[:, t] = _read(q, t, form, state, asked)
    return out, state


def _read(q: Tensor, t: int, form: Form, state: State, asked: Tensor | None) -> Float[Tensor, "B H M"]:
    phi_q = _features(q[:, t : t + 1], form, None if asked is None else asked[:, t : t + 1])
    phi_q = phi_q.squeeze(1).unflatten(1, (state.kv.shape[1], -1))
    out = phi_q @ state.kv
    if state.z is not None:
        out = out / form.divisor((phi_q @ state.z[..., None]).squeeze(-1))[..., None]
    return out.flatten(1, 2)


def _features(x: Tensor, form: Form, real: Tensor | None) -> Tensor:
    # Masked before the map (NaN in padding must not pass through its derivative) and after it (φ(0) need not be 0).
    return _masked(form.features(_masked(x, real)), real)


def _masked(x: Tensor, real: Tensor | None) -> Tensor:
    return x if real is None else torch.where(real[..., None, None], x, 0)
