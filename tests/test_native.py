"""The native CPU library by itself: instruction sets, threads, forks, memory it must not touch. The tables of the
operator (test_ops_*.py) run over it as over every implementation."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import Case, assert_agree, assert_near, expected, make_inputs, run, run_case
from hypothesis import given, settings
from hypothesis import strategies as st
from native_check import attend, worst
from oracle import POSITIVE

from linattn import backends, linear_attention
from linattn.features import ElementwiseMap, resolve
from linattn.ops import cpu

pytestmark = pytest.mark.skipif(not backends()["native"][0], reason=backends()["native"][1])
AVAILABLE = cpu.LIBRARY.linattn_available().decode().split() if cpu.LIBRARY is not None else []


def in_process(what: str, **environment: str) -> str:
    """What native_check says in a process of its own."""
    script = Path(__file__).with_name("native_check.py")
    run = subprocess.run(
        [sys.executable, str(script), what],
        check=False,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("isa", AVAILABLE)
def test_every_instruction_set(isa):
    """Forced by LINATTN_ISA; compared with plain torch in float64, gradients and states too."""
    assert in_process("isa", LINATTN_ISA=isa) == f"native CPU library, {isa} instructions"


def test_an_unknown_instruction_set_is_said():
    code = "import linattn; print(linattn.backends()['native'])"
    command, environment = [sys.executable, "-c", code], os.environ | {"LINATTN_ISA": "mmx"}
    run = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("(False") and "mmx" in run.stdout and "scalar" in run.stdout


@pytest.mark.parametrize("name", cpu.MAPS)
def test_feature_maps(name):
    """Values and slopes against torch in float64, from where exp ends to where it is held."""
    x = torch.cat([torch.linspace(-100, 100, 20_011), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -87.0, 3e38])])
    got, slope = cpu.feature_map(name, x)
    feature_map = resolve(name)
    assert isinstance(feature_map, ElementwiseMap)
    plain = feature_map(x)  # where a map is held to fp32's range, fp32 is the definition
    exact = torch.where(x.abs() < 80, feature_map(x.double()), plain.double())
    exact_slope = torch.where(x.abs() < 80, feature_map.derivative(x.double(), exact), feature_map.derivative(x, plain))
    for y, want in ((got, exact), (slope, exact_slope)):
        finite = want.abs() < 1e38
        assert torch.equal(y.isfinite(), plain.isfinite() if y is got else y.isfinite())
        error = ((y - want).abs() / want.abs().clamp_min(1e-30))[finite]
        assert error.max() < 5e-7, f"{error.max():.1e} at {x[finite][error.argmax()]}"
    assert cpu.feature_map(name, torch.full((3,), torch.nan))[0].isnan().all()


def test_forks_and_data_loaders():
    assert in_process("fork") == "forked"


def test_nothing_spins_when_nothing_is_asked_for():
    assert float(in_process("idle")) < 0.1


def test_several_python_threads_at_once():
    """One has the pool, the others run alone, and all get the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = [attend(seed) for seed in range(8)]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(20):
                assert list(pool.map(attend, range(8))) == want
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("causal", [True, False])
def test_several_segments(causal, mean):
    """Values far from zero, over borders at which the backward pass makes its sums anew."""
    assert worst((1, 1400, 2, 1, 64, 64), causal=causal, mean=mean) < 8


LENGTHS = {"lengths": torch.tensor([4500])}
PACKED = {"cu_seqlens": torch.tensor([0, 2900, 2900, 5000])}
LONG = {
    "state": Case(heads=1, width=20, values=33),
    "no state": Case(heads=1, width=20, values=33, stateful=False, feature_map="softplus"),
    "a group": Case(heads=2, width=33, values=17, layout=LENGTHS),
    "packed": Case(heads=1, normalize=False, layout=PACKED),
    "bf16": Case(heads=2, width=16, values=16, dtype=torch.bfloat16, layout=LENGTHS),
    "eps": Case(heads=1, feature_map="identity", layout=LENGTHS),  # values are not counted from their mean
    "full": Case(heads=1, width=20, values=33, causal=False),
    "full, few keys": Case(heads=2, width=16, values=16, causal=False, keys=130, feature_map="softplus"),
    "full, packed, bf16": Case(heads=1, width=16, values=16, causal=False, dtype=torch.bfloat16, layout=PACKED),
}


def on_threads(count: int, case: Case, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return run_case(case, x)
    finally:
        torch.set_num_threads(before)


def test_outputs_that_do_not_stay_in_the_cache():
    """Those of 16 MB are stored in another way than halves of them: the same bits."""
    q, k, v = torch.randn(3, 1, 8192, 8, 64, generator=torch.Generator().manual_seed(0))
    whole = linear_attention(q, k, v, impl="native")
    left, state = linear_attention(q[:, :4096], k[:, :4096], v[:, :4096], impl="native", return_state=True)
    right = linear_attention(q[:, 4096:], k[:, 4096:], v[:, 4096:], impl="native", state=state)
    assert torch.equal(whole, torch.cat([left, right], 1))


@pytest.mark.parametrize("name", LONG)
def test_parts_of_a_sequence(name):
    """More threads than heads: against float64, against one thread, and the same bits each time."""
    case = replace(LONG[name], batch=1, time=5000, kv_heads=1, impl="native")
    x = make_inputs(case)
    if case.causal:
        x["v"][:, :2000] += 5  # parts whose values have different means
    options = case.options | {"impl": "chunked"}
    exact = run({name: t.double() for name, t in x.items()}, stateful=case.stateful, **options)
    plain = run({name: t.float() for name, t in x.items()}, stateful=case.stateful, **options)
    num_threads = 6 if case.layout is PACKED else 2  # three sequences are three heads
    alone, got = on_threads(1, case, x), on_threads(num_threads, case, x)
    for result, tensor in got.items():
        assert_near(result, tensor, exact[result], plain[result], 8.0)
    assert_agree(got, alone, 10.0)
    assert any(not torch.equal(got[result], alone[result]) for result in got), "it was not cut: nothing was tested"
    again = on_threads(num_threads, case, x)
    assert all(torch.equal(got[result], again[result]) for result in got)


@st.composite
def any_call(draw: st.DrawFn) -> Case:
    kv_heads, causal = draw(st.integers(1, 3)), draw(st.booleans())
    time = draw(st.integers(1, 150))
    return Case(
        batch=draw(st.integers(1, 3)),
        time=time,
        keys=None if causal else draw(st.integers(1, 150)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        width=draw(st.integers(1, 70)),
        values=draw(st.integers(1, 70)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        feature_map=draw(st.sampled_from(POSITIVE)),
        impl="native",
        causal=causal,
        normalize=draw(st.booleans()),
        stateful=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.25])),
        seed=draw(st.integers(0, 2**16)),
    )


@given(any_call(), st.permutations(range(4)), st.integers(0, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_shape_and_strides(case, order, gap):
    """Whatever lies where: axes in any order in memory, rows apart, compared with the definition in float64."""
    x = make_inputs(case)

    def laid_out(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full([t.shape[axis] + gap for axis in order], torch.nan, dtype=t.dtype)
        place = [order.index(axis) for axis in range(4)]
        view = wide.permute(place)[tuple(slice(gap, None) for _ in range(4))]
        return view.copy_(t)

    y = x | {name: laid_out(x[name]) for name in ("q", "k", "v", "g")}
    got, exact, plain = run(y, stateful=case.stateful, **case.options), expected(case, x), expected(case, x, np.float32)
    for name, tensor in got.items():
        # Not assert_as_accurate: where a result is a handful of numbers, plain float32 may happen to hit them all.
        scale, narrow = max(exact[name].abs().max().item(), 1e-2), torch.finfo(tensor.dtype).eps
        allowed = 8 * (plain[name].double() - exact[name]).abs().max().item() + 8 * 2**-23 * scale
        allowed += narrow * scale if tensor.dtype == torch.bfloat16 else 0.0
        error = (tensor.double() - exact[name]).abs().max().item()
        assert error <= allowed < 0.1 * scale, f"{name}: error {error:.1e}, allowed {allowed:.1e} of {scale:.1e}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_refused_by_name_and_left_by_auto(dtype):
    q = torch.randn(1, 5, 2, 4).to(dtype)
    with pytest.raises(ValueError, match=f"native.*{dtype}.*auto"):
        linear_attention(q, q, q, impl="native")
    assert linear_attention(q, q, q).dtype == dtype


def test_what_does_not_belong_together_never_reaches_the_library(unchecked):
    """The opaque op checks little itself: sizes that would be read out of bounds are refused before the call."""
    q, options = torch.randn(1, 8, 2, 4), ("elu", True, True, 1.0, None, "native", True, False)
    short, none = torch.randn(1, 8, 2, 2), (None,) * 4
    for wrong in (
        (q, short, q),
        (q, q, torch.randn(1, 4, 2, 4)),
        (q, torch.randn(1, 8, 3, 4), torch.randn(1, 8, 3, 4)),
    ):
        with pytest.raises(ValueError, match="do not belong together"):
            torch.ops.linattn.attention(*wrong, *none, *none, *options)
    cut = torch.tensor([0, 100, 7, -5, 1 << 40])  # nobody checked these: clamped, nothing outside is touched
    out = torch.ops.linattn.attention(q, q, q, *none, None, None, cut, None, *options)[0]
    assert np.isfinite(out.numpy()).all()


def test_auto_takes_it(monkeypatch):
    x = torch.randn(3, 1, 40, 2, 8)
    assert torch.equal(linear_attention(*x), linear_attention(*x, impl="native"))
    monkeypatch.setattr(cpu, "LIBRARY", None)
    monkeypatch.setattr(cpu, "REASON", "it was taken away")
    assert backends()["native"] == (False, "it was taken away")
    assert torch.equal(linear_attention(*x), linear_attention(*x, impl="chunked"))
    with pytest.raises(ValueError, match="taken away"):
        linear_attention(*x, impl="native")
