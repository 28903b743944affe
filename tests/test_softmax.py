"""Softmax attention: against the table of weights in float64, and by laws.

The laws: the whole, a prompt and steps, and steps alone agree; rows of different lengths are each as if alone;
gradients through a cache are those of the whole. The cache as a value, and what it costs: test_softmax_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_table import assert_close, host, operands, run, split, table  # noqa: F401
from torch import Tensor

from linattn.ops.softmax import KVCache, softmax_attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("values", [3, 5, 8, 10])
def test_against_the_table(values, heads, kv_heads, causal):
    for time in (1, 2, 33, 300):
        q, k, v = operands(2, time, heads, kv_heads, 5, values)
        assert_close(softmax_attention(q, k, v, causal=causal), table(q, k, v, causal=causal))
    assert_close(softmax_attention(q, k, v, causal=causal, scale=0.7), table(q, k, v, causal=causal, scale=0.7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [8, 5, 12])
def test_narrow_dtypes_are_as_accurate_as_the_table(dtype, values):
    x = tuple(y.to(dtype) for y in operands(2, 100, 4, 2, 8, values))
    exact, plain = table(*(y.double() for y in x)), table(*x)
    whole = softmax_attention(*x)
    stepped, state = run(split(x, [30, 90, *range(91, 100)]))
    assert whole.dtype == state.k.dtype == state.v.dtype == dtype
    assert_as_accurate(whole, exact, plain)
    assert_as_accurate(stepped, exact, plain)


@pytest.mark.parametrize("keys", [1, 7, 40])
def test_cross_attention(keys):
    q, (_, k, v) = operands(time=9)[0], operands(time=keys, seed=1)
    assert_close(softmax_attention(q, k, v, causal=False), table(q, k, v, causal=False))
    q_lengths, lengths = [4, 9], [keys, keys // 2]
    out = softmax_attention(q, k, v, causal=False, lengths=lengths, q_lengths=q_lengths)
    for row in range(2):
        part = slice(row, row + 1)
        asked, seen = q[part, : q_lengths[row]], slice(0, lengths[row])
        if lengths[row]:
            assert_close(out[part, : q_lengths[row]], table(asked, k[part, seen], v[part, seen], causal=False))
        assert not out[part, q_lengths[row] :].any()
    if keys == 1:
        assert not out[1].any(), "a row without keys is 0"


def test_any_strides():
    x = operands()
    others = tuple(y.transpose(1, 3).contiguous().transpose(1, 3) for y in x)
    assert not others[0].is_contiguous()
    assert_close(softmax_attention(*others), table(*x))
    assert_close(run(split(others, [4, 5]))[0], table(*x))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no rows", "no tokens"])
def test_empty(shape):
    x = tuple(y.requires_grad_() for y in operands(*shape))
    out, state = softmax_attention(*x, return_state=True)
    assert out.shape == (*shape, 4, 3) and state.lengths.tolist() == [0] * shape[0]
    out.sum().backward()
    going_on = softmax_attention(*operands(shape[0], 3), state=state)
    assert torch.equal(going_on, softmax_attention(*operands(shape[0], 3)))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 40), max_size=5).map(sorted), st.sampled_from([3, 5, 8]))
def test_split_anywhere(cuts, values):
    x = operands(2, 40, values=values)
    out, state = run(split(x, cuts))
    assert_close(out, table(*x))
    assert state.lengths.tolist() == [40, 40]


def test_prompt_and_steps_and_steps_alone():
    x = operands(2, 140)
    want = table(*x)
    for cuts in ([], [100, *range(101, 140)], list(range(1, 140))):
        assert_close(run(split(x, cuts))[0], want)


def test_a_long_piece_after_a_long_prompt():
    """More queries than share one mask."""
    x = operands(1, 900, 2, 1)
    assert_close(run(split(x, [300]))[0], table(*x))


def test_the_future_changes_nothing():
    x, other = operands(time=60), operands(time=60, seed=1)
    for at in (1, 31, 59):
        changed = tuple(torch.cat([a[:, :at], b[:, at:]], 1) for a, b in zip(x, other, strict=True))
        before, after = softmax_attention(*x), softmax_attention(*changed)
        assert_close(after[:, :at], before[:, :at])
        assert (after[:, at:] - before[:, at:]).abs().max() > 0.1


def test_a_cache_is_read_by_other_queries():
    x, (asked, _, _) = operands(time=12), operands(time=7, seed=1)
    _, state = run(split(x, [5, 6]))
    read, same = softmax_attention(asked, None, None, state=state, causal=False, return_state=True)
    assert_close(read, table(asked, x[1], x[2], causal=False))
    assert torch.equal(softmax_attention(asked, None, None, state=same, causal=False), read)
    more = operands(time=4, seed=2)
    both = [torch.cat([a, b], 1) for a, b in zip(x[1:], more[1:], strict=True)]
    got = softmax_attention(asked[:, :5], *more[1:], state=state, causal=False)
    assert_close(got, table(asked[:, :5], *both, causal=False))
    empty = KVCache.empty(2, 2, 5, 3, dtype=torch.float64)
    assert not softmax_attention(asked, None, None, state=empty, causal=False).any()


def ragged(counts: list[list[int]], times: list[int]) -> tuple[list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """Padded calls, each with NaN in its padding, and for each row its real tokens without padding."""
    x = operands(len(counts[0]), sum(times), seed=3)
    calls = [
        tuple(y.clone() for y in piece) for piece in split(x, [sum(times[: n + 1]) for n in range(len(times) - 1)])
    ]
    alone = []
    for row in range(len(counts[0])):
        real = [tuple(y[row : row + 1, : now[row]] for y in call) for call, now in zip(calls, counts, strict=True)]
        alone.append(tuple(torch.cat(parts, 1) for parts in zip(*real, strict=True)))
    for call, now in zip(calls, counts, strict=True):
        for row, count in enumerate(now):
            for y in call:
                y[row, count:] = torch.nan
    return calls, alone


# Different lengths, then equal ones, padding in all rows, different ones again, and equal at the end.
COUNTS = [[7, 0, 3], [2, 9, 6], [1, 1, 1], [2, 2, 2], [0, 1, 1], [3, 2, 2]]
TIMES = [8, 9, 1, 4, 1, 6]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.usefixtures("host")
def test_rows_of_different_lengths_are_each_alone(static, as_list):
    calls, alone = ragged(COUNTS, TIMES)
    state = KVCache.empty(3, 2, 5, 3, dtype=torch.float64, capacity=20 if static else 2, static=static)
    place = [0, 0, 0]
    for call, now in zip(calls, COUNTS, strict=True):
        given = now if as_list else torch.tensor(now)
        out, state = softmax_attention(*call, state=state, lengths=given, return_state=True)
        for row, count in enumerate(now):
            end = place[row] + count
            if count:
                want = table(*(y[:, :end] for y in alone[row]))[0, place[row] :]
                assert_close(out[row, :count], want)
            assert not out[row, count:].any()
            place[row] = end
    assert state.lengths.tolist() == place
    asked = operands(3, 4, seed=5)[0]
    read = softmax_attention(asked, None, None, state=state, causal=False)
    for row in range(3):
        assert_close(read[row : row + 1], table(asked[row : row + 1], *alone[row][1:], causal=False))


def test_gradients_pass_by_padding():
    calls, alone = ragged(COUNTS, TIMES)
    leaves = [tuple(y.requires_grad_() for y in call) for call in calls]
    outs, state = [], None
    for call, now in zip(leaves, COUNTS, strict=True):
        out, state = softmax_attention(*call, state=state, lengths=now, return_state=True)
        outs.append(out)
    torch.cat(outs, 1).square().sum().backward()
    for row, real in enumerate(alone):
        real = tuple(y.clone().requires_grad_() for y in real)
        wanted = torch.autograd.grad(table(*real).square().sum(), real)
        for n, want in enumerate(wanted):
            parts = [gradient(call[n])[row, : now[row]] for call, now in zip(leaves, COUNTS, strict=True)]
            assert_close(torch.cat(parts), want[0])
    for call, now in zip(leaves, COUNTS, strict=True):
        for y in call:
            for row, count in enumerate(now):
                assert not gradient(y)[row, count:].any(), "zeros, not NaN"


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def test_gradcheck_through_a_cache():
    def call(lengths: Tensor | None, *x: Tensor) -> tuple[Tensor, ...]:
        state = KVCache(x[3], x[4], torch.tensor([2, 2]))
        out, end = softmax_attention(*x[:3], state=state, lengths=lengths, return_state=True)
        return out, end.k, end.v

    for values in (1, 2, 3):
        q, k, v = (y.requires_grad_() for y in operands(2, 2, 2, 1, 2, values))
        old = [y[:, :2].clone().detach().requires_grad_() for y in operands(2, 2, 2, 1, 2, values, seed=1)[1:]]
        for lengths in (None, torch.tensor([2, 1])):
            assert torch.autograd.gradcheck(partial(call, lengths), (q, k, v, *old))


@pytest.mark.parametrize("values", [3, 5, 8])
def test_training_through_a_cache_is_training_the_whole(values):
    x = operands(2, 30, values=values)
    weights = operands(2, 30, heads=4, width=values, seed=4)[0]

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = tuple(y.clone().requires_grad_() for y in x)
        return torch.autograd.grad((function(*leaves) * weights).sum(), leaves)

    want = gradients(table)
    for cuts in ([], [1], [7, 8, 20]):
        for got, right in zip(gradients(lambda *y, c=cuts: run(split(y, c))[0]), want, strict=True):
            assert_close(got, right)


def test_later_steps_do_not_disturb_a_backward_pass():
    """Reading and appending with gradients, then steps without: nothing that autograd holds is written to."""
    x, more = operands(2, 9), operands(2, 4, seed=1)
    with torch.no_grad():
        _, state = softmax_attention(*x, return_state=True)
    asked = operands(2, 3, seed=2)[0].requires_grad_()
    read = softmax_attention(asked, None, None, state=state, causal=False)
    leaves = tuple(y.clone().requires_grad_() for y in more)
    out, end = softmax_attention(*leaves, state=state, return_state=True)
    with torch.no_grad():
        for start in (state, end):
            run(split(more, [1]), start)
    grads = torch.autograd.grad(read.square().sum() + out.square().sum(), (asked, *leaves))
    again = tuple(y.detach().clone().requires_grad_() for y in (asked, *leaves))
    whole = tuple(torch.cat([a, b], 1) for a, b in zip(x, again[1:], strict=True))
    loss = table(again[0], x[1], x[2], causal=False).square().sum() + table(*whole)[:, 9:].square().sum()
    for got, want in zip(grads, torch.autograd.grad(loss, again), strict=True):
        assert_close(got, want)
    assert not end.detach().k.requires_grad


def test_a_cache_leaves_inference_mode():
    x = operands(2, 12)
    pieces = split(x, [5, 6, 9])
    with torch.inference_mode():
        first, state = run(pieces[:2])
    with torch.no_grad():
        second, state = run(pieces[2:3], state)
    third = softmax_attention(*(y.clone().requires_grad_() for y in pieces[3]), state=state)
    assert_close(torch.cat([first, second, third.detach()], 1), table(*x))


def test_autocast_changes_nothing():
    x = tuple(y.float() for y in operands(2, 20))
    want = run(split(x, [9, 10]))[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(split(x, [9, 10]))[0], want)
        mixed = softmax_attention(x[0], x[1], x[2].bfloat16())
    assert mixed.dtype == torch.bfloat16 and (mixed.float() - softmax_attention(*x)).abs().max() < 0.03
