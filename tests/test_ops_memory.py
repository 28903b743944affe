"""Memory on the CPU: large results lie on large pages where Linux has them, small ones are left alone."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from linattn import linear_attention
from linattn.ops import memory

linux_only = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"), reason="large pages on request: Linux only"
)


def asked_for_large_pages(x: torch.Tensor) -> bool:
    """What the system says of the mapping in the middle of x: "hg" among its flags."""
    middle, inside = x.data_ptr() + x.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("no mapping holds the tensor")


@linux_only
def test_large_results_lie_on_large_pages():
    like = torch.zeros(1)
    assert asked_for_large_pages(memory.empty((memory.LARGE // 4,), like))
    assert not asked_for_large_pages(torch.empty(2 * memory.LARGE // 4))


@linux_only
def test_the_operators_results_do(monkeypatch):
    monkeypatch.setattr(memory, "LARGE", 2**23)
    tokens = memory.LARGE // 4 // 64
    q, k, v = (torch.randn(1, tokens, 1, 64).requires_grad_() for _ in range(3))
    out = linear_attention(q, k, v, impl="chunked")
    assert asked_for_large_pages(out)
    assert all(asked_for_large_pages(g) for g in torch.autograd.grad(out, (q, k, v), v.detach()))


def test_dtype_and_shape_are_those_asked_for():
    made = memory.empty(torch.Size((3, 5)), torch.zeros(2, dtype=torch.bfloat16))
    assert made.shape == (3, 5) and made.dtype == torch.bfloat16
