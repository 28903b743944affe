"""The GPU's kernels, interpreted on the CPU, against the oracle: outputs, final states and every gradient.

The interpreter runs the kernels' own source with numpy; what a GPU adds (narrow products, layouts, races) is for
`python -m benchmarks.gpu_check` there. Where a GPU is found, the same tests run on it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import Case, assert_matches_oracle, assert_near, assert_same, expected, make_inputs, run_case

pytest.importorskip("triton", reason="Triton is not made for this system")
import interpreted

from linattn.ops.triton import run as kernels
from linattn.ops.triton.table import Filling

interpreted.quicken()
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are checked by gpu_check")

# (batch, time, keys, heads, kv_heads, width, values): grouped heads, M ≠ D, lengths around and far from any tile's
SHAPES = (
    (2, 1, None, 1, 1, 16, 16),
    (1, 15, None, 2, 1, 24, 5),
    (1, 33, None, 1, 1, 64, 48),
    (1, 100, None, 1, 1, 16, 100),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# float16 takes float32's way but for the plan of the backward pass, which only causal calls have
STYLES = tuple(s for s in product((True, False), (True, False), DTYPES) if s[0] or s[2] != torch.float16)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "lengths": (2, {"lengths": [260, 0]}),
    "packed": (1, {"cu_seqlens": [0, 1, 1, 150, 280]}),
}


@pytest.fixture
def cut(monkeypatch) -> Iterator[Callable[[str], None]]:
    """Makes short sequences go the ways of long ones: "segments" in parallel, or "rewound" one after the other."""

    def choose(way: str) -> None:
        monkeypatch.setattr(kernels, "filling", lambda *_: Filling(2 if way == "segments" else 0, 128))
        monkeypatch.setattr(kernels, "SHORT", 64)
        monkeypatch.setattr(kernels, "REWIND", 128)
        monkeypatch.setattr(kernels, "widest_sweep", lambda: 64 if way == "rewound" else 0)
        kernels.plan.cache_clear()

    yield choose
    kernels.plan.cache_clear()


def named(case: Case) -> Any:
    words = ("causal" if case.causal else "full", "mean" if case.normalize else "sum", case.feature_map)
    return pytest.param(case, id="-".join((*words, f"T{case.time}", f"D{case.width}", str(case.dtype)[6:])))


def grid() -> Iterator[Any]:
    """Every style (causal, normalised, dtype) at every shape; the map moves on with both."""
    for (s, shape), (n, (causal, normalize, dtype)) in product(enumerate(SHAPES), enumerate(STYLES)):
        name = oracle.ELEMENTWISE[(s + n) % len(oracle.ELEMENTWISE)]
        yield named(Case(*shape, dtype, name, "triton", causal, normalize, seed=n))


def check(case: Case) -> None:
    x = make_inputs(case)
    got, exact, plain = run_case(case, x), expected(case, x), expected(case, x, np.float32)
    assert got.keys() == exact.keys()
    for name, tensor in got.items():
        if name in ("dkv", "dz"):  # kernels that make sums of gradients read the output, which is rounded to its dtype
            tensor = tensor.to(case.dtype)
        assert_near(name, tensor, exact[name], plain[name], factor=8)


@pytest.mark.parametrize("case", list(grid()))
def test_against_the_oracle(case):
    check(case)


LONG = {  # way and dtype: the layouts of each; every one with a mean and as a sum
    ("segments", torch.float32): (("lengths", True), ("packed", False)),
    ("segments", torch.bfloat16): (("plain", False), ("lengths", False), ("packed", True)),
    ("rewound", torch.bfloat16): (
        ("plain", True),
        ("lengths", False),
        ("packed", True),
        ("plain", False),
        ("lengths", True),
    ),
}


@pytest.mark.parametrize(
    ("way", "dtype", "layout", "normalize"),
    [(*key, *style) for key, styles in LONG.items() for style in styles],
    ids=str,
)
def test_long_sequences(cut, way, dtype, layout, normalize):
    cut(way)
    batch, ends = LAYOUTS[layout]
    check(Case(batch, 290, None, 2, 1, 24, 16, dtype, "softplus", "triton", True, normalize, layout=ends))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", ["lengths", "packed"])
def test_layouts(layout, causal):
    batch, ends = (3, {"lengths": [7, 0, 33]}) if layout == "lengths" else (1, {"cu_seqlens": [0, 1, 1, 20, 33]})
    more = {"q_lengths": [20, 3, 0]} if layout == "lengths" and not causal else {}
    check(Case(batch, 33, None, 2, 1, 8, 6, torch.float32, impl="triton", causal=causal, layout=ends | more))


@pytest.mark.parametrize(("time", "keys"), [(1, 33), (33, 1), (15, 600)])
def test_cross_attention(time, keys):
    check(Case(1, time, keys, 2, 1, 8, 6, torch.float32, impl="triton", causal=False, seed=time))


def test_packed_cross_attention():
    layout = {"cu_seqlens": [0, 9, 9, 33], "cu_seqlens_q": [0, 2, 5, 20]}
    check(Case(1, 20, 33, 2, 1, 5, 3, torch.float32, impl="triton", causal=False, layout=layout))


@pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize(
    ("width", "values", "dtype"),
    [(256, 256, torch.bfloat16), (100, 130, torch.bfloat16), (200, 40, torch.float32)],
    ids=str,
)
def test_wide_heads(width, values, dtype, normalize):
    """Wider than one program's registers: blocks of features, blocks of values."""
    check(Case(1, 40, None, 1, 1, width, values, dtype, "elu", "triton", True, normalize))


def test_wide_heads_in_segments(cut):
    cut("segments")
    check(Case(1, 290, None, 1, 1, 72, 80, torch.bfloat16, "relu", "triton", True, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", oracle.ELEMENTWISE)
def test_maps_with_a_scale(name, dtype):
    check(Case(1, 20, dtype=dtype, feature_map=name, impl="triton", stateful=False, scale=0.5, width=8))


@pytest.mark.parametrize("watch", [("out",), ("kv",), ("z",)], ids="-".join)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_gradients_of_one_result_alone(causal, watch):
    case = Case(1, 33, None, 2, 1, 5, 3, torch.float32, impl="triton", causal=causal)
    x = make_inputs(case)
    assert_matches_oracle(run_case(case, x, watch=watch), case, x, watch=watch)


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of wider rows": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every other token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "the width first": lambda x: x.movedim(3, 0).contiguous().movedim(0, 3),
    "not on 16 bytes": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


DENSE = Case(2, 20, None, 2, 2, 8, 8, torch.float32, impl="triton")


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides):
    x = make_inputs(DENSE)
    strange = {name: STRIDES[strides](t) if name in ("q", "k", "v", "g") else t for name, t in x.items()}
    got, want = run_case(DENSE, strange), run_dense()
    for name in want:
        assert_same(name, got[name], want[name])


@functools.cache
def run_dense() -> dict[str, torch.Tensor]:
    return run_case(DENSE, make_inputs(DENSE))


def test_dtypes_of_results():
    for dtype in DTYPES:
        got = run_case(Case(1, 3, None, 1, 1, 8, 6, dtype, impl="triton"))
        assert {got[name].dtype for name in ("out", "dq", "dk", "dv")} == {dtype}
        assert {got[name].dtype for name in ("kv", "z", "dkv", "dz")} == {torch.float32}
