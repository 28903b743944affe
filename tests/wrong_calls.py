"""A wrong call of the operator as a value: the call, and three patterns that its message must match."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from linattn import State, linear_attention


class Wrong(NamedTuple):
    """The patterns: the value that was seen, what was expected, and the way out (where that says more)."""

    call: Callable[[], Any]
    seen: str
    expected: str
    way_out: str = ""


def assert_refused(wrong: Wrong) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 (the three patterns below)
        wrong.call()
    message = str(raised.value)
    for pattern in (wrong.seen, wrong.expected, wrong.way_out):
        assert re.search(pattern, message, re.DOTALL), f"{message!r} does not say {pattern!r}"
    assert type(raised.value) is ValueError


def tokens(batch: int = 2, time: int = 5, heads: int = 4, width: int = 3, **kwargs: Any) -> Tensor:
    return torch.ones(batch, time, heads, width, **kwargs)


def attend(q: Any = None, k: Any = None, v: Any = None, *, batch: int = 2, time: int = 5, **options: Any) -> Any:
    """A right call but for what is given."""
    q = tokens(batch, time) if q is None else q
    k = tokens(batch, time) if k is None else k
    return linear_attention(q, k, tokens(batch, time) if v is None else v, **options)


attend_to: Any = linear_attention  # for what the annotations forbid


def packed(**options: Any) -> Any:
    return attend(batch=1, **options)


def state(batch: int = 2, heads: int = 4, features: int = 3, values: int = 3, **kwargs: Any) -> State:
    return State.empty(batch, heads, features, values, **kwargs)
