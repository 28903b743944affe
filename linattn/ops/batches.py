"""Padded and packed batches: how an implementation, which knows rows and masks, is run over lengths or cu_seqlens.

A packed batch is sorted into groups of similar length (a factor of two), and each group is run as a padded batch: at
most twice the work, whatever the lengths. This reads cu_seqlens on the host; kernels that take it as it is do not come
here.

Axes:  B batch   T time of queries   U time of keys   P sequences packed end to end   H heads   K key/value heads
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from linattn._typing import Tensor
from linattn.ops import chunked, reference
from linattn.ops.form import Batch, Form, live_tokens, sum_dtype
from linattn.state import State


def run_forward(
    impl: str, q: Tensor, k: Tensor, v: Tensor, form: Form, state: State | None, batch: Batch, want_state: bool
) -> tuple[Tensor, State | None]:
    if not batch.packed:
        live, asked = _masks(q, k, form, batch)
        return IMPLEMENTATIONS[impl](q, k, v, form, state, live, asked, want_state)
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    end = None
    for group in _groups(batch, q.shape[1], k.shape[1]):
        before = None if state is None else state.select(group.rows)
        rows, left = IMPLEMENTATIONS[impl](
            q[0, group.q_index], k[0, group.k_index], v[0, group.k_index], form, before, *group.masks, want_state
        )
        group.put_queries(out, rows)
        if left is not None:
            end = end or _blank(left, batch.num_rows(k))
            for name, x in left.tensors().items():
                getattr(end, name)[group.rows] = x
    if want_state and end is None:
        end = _empty(q, k, v, form, 0) if state is None else state.clone()
    return out, end


def run_backward(
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
    if not batch.packed:
        return chunked.backward(q, k, v, form, state, *_masks(q, k, form, batch), dout, dkv, dz)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    start = _empty(q, k, v, form, batch.num_rows(k))
    for group in _groups(batch, q.shape[1], k.shape[1]):
        qi, ki, rows = group.q_index, group.k_index, group.rows
        dq_rows, dk_rows, dv_rows, dkv_rows, dz_rows = chunked.backward(
            q[0, qi],
            k[0, ki],
            v[0, ki],
            form,
            None if state is None else state.select(rows),
            *group.masks,
            None if dout is None else dout[0, qi],
            None if dkv is None else dkv[rows],
            None if dz is None else dz[rows],
        )
        if dkv_rows is not None:
            start.kv[rows] = dkv_rows
        if start.z is not None and dz_rows is not None:
            start.z[rows] = dz_rows
        group.put_queries(dq, dq_rows)
        group.put_keys(dk, dk_rows)
        group.put_keys(dv, dv_rows)
    return dq, dk, dv, start.kv, start.z


def _chunked(q, k, v, form, state, live, asked, want_state):
    return chunked.forward(q, k, v, form, state, live, asked, want_state)


def _from_reference(function: Callable) -> Callable:
    def run(q, k, v, form, state, live, asked, want_state):
        start = _empty(q, k, v, form, k.shape[0]) if state is None else state
        out, end = function(q, k, v, form, start, live, asked)
        if not want_state:
            return out, None
        return out, end.clone() if end is state else end

    return run


# q, k, v, form, state, live, asked, want_state -> out, state
IMPLEMENTATIONS: dict[str, Callable] = {
    "chunked": _chunked,
    "quadratic": _from_reference(reference.quadratic),
    "recurrent": _from_reference(reference.recurrent),
}


def _empty(q: Tensor, k: Tensor, v: Tensor, form: Form, rows: int) -> State:
    return State.empty(
        rows,
        k.shape[2],
        form.feature_map.num_features(q.shape[3]),
        v.shape[3],
        normalize=form.normalize,
        dtype=sum_dtype(q.dtype),
        device=q.device,
    )


def _blank(like: State, rows: int) -> State:
    return like.map(lambda x: x.new_zeros(rows, *x.shape[1:]))


def _masks(q: Tensor, k: Tensor, form: Form, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    live = live_tokens(batch.lengths, k.shape[1])
    return live, live if form.causal else live_tokens(batch.q_lengths, q.shape[1])


@dataclass(frozen=True)
class _Group:
    """Packed sequences of similar length: which they are, where their tokens lie (padding points anywhere)."""

    rows: Tensor
    q_index: Tensor
    k_index: Tensor
    masks: tuple[Tensor, Tensor]  # live keys, asked queries

    def put_queries(self, x: Tensor, rows: Tensor) -> None:
        x[0, self.q_index[self.masks[1]]] = rows[self.masks[1]]

    def put_keys(self, x: Tensor, rows: Tensor) -> None:
        x[0, self.k_index[self.masks[0]]] = rows[self.masks[0]]


def _groups(batch: Batch, num_queries: int, num_keys: int) -> Iterator[_Group]:
    assert batch.cu_seqlens is not None
    keys = _bounds(batch.cu_seqlens, num_keys)
    queries = keys if batch.cu_seqlens_q is None else _bounds(batch.cu_seqlens_q, num_queries)
    buckets: dict[tuple[int, int], list[int]] = {}
    for row, ((k0, k1), (q0, q1)) in enumerate(zip(keys, queries, strict=True)):
        buckets.setdefault(((k1 - k0).bit_length(), (q1 - q0).bit_length()), []).append(row)
    device = batch.cu_seqlens.device
    for rows in buckets.values():
        k_index, live = _index([keys[row] for row in rows], num_keys, device)
        q_index, asked = _index([queries[row] for row in rows], num_queries, device)
        yield _Group(torch.tensor(rows, device=device), q_index, k_index, (live, asked))


def _bounds(cu_seqlens: Tensor, total: int) -> list[tuple[int, int]]:
    # Clamped: values that nobody could check (CUDA, compiled code) must not read out of bounds.
    cuts, bounds = cu_seqlens.clamp(0, total).tolist(), []
    for start, end in itertools.pairwise(cuts):
        bounds.append((start, max(start, end)))
    return bounds


def _index(bounds: list[tuple[int, int]], total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([start for start, _ in bounds], device=device)
    lengths = torch.tensor([end - start for start, end in bounds], device=device)
    place = torch.arange(int(max(end - start for start, end in bounds)), device=device)
    return (starts[:, None] + place).clamp_max(max(total - 1, 0)), place < lengths[:, None]
