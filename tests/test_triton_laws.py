"""Laws that the GPU's kernels must keep, interpreted on the CPU; and how they sit in the library."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import Case, assert_agree, assert_same, make_inputs, run_case

from linattn import State, backends, linear_attention

pytest.importorskip("triton", reason="Triton is not made for this system")
import interpreted

from linattn.ops.triton import run as kernels
from linattn.ops.triton.table import Filling

interpreted.quicken()
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are checked by gpu_check")
CASE = Case(2, 40, None, 2, 1, 8, 6, torch.float32, impl="triton")


@pytest.mark.parametrize("cut", [1, 15, 39])
@pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])
def test_split_anywhere_is_the_whole(normalize, cut):
    """Outputs, the final state, and gradients that flow through the state between the parts."""
    x = make_inputs(CASE)
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v", "kv", "z")[: 4 + normalize]]
    start = State(leaves[3], leaves[4] if normalize else None)
    options = {"normalize": normalize, "return_state": True, "impl": "triton"}
    whole = linear_attention(*leaves[:3], state=start, **options)
    left = linear_attention(*(t[:, :cut] for t in leaves[:3]), state=start, **options)
    right = linear_attention(*(t[:, cut:] for t in leaves[:3]), state=left[1], **options)
    parts = (torch.cat([left[0], right[0]], 1), right[1])
    for n, (got, want) in enumerate(zip(*(results(made, leaves, x) for made in (parts, whole)), strict=True)):
        assert_same(str(n), got, want)


def results(made: Any, leaves: list[torch.Tensor], x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    out, end = made
    outputs = [out, end.kv] + ([] if end.z is None else [end.z])
    return outputs + list(torch.autograd.grad(outputs, leaves, [x["g"], x["g_kv"], x["g_z"]][: len(outputs)]))


def test_segments_are_the_whole(monkeypatch):
    """Cut into segments that run beside each other, or not: the same numbers."""
    case = Case(1, 290, None, 2, 1, 8, 6, torch.float32, impl="triton")
    x = make_inputs(case)
    whole = run_case(case, x)
    monkeypatch.setattr(kernels, "filling", lambda *_: Filling(2, 128))
    kernels.plan.cache_clear()
    try:
        assert kernels.plan(1, 2, 290, 8, False, False, 132).split
        assert_agree(run_case(case, x), whole)
    finally:
        kernels.plan.cache_clear()


@pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])
def test_the_future_changes_nothing(normalize):
    x = make_inputs(CASE)
    y = {name: t.clone() for name, t in x.items()}
    for name in ("q", "k", "v"):
        y[name][:, 20:] = 7.0
    got, want = (linear_attention(t["q"], t["k"], t["v"], normalize=normalize, impl="triton") for t in (y, x))
    assert torch.equal(got[:, :20], want[:, :20])
    assert not torch.equal(got[:, 20:], want[:, 20:])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_nan_in_padding_reaches_nothing(causal):
    """And torch.empty is NaN in these tests: whatever is finite was written."""
    layout = {"lengths": [40, 13]} | ({} if causal else {"q_lengths": [40, 13]})
    case = Case(2, 40, None, 2, 1, 8, 6, torch.float32, impl="triton", causal=causal, layout=layout)
    x = make_inputs(case)
    clean = run_case(case, x)
    for name in ("q", "k", "v", "g"):
        x[name] = x[name].clone()
        x[name][1, 13:] = torch.nan
    got = run_case(case, x)
    assert all(t.isfinite().all() for t in got.values())
    assert all(torch.equal(got[name], clean[name]) for name in got)
    assert not got["out"][1, 13:].any() and not got["dq"][1, 13:].any() and not got["dk"][1, 13:].any()


def test_tokens_of_no_sequence_get_zeros():
    case = Case(1, 40, None, 2, 1, 8, 6, torch.float32, impl="triton", layout={"cu_seqlens": [0, 10, 30]})
    got = run_case(case)
    assert not any(got[name][:, 30:].any() for name in ("out", "dq", "dk", "dv"))


def test_wild_lengths_are_clamped():
    """Nobody checks values on a GPU: kernels stay inside the tensors, whatever they are told."""
    x = make_inputs(CASE)
    batch = [torch.tensor([-5, 400]), torch.tensor([0, 40])]
    call = [kernels.forward(x["q"], x["k"], x["v"], form(), None, kernels.Batch(lengths=n), True, False) for n in batch]
    assert_same("out", call[0][0], call[1][0])
    ends = [end.tensors()["kv"] for _, end, _ in call if end is not None]
    assert_same("kv", ends[0], ends[1])


def form():
    from linattn.features import resolve
    from linattn.ops.form import Form

    return Form(resolve("elu"))


def test_values_far_from_zero():
    """The gradient of the normaliser cancels; values are counted from their mean, so nothing is lost (equation 9)."""
    case = Case(1, 200, None, 1, 1, 8, 6, torch.float32, impl="triton", stateful=False)
    x = make_inputs(case)
    x["v"] = x["v"] + 100.0
    got = run_case(case, x)
    exact = run_case(case, {name: t.double() for name, t in x.items()}, impl="quadratic")
    error = (got["dq"].double() - exact["dq"]).abs().max() / exact["dq"].abs().max()
    assert error < 2e-4, f"dq is {error:.1e} off"


def test_the_far_tail_of_elu_keeps_its_digits():
    q = k = torch.full((1, 5, 1, 16), -40.0)  # weights of exp(-80), near the end of float32: F.elu(x) + 1 gives 0
    v = torch.arange(5.0).view(1, 5, 1, 1).expand(1, 5, 1, 16)
    out = linear_attention(q, k, v, impl="triton")
    torch.testing.assert_close(out[0, :, 0, 0], torch.arange(5.0) / 2)


def test_a_state_is_never_written_to():
    x = make_inputs(CASE)
    state = State(x["kv"].clone(), x["z"].clone())
    linear_attention(x["q"], x["k"], x["v"], state=state, impl="triton", return_state=True)
    assert torch.equal(state.kv, x["kv"]) and torch.equal(state.tensors()["z"], x["z"])


def test_gradients_that_are_slices_are_aligned():
    """A gradient of the state may be a slice of another, beginning anywhere; kernels read 16 bytes at a time."""
    x = torch.zeros(3, 25)[1:]
    assert x.data_ptr() % 16
    assert kernels._dense(x).data_ptr() % 16 == 0
    assert kernels._dense(x.t()).is_contiguous()


def test_the_interpreter_is_named():
    can_run, reason = backends()["triton"]
    assert can_run and "interpreted" in reason


def test_without_triton_everything_else_works():
    script = """
import sys
sys.modules["triton"] = None
import torch, linattn
q = torch.randn(1, 5, 2, 4)
assert linattn.linear_attention(q, q, q).shape == q.shape
print(linattn.backends()["triton"])
try:
    linattn.linear_attention(q, q, q, impl="triton")
except ValueError as error:
    print(error)
"""
    script = script.replace(
        'sys.modules["triton"] = None',
        "import importlib.util as u; find = u.find_spec\n"
        'u.find_spec = lambda name, *a: None if name == "triton" else find(name, *a)',
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    assert first.startswith("(False,") and "not installed" in first and "impl='triton' cannot run here" in second


def test_importing_is_quick_and_leaves_triton_alone():
    script = """
import sys, time, torch
before, begin = set(sys.modules), time.process_time()
import linattn
print(time.process_time() - begin, any(name.startswith("linattn.ops.triton.") for name in sys.modules))
"""
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    seconds, imported = min(run.stdout.split() for run in runs)
    assert imported == "False"
    assert float(seconds) < 0.3, f"importing linattn took {seconds} s of the processor, over importing torch"
