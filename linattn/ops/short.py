"""A short sequence on its own: the quadratic order in as few calls as it takes.

    A = tril(Q Kᵀ)      out = A V / A 1                    (equation 5 with one chunk and nothing before it)

For a few dozen tokens what counts is the number of calls, not of products. So queries and keys are stacked and mapped
at once, there are no tiles, and the output is a transposed view.

Axes:  B batch   T time   H heads   D key width   M values   R = B·H rows that never meet
"""

from __future__ import annotations

import torch

from linattn._typing import Float, Tensor
from linattn.ops import tiles
from linattn.ops.form import Form
from linattn.state import State


def fits(q: Tensor, k: Tensor, form: Form, state: State | None, live: Tensor | None) -> bool:
    """Whether a call is that simple: causal, one chunk, no state, no padding, as many key heads as query heads."""
    alone = form.causal and state is None and live is None
    return alone and q.shape == k.shape and 0 < q.shape[1] <= tiles.SINGLE_CHUNK


def forward(
    q: Float[Tensor, "B T H D"], k: Float[Tensor, "B T H D"], v: Float[Tensor, "B T H M"], form: Form
) -> Float[Tensor, "B T H M"]:
    _, phi = _features(q, k, form)
    phi_q, phi_k = phi[0], phi[1]
    weights = torch.bmm(phi_q, phi_k.transpose(1, 2)).tril_()
    out = torch.bmm(weights, _rows(v, phi_q.dtype))
    if form.normalize:
        out.div_(form.divisor(weights.sum(-1, keepdim=True)))
    return _heads(out, q).to(v.dtype)


def backward(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T H D"],
    v: Float[Tensor, "B T H M"],
    form: Form,
    dout: Float[Tensor, "B T H M"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 6 to 8, with one chunk and nothing before or after it."""
    x, phi = _features(q, k, form)
    phi_q, phi_k = phi[0], phi[1]
    v_rows, do = _rows(v, phi_q.dtype), _rows(dout, phi_q.dtype)
    weights = torch.bmm(phi_q, phi_k.transpose(1, 2)).tril_()
    if form.normalize:
        den = weights.sum(-1, keepdim=True)
        divisor = form.divisor(den)
        do = do / divisor
    dweights = torch.bmm(do, v_rows.transpose(1, 2))
    if form.normalize:
        through = (weights * dweights).sum(-1, keepdim=True).div_(divisor)
        if form.eps is not None:
            through = through.masked_fill_(den.abs() < form.eps, 0)
        dweights -= through
    dweights.tril_()
    dphi = torch.empty_like(x)
    torch.bmm(dweights, phi_k, out=dphi[0])
    torch.bmm(dweights.transpose(1, 2), phi_q, out=dphi[1])
    if form.feature_map.name != "identity":
        dphi *= form.derivative(x, phi)
    if form.scale != 1.0:
        dphi *= form.scale**0.5
    dv = torch.bmm(weights.transpose(1, 2), do)
    return _heads(dphi[0], q).to(q.dtype), _heads(dphi[1], k).to(k.dtype), _heads(dv, q).to(v.dtype)


def _features(q: Tensor, k: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """The scaled inputs of the map, queries and keys (2, R, T, D), and its outputs."""
    x = torch.stack((q.transpose(1, 2), k.transpose(1, 2))).flatten(1, 2)
    x = form.scaled(x)
    return x, form.feature_map(x)


def _rows(x: Tensor, dtype: torch.dtype) -> Float[Tensor, "R T W"]:
    return x.transpose(1, 2).to(dtype).reshape(-1, x.shape[1], x.shape[3])


def _heads(rows: Float[Tensor, "R T W"], like: Tensor) -> Float[Tensor, "B T H W"]:
    return rows.view(like.shape[0], like.shape[2], *rows.shape[1:]).transpose(1, 2)
