"""Softmax attention as a table of weights, and what the tests of the rivals share."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from linattn.ops import buffers
from linattn.ops.softmax import KVCache, softmax_attention

TOLERANCE = 1e-12  # of float64, for sums of at most some hundred terms


def operands(
    batch: int = 2, time: int = 15, heads: int = 4, kv_heads: int = 2, width: int = 5, values: int = 3, *, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, time, heads, width), (batch, time, kv_heads, width), (batch, time, kv_heads, values))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def table(*qkv: Tensor, causal: bool = True, scale: float | None = None) -> Tensor:
    """Attention by a table of weights, in the operands' dtype: the last query sees the last key if causal."""
    q, k, v = qkv
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("bhts,bshm->bthm", weights, v)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert want.abs().max() > 0.1, "there is nothing to compare"
    assert got.shape == want.shape and got.dtype == want.dtype
    assert (got - want).abs().max() < TOLERANCE


def run(pieces: list[tuple[Tensor, ...]], state: KVCache | None = None, **options: Any) -> tuple[Tensor, KVCache]:
    """Outputs of consecutive calls, each going on where the one before it ended, and the last cache."""
    outs = []
    for q, k, v in pieces:
        out, state = softmax_attention(q, k, v, state=state, return_state=True, **options)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 1), state


def split(x: tuple[Tensor, ...], cuts: list[int]) -> list[tuple[Tensor, ...]]:
    """The operands cut in time, at the given places."""
    edges = [0, *cuts, x[0].shape[1]]
    return [tuple(y[:, a:b] for y in x) for a, b in itertools.pairwise(edges)]


def expected(x: tuple[Tensor, ...], more: tuple[Tensor, ...], lengths: list[int] | None) -> Tensor:
    """Outputs of `more` behind the first `lengths` tokens of each row of x, by the table."""
    rows = []
    for row in range(x[0].shape[0]):
        length = x[0].shape[1] if lengths is None else lengths[row]
        whole = tuple(torch.cat([a[row : row + 1, :length], b[row : row + 1]], 1) for a, b in zip(x, more, strict=True))
        rows.append(table(*whole)[:, length:])
    return torch.cat(rows)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made here has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return out


@pytest.fixture(params=["lengths are read", "lengths are unknown"])
def host(request, monkeypatch):
    """On a CPU lengths are read for nothing; on a GPU no call may wait for them."""
    if request.param == "lengths are unknown":
        monkeypatch.setattr(buffers, "_measured", lambda lengths, bound: (bound, False))
