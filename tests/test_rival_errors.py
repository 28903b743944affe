"""Wrong calls of the rivals: each is a ValueError that says what was seen, what was expected, and the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from softmax_table import operands
from torch import Tensor
from wrong_calls import Wrong, assert_refused

from linattn.ops.reformer import LSHState, reformer_attention
from linattn.ops.softmax import KVCache, softmax_attention

# The annotations would catch many of these before our own checks do, with messages of their own.
pytestmark = pytest.mark.usefixtures("unchecked")


def attend(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Any:
    """A right call but for what is given."""
    right = operands(2, 5, 4, 4, 3, 3)
    return softmax_attention(*(y if x is None else x for x, y in zip((q, k, v), right, strict=True)), **options)


def cache(batch: int = 2, heads: int = 4, width: int = 3, values: int = 3, **options: Any) -> KVCache:
    return KVCache.empty(batch, heads, width, values, **{"dtype": torch.float64, **options})


def used_up() -> KVCache:
    given = cache()
    attend(state=given, return_state=True, donate=True)
    return given


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def hash_attend(qk: Any = None, v: Any = None, **options: Any) -> Any:
    """A right call but for what is given."""
    qk, v = (ones(2, 5, 4, 3) if x is None else x for x in (qk, v))
    return reformer_attention(qk, v, **options)


def hashed(batch: int = 2, values: int = 3, rounds: int = 4, **options: Any) -> LSHState:
    draw = torch.zeros(rounds, 2, 4, 3, 8)
    return LSHState.empty(batch, values, draw, **{"dtype": torch.float64, **options})


DRAW = torch.zeros(4, 2, 4, 3, 8)
SOFTMAX = {
    "three axes": Wrong(lambda: attend(ones(5, 4, 3)), r"q\b.*\(5, 4, 3\)", "batch, time, heads"),
    "other dtypes": Wrong(lambda: attend(ones(2, 5, 4, 3).float()), "torch.float32.*torch.float64", "share", "cast"),
    "another time under causal": Wrong(
        lambda: attend(ones(2, 6, 4, 3)), r"\(2, 6, 4, 3\)", "same time", "causal=False"
    ),
    "heads that do not divide": Wrong(lambda: attend(ones(2, 5, 3, 3)), r"\b3 % 4\b", "multiple"),
    "a scale of zero": Wrong(lambda: attend(scale=0.0), r"scale.*\b0", "positive"),
    "a length beyond the time": Wrong(lambda: attend(lengths=[6, 5]), "lengths.*6", r"between 0 and.*\b5\b"),
    "lengths of queries under causal": Wrong(
        lambda: attend(q_lengths=[5, 5]), "q_lengths", "causal=True", "causal=False"
    ),
    "a tensor for a cache": Wrong(lambda: attend(state=ones(2, 5, 4, 3)), "Tensor", "KVCache"),
    "a cache for another batch": Wrong(lambda: attend(state=cache(3)), r"\(3, 64, 4, 3\)", r"\(2, 64, 4, 3\)", "batch"),
    "a cache of other heads": Wrong(lambda: attend(state=cache(heads=2)), r"\(2, 64, 2, 3\)", r"\(2, 64, 4, 3\)"),
    "a cache of other values": Wrong(
        lambda: attend(state=cache(values=1)), r"state.v.*\(2, 64, 4, 1\)", r"\(2, 64, 4, 3\)"
    ),
    "a cache of another dtype": Wrong(
        lambda: attend(state=cache(dtype=torch.float32)), "torch.float32", "torch.float64"
    ),
    "a cache on another device": Wrong(lambda: attend(state=cache(device="meta")), "meta.*cpu", "state", r"\.to\("),
    "a cache with other lengths": Wrong(
        lambda: attend(state=KVCache(ones(2, 1, 4, 3), ones(2, 1, 4, 3), torch.tensor([1]))), r"\(1,\)", r"\(2,\)"
    ),
    "a full static cache": Wrong(
        lambda: attend(state=cache(capacity=4, static=True), return_state=True),
        "needs 5",
        "capacity is 4",
        "static=False",
    ),
    "a cache that was given away": Wrong(lambda: attend(state=used_up()), "donated", "gone", "clone"),
    "k without v": Wrong(
        lambda: softmax_attention(ones(2, 5, 4, 3), ones(2, 5, 4, 3), None), "k was given without v", "both"
    ),
    "reading without a cache": Wrong(
        lambda: softmax_attention(ones(2, 5, 4, 3), None, None, causal=False), "None", "state="
    ),
    "reading causally": Wrong(
        lambda: softmax_attention(ones(2, 5, 4, 3), None, None, state=cache()), "causal=True", "adds no", "causal=False"
    ),
    "reading with no q": Wrong(
        lambda: softmax_attention(None, None, None, state=cache(), causal=False),  # type: ignore[call-overload]
        r"q\b.*NoneType",
        "tensor",
    ),
    "donating nothing": Wrong(lambda: attend(donate=True, return_state=True), "no state", "state="),
    "donating without taking the cache back": Wrong(
        lambda: attend(state=cache(), donate=True), "return_state", "return_state=True"
    ),
    "donating what gradients need": Wrong(
        lambda: attend(ones(2, 5, 4, 3).requires_grad_(), state=cache(), return_state=True, donate=True),
        "donate=True",
        "gradients",
        "no_grad",
    ),
    "no capacity": Wrong(lambda: cache(capacity=0), r"capacity.*\b0", "at least 1"),
    "a cache of integers": Wrong(lambda: cache(dtype=torch.int64), "torch.int64", "torch.float32"),
    "joined caches, one static": Wrong(lambda: KVCache.cat([cache(), cache(static=True)]), "static", "both"),
    "joined caches of two widths": Wrong(
        lambda: KVCache.cat([cache(), cache(values=2)]), r"\(2, 64, 4, 2\)", "equal shapes"
    ),
    "no caches to join": Wrong(lambda: KVCache.cat([]), "empty", "at least one"),
}


REFORMER = {
    "three axes": Wrong(lambda: hash_attend(ones(5, 4, 3)), r"\(5, 4, 3\)", "batch, time, heads"),
    "another time": Wrong(lambda: hash_attend(v=ones(2, 6, 4, 3)), r"\(2, 6, 4, 3\)", "agree"),
    "fewer heads for values": Wrong(lambda: hash_attend(v=ones(2, 5, 2, 3)), r"\(2, 5, 2, 3\)", "heads"),
    "no rounds": Wrong(lambda: hash_attend(rounds=0), r"rounds.*\b0", "at least 1"),
    "half a chunk": Wrong(lambda: hash_attend(chunk_length=0.5), r"chunk_length.*0\.5", "whole number"),
    "a chunk of True": Wrong(lambda: hash_attend(chunk_length=True), r"chunk_length.*True", "whole number"),
    "a length beyond the time": Wrong(lambda: hash_attend(lengths=[6, 5]), "lengths.*6", r"between 0 and.*\b5\b"),
    "a draw of other rounds": Wrong(lambda: hash_attend(rotations=DRAW, rounds=2), r"\(4, 2, 4, 3, 8\)", r"2, 2, 4, 3"),
    "a draw of other heads": Wrong(lambda: hash_attend(rotations=DRAW[:, :, :2]), r"\(4, 2, 2, 3, 8\)", r"4, 2, 4, 3"),
    "a draw without columns": Wrong(lambda: hash_attend(rotations=DRAW[..., :0]), r"\(4, 2, 4, 3, 0\)", "at least 1"),
    "a draw of integers": Wrong(
        lambda: hash_attend(rotations=DRAW.long()), "torch.int64", "floating", "draw_rotations"
    ),
    "a draw on another device": Wrong(lambda: hash_attend(rotations=DRAW.to("meta")), "meta.*cpu", "move"),
    "two draws": Wrong(
        lambda: hash_attend(rotations=DRAW, generator=torch.Generator()), "rotations=.*generator=", "pass one"
    ),
    "a draw beside that of a state": Wrong(lambda: hash_attend(rotations=DRAW, state=hashed()), "state=", "pass one"),
    "a state of other rounds": Wrong(
        lambda: hash_attend(state=hashed(rounds=2)), r"rotations.*\(2, 2, 2, 4, 3, 8\)", r"2, 4, 2, 4, 3", "rounds=4"
    ),
    "a cache for a state": Wrong(lambda: hash_attend(state=cache()), "KVCache", "LSHState"),
    "a state for a cache": Wrong(lambda: attend(state=hashed()), "LSHState", "KVCache"),
    "a state for another batch": Wrong(lambda: hash_attend(state=hashed(3)), r"\(3, 64, 4, 3\)", r"\(2, 64, 4, 3\)"),
    "a state of other values": Wrong(lambda: hash_attend(state=hashed(2, 1)), r"\(2, 64, 4, 1\)", r"\(2, 64, 4, 3\)"),
    "donating nothing": Wrong(lambda: hash_attend(donate=True, return_state=True), "no state", "state="),
    "donating without taking the state back": Wrong(
        lambda: hash_attend(state=hashed(), donate=True), "return_state", "return_state=True"
    ),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_wrong_call_of_softmax(name):
    assert_refused(SOFTMAX[name])


@pytest.mark.parametrize("name", REFORMER)
def test_wrong_call_of_reformer(name):
    assert_refused(REFORMER[name])
