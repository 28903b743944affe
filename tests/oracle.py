"""The definition of linear attention in numpy: what the operator is compared with. It shares no code with linattn.

    w_ij  = φ(q_i)·φ(k_j)  where i sees j, else 0        num_i = Σ_j w_ij v_j + φ(q_i) S₀
    out_i = num_i / den_i                                den_i = Σ_j w_ij     + φ(q_i)·z₀
    S     = S₀ + Σ_j φ(k_j) v_jᵀ                         z     = z₀ + Σ_j φ(k_j)

Axes:  B batch   T queries   S keys   H heads   G key/value heads   D key width   C features   M value width
One sequence has its heads first: (H, T, C). The arithmetic runs in the dtype of the arrays: float64 is the truth,
float32 shows what that precision costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Map:
    """φ, and a cotangent of its output pulled back to its input: `pull(x, dφ) = dφ · ∂φ/∂x`."""

    features: Callable[[Array], Array]
    pull: Callable[[Array, Array], Array]


def elementwise(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Map:
    return Map(value, lambda x, d: d * slope(x))


def square(x: Array) -> Array:
    """φ(x) = x ⊗ x, so that φ(q)·φ(k) = (q·k)²."""
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], x.shape[-1] ** 2)


def pull_square(x: Array, d: Array) -> Array:
    d = d.reshape(*x.shape, x.shape[-1])
    return ((d + d.swapaxes(-1, -2)) * x[..., None, :]).sum(-1)


def taylor(x: Array) -> Array:
    """φ(x) = (1, x, x ⊗ x / √2), so that φ(q)·φ(k) = 1 + q·k + (q·k)²/2."""
    return np.concatenate([np.ones_like(x[..., :1]), x, square(x) * x.dtype.type(0.5**0.5)], -1)


def pull_taylor(x: Array, d: Array) -> Array:
    width = x.shape[-1]
    return d[..., 1 : 1 + width] + pull_square(x, d[..., 1 + width :]) * x.dtype.type(0.5**0.5)


MAPS: dict[str, Map] = {
    "elu": elementwise(
        lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        lambda x: np.where(x > 0, 1, np.exp(np.minimum(x, 0))),
    ),
    "relu": elementwise(lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, x.dtype.type(1), x.dtype.type(0))),
    "squared_relu": elementwise(lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "softplus": elementwise(lambda x: np.log1p(np.exp(x)), lambda x: 1 / (1 + np.exp(-x))),
    "exp": elementwise(np.exp, np.exp),
    "identity": elementwise(lambda x: x, np.ones_like),
    "quadratic": Map(square, pull_square),
    "taylor": Map(taylor, pull_taylor),
}
ELEMENTWISE = ("elu", "relu", "squared_relu", "softplus", "exp", "identity")
POSITIVE = ("elu", "softplus", "exp")


def default_scale(name: str, width: int) -> float:
    return width**-0.5 if name == "taylor" else 1.0


@dataclass(frozen=True)
class Span:
    """One sequence: where its queries and keys lie, and the row of the state that is its own."""

    row: int
    queries: slice
    keys: slice
    state: int


def spans(
    batch: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    lengths: Sequence[int] | None = None,
    q_lengths: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    cu_seqlens_q: Sequence[int] | None = None,
) -> list[Span]:
    """Padded or packed, a batch is a list of sequences; what lies outside them does not exist."""
    if cu_seqlens is not None:
        edges = list(zip(pairwise(cu_seqlens_q or cu_seqlens), pairwise(cu_seqlens), strict=True))
        return [Span(0, slice(*q), slice(*k), n) for n, (q, k) in enumerate(edges)]
    ends_k = list(lengths) if lengths is not None else [num_keys] * batch
    ends_q = ends_k if causal else list(q_lengths) if q_lengths is not None else [num_queries] * batch
    return [Span(b, slice(0, ends_q[b]), slice(0, ends_k[b]), b) for b in range(batch)]


def attend(
    x: dict[str, Array],
    feature_map: str,
    *,
    causal: bool,
    normalize: bool,
    scale: float | None = None,
    eps: float | None = None,
    **layout: Any,
) -> dict[str, Array]:
    """-> out, kv, z, and of L = ⟨out, g⟩ + ⟨kv, g_kv⟩ + ⟨z, g_z⟩ the gradients dq, dk, dv, dkv, dz.

    `x` holds q (B, T, H, D), k (B, S, G, D), v (B, S, G, M), kv (N, G, C, M), z (N, G, C) and the cotangents
    g, g_kv, g_z.
    """
    phi = MAPS[feature_map]
    root = x["q"].dtype.type((default_scale(feature_map, x["q"].shape[-1]) if scale is None else scale) ** 0.5)
    (batch, num_queries), num_keys = x["q"].shape[:2], x["k"].shape[1]
    y = {"out": np.zeros_like(x["g"]), "kv": x["kv"].copy(), "z": x["z"].copy()}
    y |= {"dq": np.zeros_like(x["q"]), "dk": np.zeros_like(x["k"]), "dv": np.zeros_like(x["v"])}
    y |= {"dkv": x["g_kv"].copy(), "dz": x["g_z"].copy()}
    for span in spans(batch, num_queries, num_keys, causal, **layout):
        attend_to_one(x, y, span, phi, root, causal, normalize, eps)
    return y


def attend_to_one(
    x: dict[str, Array],
    y: dict[str, Array],
    span: Span,
    phi: Map,
    root: Any,
    causal: bool,
    normalize: bool,
    eps: float | None,
) -> None:
    """Fill in one sequence's part of every array of `y`."""
    queries, keys, n = (span.row, span.queries), (span.row, span.keys), span.state
    share = x["q"].shape[2] // x["k"].shape[2]

    def spread(a: Array) -> Array:
        return np.repeat(a, share, axis=0)  # query head h uses key/value head h // share

    def gather(a: Array) -> Array:
        return a.reshape(a.shape[0] // share, share, *a.shape[1:]).sum(1)

    x_q, g = x["q"][queries].swapaxes(0, 1) * root, x["g"][queries].swapaxes(0, 1)
    x_k, v = x["k"][keys].swapaxes(0, 1) * root, x["v"][keys].swapaxes(0, 1)
    kv, z, g_kv, g_z = x["kv"][n], x["z"][n], x["g_kv"][n], x["g_z"][n]
    f_q, f_k = phi.features(x_q), phi.features(x_k)
    sees = np.tri(x_q.shape[1], x_k.shape[1], dtype=bool) if causal else np.ones((x_q.shape[1], x_k.shape[1]), bool)

    w = np.where(sees, f_q @ spread(f_k).swapaxes(-1, -2), 0)
    num = w @ spread(v) + f_q @ spread(kv)
    den, moves = denominator(w.sum(-1) + (f_q * spread(z)[:, None]).sum(-1), normalize, eps)
    inverse = np.divide(1, den, out=np.zeros_like(den), where=den != 0)[..., None]  # a sum of no weight gives 0
    out = num * inverse
    y["out"][queries] = out.swapaxes(0, 1)
    y["kv"][n] = kv + f_k.swapaxes(-1, -2) @ v
    y["z"][n] = z + f_k.sum(1)

    d_num = g * inverse
    d_den = -(g * out).sum(-1) * inverse[..., 0] * moves
    d_w = np.where(sees, d_num @ spread(v).swapaxes(-1, -2) + d_den[..., None], 0)
    d_f_q = d_w @ spread(f_k) + d_num @ spread(kv).swapaxes(-1, -2) + d_den[..., None] * spread(z)[:, None]
    d_f_k = gather(d_w.swapaxes(-1, -2) @ f_q) + v @ g_kv.swapaxes(-1, -2) + g_z[:, None]
    y["dq"][queries] = (phi.pull(x_q, d_f_q) * root).swapaxes(0, 1)
    y["dk"][keys] = (phi.pull(x_k, d_f_k) * root).swapaxes(0, 1)
    y["dv"][keys] = (gather(w.swapaxes(-1, -2) @ d_num) + f_k @ g_kv).swapaxes(0, 1)
    y["dkv"][n] = g_kv + gather(f_q.swapaxes(-1, -2) @ d_num)
    y["dz"][n] = g_z + gather((f_q * d_den[..., None]).sum(1))


def denominator(den: Array, normalize: bool, eps: float | None) -> tuple[Array, Array]:
    """-> what divides, and 1 where it moves with the sum it came from, 0 where it stands still."""
    if not normalize:
        return np.ones_like(den), np.zeros_like(den)
    if eps is None:
        return den, np.ones_like(den)
    bounded = np.where(den < 0, -1, 1) * np.maximum(np.abs(den), den.dtype.type(eps))
    return bounded.astype(den.dtype), (np.abs(den) > eps).astype(den.dtype)


def conditioning(x: dict[str, Array], feature_map: str, *, causal: bool, scale: float | None = None) -> float:
    """How much rounding of the sums may grow in outputs and gradients: (Σ|w| / |den|)² Σ|φ(k)| / |den|, at its largest.

    The first factor is 1 unless features cancel; the second is large where a query hardly sees anything. No state,
    no padding.
    """
    phi = MAPS[feature_map]
    root = (default_scale(feature_map, x["q"].shape[-1]) if scale is None else scale) ** 0.5
    share = x["q"].shape[2] // x["k"].shape[2]
    f_q = phi.features(x["q"] * root).swapaxes(1, 2)
    f_k = np.repeat(phi.features(x["k"] * root).swapaxes(1, 2), share, axis=1)
    sees = np.tri(f_q.shape[2], f_k.shape[2]) if causal else np.ones((f_q.shape[2], f_k.shape[2]))
    den = np.abs(((f_q @ f_k.swapaxes(-1, -2)) * sees).sum(-1))
    size = ((np.abs(f_q) @ np.abs(f_k).swapaxes(-1, -2)) * sees).sum(-1)
    reach = np.abs(f_k).sum(-1).max(-1, initial=0)[..., None] * sees.sum(-1)
    seen = den > 0
    return float(
        np.max((size[seen] / den[seen]) ** 2 * np.maximum(1, (reach / np.where(seen, den, 1))[seen]), initial=1.0)
    )
