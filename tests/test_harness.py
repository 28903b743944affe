"""The tests' own instruments are live: each is shown something false and must refuse it."""

from __future__ import annotations

import subprocess
import sys
import warnings

import hypothesis
import jaxtyping
import numpy as np
import pytest
import torch
from helpers import assert_as_accurate

import linattn._typing

MODULE = """
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from linattn._typing import Float, Tensor


def add(q: Float[Tensor, "B T D"], k: Float[Tensor, "B T D"] | None = None, *, how: str | Callable = "sum"):
    return q if k is None else q + k


def lying(q: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    return q.sum(-1).mT


@dataclass(frozen=True)
class Value:
    kv: Float[Tensor, "B H C M"]
    z: Float[Tensor, "B H C"] | None


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of linattn as any other: with postponed annotations, imported through the hook."""
    (tmp_path / "toy.py").write_text(MODULE)
    monkeypatch.setattr(linattn, "__path__", [*linattn.__path__, str(tmp_path)])
    import linattn.toy as toy  # pyright: ignore[reportMissingImports]

    yield toy
    del sys.modules["linattn.toy"]
    del linattn.toy  # pyright: ignore[reportAttributeAccessIssue]


X = torch.arange(24.0).view(2, 3, 4)
FALSE_CALLS = {
    "too few axes": lambda m: m.add(X[0]),
    "axes that disagree": lambda m: m.add(X, X[:1]),
    "a wrong dtype": lambda m: m.add(X.long()),
    "a wrong option": lambda m: m.add(X, how=3),
    "a lying output": lambda m: m.lying(X),
    "a dataclass": lambda m: m.Value(X[None], X[None]),
    "an autograd function": lambda m: m.Double.apply(X),
}


@pytest.mark.parametrize("call", FALSE_CALLS.values(), ids=FALSE_CALLS)
def test_annotations_are_executed(module, call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call(module)


def test_true_annotations_pass(module):
    assert module.add(X, X).equal(2 * X)
    assert module.Value(kv=X[None], z=None).kv.shape == (1, 2, 3, 4)
    x = X[0].clone().requires_grad_()
    module.Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.eq(2).all()


def test_unchecked_annotations_are_inert(module, unchecked):
    assert module.lying(X).shape == (3, 2)
    assert torch.compile(module.add, fullgraph=True, backend="eager")(X, X).equal(2 * X)


def test_annotations_are_plain_without_jaxtyping():
    script = "from linattn._typing import Float, Tensor; assert Float[Tensor, 'B T'] is Tensor"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uninitialised_memory_is_nan(dtype):
    x = torch.ones(3, dtype=dtype)
    for empty in (
        torch.empty(3, dtype=dtype),
        torch.empty_like(x),
        x.new_empty(3),
        torch.empty_strided((3,), (2,), dtype=dtype),
    ):
        assert empty.isnan().all()
    assert torch.empty(3, dtype=torch.int64).eq(torch.iinfo(torch.int64).max).all()


def test_a_warning_is_an_error():
    with pytest.raises(RuntimeWarning, match="careless"):
        warnings.warn("careless", RuntimeWarning, stacklevel=1)


def test_hypothesis_is_repeatable():
    profile = hypothesis.settings()
    assert profile.derandomize and profile.deadline is None


# Sums of 64 positive bf16 numbers: rounded once at the end (what we ship), and added up in bf16 (what nobody should).
def bf16_sums():
    x = torch.rand(100, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.from_numpy(x.double().numpy().sum(1, dtype=np.float64))
    return x.float().sum(1).bfloat16(), exact, x.cumsum(1, dtype=torch.bfloat16)[:, -1]


def test_accuracy_is_measured():
    good, exact, _ = bf16_sums()
    assert_as_accurate(good, exact, good)
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate((good.float() * 1.03).bfloat16(), exact, good)
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(torch.full_like(good, torch.nan), exact, good)


def test_a_tolerance_that_zeros_would_pass_is_refused():
    good, exact, _ = bf16_sums()
    for plain in (torch.zeros_like(good), torch.full_like(good, torch.nan), good.roll(1) * 0.9):
        with pytest.raises(AssertionError, match="zeros nearly pass"):
            assert_as_accurate(good, exact, plain)


def test_shapes_and_dtypes_are_compared_too():
    good, exact, _ = bf16_sums()
    for arguments in ((good[:1], exact, good), (good, exact.float(), good), (good, exact, good.float())):
        with pytest.raises(AssertionError, match=r"shape|float64|dtype"):
            assert_as_accurate(*arguments)
