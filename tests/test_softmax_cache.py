"""The cache of softmax attention as a value: forks stay apart, copies go on by themselves, and what a step costs."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from softmax_table import Largest, assert_close, expected, host, operands, run, split, table  # noqa: F401
from test_ops_compile import fresh_compiler  # noqa: F401
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from linattn.ops import buffers
from linattn.ops.softmax import KVCache, softmax_attention
from linattn.state import Value


@pytest.mark.usefixtures("host")
def test_forks_stay_apart():
    """From one prompt: three ways on, one of them full of NaN; then the prompt again, and each from an old value."""
    x = operands(2, 10)
    ways = [operands(2, 6, seed=seed) for seed in (1, 2)]
    nan = tuple(torch.full_like(y, torch.nan) for y in ways[0])
    asked = operands(2, 1, seed=7)[0]
    for lengths in (None, [10, 4]):
        _, start = softmax_attention(*x, lengths=lengths, return_state=True)
        rows = [10, 10] if lengths is None else lengths
        run(split(nan, [2]), start)
        outs = [run(split(way, [1, 4]), start)[0] for way in ways]
        read = softmax_attention(asked, None, None, state=start, causal=False)
        for row, length in enumerate(rows):
            seen = tuple(y[row : row + 1, :length] for y in x)
            assert_close(read[row : row + 1], table(asked[row : row + 1], *seen[1:], causal=False))
            for way, out in zip(ways, outs, strict=True):
                whole = tuple(torch.cat([a, b[row : row + 1]], 1) for a, b in zip(seen, way, strict=True))
                assert_close(out[row : row + 1], table(*whole)[:, length:])


COPIES: dict[str, Callable[[KVCache], KVCache]] = {
    "clone": KVCache.clone,
    "fork": lambda s: s.fork(),
    "detach": KVCache.detach,
    "to": lambda s: s.to("cpu"),
    "select": lambda s: s.select([0, 1, 2]),
    "select a slice": lambda s: s.select(slice(0, 3)),
    "select a mask": lambda s: s.select(torch.tensor([True, True, True])),
    "cat of rows": lambda s: KVCache.cat([s.select(0), s.select([1, 2])]),
    "map": lambda s: s.map(torch.clone),
    "map to itself": lambda s: s.map(lambda x: x),
    "pytree": lambda s: pytree.tree_map(lambda x: x, s),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.load(io.BytesIO(pickle.dumps(s))),  # noqa: S301 (what multiprocessing does)
}


def saved(state: KVCache) -> KVCache:
    with tempfile.TemporaryDirectory() as folder:
        state.save(f"{folder}/cache.safetensors")
        loaded = Value.load(f"{folder}/cache.safetensors")
    assert isinstance(loaded, KVCache)
    return loaded


COPIES["saved"] = saved
ALIASES = ("map", "map to itself", "pytree", "copy", "deepcopy", "pickle")  # these may share memory, so they own none


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("lengths", [None, [9, 2, 0]])
@pytest.mark.parametrize("how", COPIES)
def test_copies_go_on_by_themselves(how, lengths, static):
    """A copy of an old value (others have gone on from it) and the value itself, appended to in turn."""
    x, more, other = operands(3, 9), operands(3, 5, seed=1), operands(3, 5, seed=2)
    start = KVCache.empty(3, 2, 5, 3, dtype=torch.float64, capacity=16, static=static)
    _, state = softmax_attention(*x, state=start, lengths=lengths, return_state=True)
    for newest in (True, False):
        if not newest:
            run([tuple(torch.full_like(y, torch.nan) for y in other)], state)
        want, want_other = (
            run([more])[0] if lengths == [0] * 3 else expected(x, more, lengths),
            expected(x, other, lengths),
        )
        copied = COPIES[how](state)
        assert not copied.newest or how not in ALIASES
        assert type(copied) is KVCache and copied.static == static and copied.lengths.tolist() == state.lengths.tolist()
        first, left = softmax_attention(*(y[:, :2] for y in more), state=copied, return_state=True)
        first_other, right = softmax_attention(*(y[:, :2] for y in other), state=state, return_state=True)
        assert_close(torch.cat([first, softmax_attention(*(y[:, 2:] for y in more), state=left)], 1), want)
        assert_close(
            torch.cat([first_other, softmax_attention(*(y[:, 2:] for y in other), state=right)], 1), want_other
        )


@pytest.mark.usefixtures("host")
def test_caches_of_different_lengths_join():
    """Different capacities, lengths and histories; rows then go on together."""
    short, long, more = operands(1, 3), operands(2, 100, seed=1), operands(3, 4, seed=2)
    joined = KVCache.cat([run(split(x, [1]))[1] for x in (short, long)])
    assert joined.lengths.tolist() == [3, 100, 100] and joined.capacity == 128
    out, joined = run(split(more, [1, 2]), joined)
    for rows, x in ((slice(0, 1), short), (slice(1, 3), long)):
        assert_close(out[rows], expected(x, tuple(y[rows] for y in more), None))
    back = joined.select([2, 0])
    assert back.lengths.tolist() == [104, 7]


def test_what_is_saved_and_counted(tmp_path):
    x = operands(2, 9)
    _, state = softmax_attention(*x, return_state=True)
    softmax_attention(*operands(2, 1, seed=1), state=state, return_state=True)
    assert state.capacity == 64 and state.nbytes == 2 * 64 * 2 * (5 + 3) * 8 + 2 * 8
    state.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache")
    assert loaded.capacity == 9, "neither the room behind the tokens, nor what others wrote there"
    assert torch.equal(loaded.k, x[1]) and torch.equal(loaded.v, x[2])
    static = KVCache.empty(2, 2, 5, 3, capacity=12, static=True)
    static.save(tmp_path / "static")
    assert KVCache.load(tmp_path / "static").capacity == 12


def allocated(step: Callable[[], Any]) -> int:
    """Bytes that the allocator hands out, by torch's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        step()
    return sum(max(event.self_cpu_memory_usage, 0) for event in record.key_averages())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [16, 8, 40])
@pytest.mark.parametrize("lengths", [None, [900, 1000, 3, 500]])
def test_a_step_does_not_copy_the_cache(dtype, values, lengths):
    x = tuple(y.to(dtype) for y in operands(4, 1000, 4, 2, 16, values))
    box = {"state": softmax_attention(*x, lengths=lengths, return_state=True)[1]}
    token = tuple(y[:, :1] for y in x)

    def step() -> None:
        _, box["state"] = softmax_attention(*token, state=box["state"], return_state=True)

    step()
    held, at = box["state"].nbytes, box["state"].k.data_ptr()
    assert 0 < allocated(step) < held // 10
    assert box["state"].k.data_ptr() == at
    old = box["state"]
    step()
    box["state"] = old
    assert allocated(step) > held // 2, "an old value is copied: this would have been seen"


def test_growing_is_amortised():
    token = operands(1, 1, 1, 1, 2, 2)
    places, state = set(), None
    for n in range(1, 513):
        _, state = softmax_attention(*token, state=state, return_state=True)
        places.add(state.k.data_ptr())
        assert n <= state.capacity < max(2 * n, 65)
    assert len(places) <= 4, "64, 128, 256, 512"


@pytest.mark.parametrize("values", [4, 2, 6])
@pytest.mark.parametrize("how", ["causal", "all", "lengths", "a prompt before"])
def test_no_table_of_all_pairs(how, values):
    """2,048² pairs are four million numbers; queries that share a mask need half a million booleans."""
    x = operands(1, 2048, 1, 1, 4, values)
    with Largest() as largest:
        if how == "a prompt before":
            out = run(split(x, [1000]))[0]
        else:
            out = softmax_attention(*x, causal=how != "all", lengths=[2000] if how == "lengths" else None)
    assert 2048 * values <= largest.numbers <= 256 * 2048
    where = slice(0, 2000 if how == "lengths" else 2048)
    assert_close(out[:, where], table(*(y[:, where] for y in x), causal=how != "all"))


def test_nobody_waits_for_the_device():
    """On the meta device there are no values: whoever looks at one fails."""
    q, k, v = (y.to("meta") for y in operands(2, 6))
    lengths = torch.tensor([3, 6]).to("meta")
    token = tuple(y[:, :1] for y in (q, k, v))
    for static in (False, True):
        state = KVCache.empty(2, 2, 5, 3, dtype=torch.float64, device="meta", static=static)
        with torch.no_grad():
            _, state = softmax_attention(q, k, v, state=state, lengths=lengths, return_state=True)
            for _ in range(3):
                out, state = softmax_attention(*token, state=state, return_state=True, donate=static)
            out = softmax_attention(token[0], None, None, state=state.clone(), causal=False)
        assert out.shape == (2, 1, 4, 3) and state.lengths.shape == (2,)


@torch.no_grad()
@pytest.mark.usefixtures("host")
def test_a_static_cache_stays_where_it_is():
    """Shapes and addresses are those of the first step: what a CUDA graph needs. Values are those of a growing one."""
    x = operands(2, 12)
    state = KVCache.empty(2, 2, 5, 3, dtype=torch.float64, capacity=12, static=True)
    places = [y.data_ptr() for y in (state.k, state.v, state.lengths)]
    outs = []
    for piece in split(x, [5, *range(6, 12)]):
        old = state
        out, state = softmax_attention(*piece, state=state, return_state=True, donate=True)
        with pytest.raises(ValueError, match=r"(?s)donat.*clone"):
            _ = old.k
        outs.append(out)
        assert [y.data_ptr() for y in (state.k, state.v, state.lengths)] == places
    assert_close(torch.cat(outs, 1), table(*x))
    assert state.capacity == 12 and state.lengths.tolist() == [12, 12]


@torch.no_grad()
def test_a_static_cache_without_donation_is_a_value():
    x, y = operands(2, 6), operands(2, 6, seed=1)
    start = KVCache.empty(2, 2, 5, 3, dtype=torch.float64, capacity=12, static=True)
    _, state = softmax_attention(*x, state=start, return_state=True)
    outs = [run(split(y, cuts), state)[0] for cuts in ([1, 2], [3])]
    for out in outs:
        assert_close(out, expected(x, y, None))
    assert start.lengths.tolist() == [0, 0] and state.lengths.tolist() == [6, 6]


def test_where_lengths_are_unknown_a_full_cache_drops_tokens(monkeypatch):
    """No host can raise without waiting for the device; what was there stays."""
    x = operands(2, 6)
    state = KVCache.empty(2, 2, 5, 3, dtype=torch.float64, capacity=4, static=True)
    with pytest.raises(ValueError, match=r"capacity is 4 tokens.*needs 6"):
        softmax_attention(*x, state=state, return_state=True)
    monkeypatch.setattr(buffers, "_measured", lambda lengths, bound: (bound, False))
    _, state = softmax_attention(*x, state=state, return_state=True)
    _, state = softmax_attention(*(y[:, :1] for y in x), state=state, return_state=True)
    assert state.lengths.tolist() == [4, 4] and torch.equal(state.k, x[1][:, :4]) and torch.equal(state.v, x[2][:, :4])


@torch.no_grad()
@pytest.mark.usefixtures("host")
def test_donating_a_growing_cache():
    x = operands(2, 150)
    state, outs = KVCache.empty(2, 2, 5, 3, dtype=torch.float64, capacity=1), []
    for piece in split(x, list(range(1, 150))):
        out, state = softmax_attention(*piece, state=state, return_state=True, donate=True)
        outs.append(out)
    assert_close(torch.cat(outs, 1), table(*x))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_is_eager():
    compiled = torch.compile(softmax_attention, fullgraph=True, backend="eager")
    for options in ({}, {"causal": False}, {"lengths": torch.tensor([5, 15])}):
        leaves = [tuple(y.clone().requires_grad_() for y in operands()) for _ in range(2)]
        got, want = compiled(*leaves[0], **options), softmax_attention(*leaves[1], **options)
        assert_close(got, want)
        grads = [torch.autograd.grad(out.square().sum(), x) for out, x in zip((got, want), leaves, strict=True)]
        for one, other in zip(*grads, strict=True):
            assert_close(one, other)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_steps(static):
    """Steps of a static cache compile a few times and then no more, and stay in its memory."""
    counter, x = CompileCounterWithBackend("eager"), operands(2, 9)

    def step(state: KVCache, *x: Tensor) -> tuple[Tensor, KVCache]:
        return softmax_attention(*x, state=state, return_state=True, donate=static)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    state = KVCache.empty(2, 2, 5, 3, dtype=torch.float64, static=static)
    outs, place = [], state.k.data_ptr()
    for piece in split(x, list(range(1, 9))):
        out, state = compiled(state, *piece)
        outs.append(out)
    assert_close(torch.cat(outs, 1), table(*x))
    assert counter.frame_count <= 3
    assert (state.k.data_ptr() == place) == static
