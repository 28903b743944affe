"""Where the numbers get hard: zero and signed denominators, far tails, strides, sums beyond what one float holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import IMPLS, Case, assert_matches_oracle, assert_near, expected, make_inputs, run, run_case
from torch import Tensor

from linattn import State, linear_attention
from linattn.ops import Step


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_zero_denominator_gives_zero_and_finite_gradients(impl, causal):
    case = Case(time=12, feature_map="relu", impl=impl, causal=causal, stateful=False, width=2)
    x = make_inputs(case)
    x["q"][:, ::2] = -x["q"][:, ::2].abs()  # φ(q) = 0
    x["k"][:, :5] = -x["k"][:, :5].abs()  # nothing to see in the first five places
    got = run_case(case, x)
    assert not got["out"][:, ::2].any()
    assert got["out"][:, 7::2].any()
    assert_matches_oracle(got, case, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_eps_bounds_a_signed_denominator(impl, causal, dtype):
    case = Case(time=24, heads=2, kv_heads=2, width=3, feature_map="identity", impl=impl, causal=causal, dtype=dtype)
    x = make_inputs(case)
    x["q"][:, 3] = 0  # den = 0 counts as positive: divided by +eps
    den = torch.einsum("bthd,bhd->bth", x["q"].double(), (x["z"] + x["k"].sum(1)).double())
    assert (den < -0.5).any() and (den > 0.5).any() and (den.abs() < 0.5).any(), "the case must see all three branches"
    assert_matches_oracle(run_case(case, x), case, x)


@pytest.mark.parametrize("impl", IMPLS)
def test_eps_where_the_denominator_is_zero_divides_by_plus_eps(impl):
    q, k = (
        torch.tensor([[1.0, 0.0], [1.0, 0.0]]).view(1, 2, 1, 2),
        torch.tensor([[1.0, 5.0], [-1.0, 5.0]]).view(1, 2, 1, 2),
    )
    v = torch.tensor([3.0, -4.0]).view(1, 2, 1, 1)
    out = linear_attention(q, k, v, feature_map="identity", eps=0.25, impl=impl)
    assert out.flatten().tolist() == [3.0, (3.0 + 4.0) / 0.25]


@pytest.mark.parametrize("impl", IMPLS)
def test_eps_also_bounds_kernels_that_are_never_negative(impl):
    case = Case(time=9, width=2, feature_map="relu", impl=impl, stateful=False)
    x = make_inputs(case)

    def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        w = torch.einsum("bihd,bjhd->bhij", q.relu(), k.relu().repeat_interleave(2, dim=2)).tril()
        den = w.sum(-1, keepdim=True)
        assert (den < 0.3).any() and (den > 0.3).any()
        return (w @ v.repeat_interleave(2, dim=2).transpose(1, 2) / den.clamp_min(0.3)).transpose(1, 2)

    tokens = [x[name] for name in ("q", "k", "v")]
    got = linear_attention(*tokens, feature_map="relu", eps=0.3, impl=impl)
    want, plain = definition(*(x.double() for x in tokens)), definition(*(x.float() for x in tokens))
    assert_near("out", got, want, plain, factor=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [(-6, -6), (-40, 0), (0, -40), (-40, -40), (30, 30)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_far_tails_of_elu_keep_their_digits(impl, shift, dtype):
    case = Case(1, 33, heads=2, kv_heads=2, dtype=dtype, impl=impl, stateful=False)
    x = make_inputs(case)
    x["q"], x["k"] = x["q"] + shift[0], x["k"] + shift[1]
    got, want, plain = (
        run_case(case, x, watch=("out",)),
        *(expected(case, x, precision, watch=("out",)) for precision in (np.float64, np.float32)),
    )
    for name in ("out", "dv"):
        assert_near(name, got[name], want[name], plain[name], factor=8)
    assert got["dq"].isfinite().all() and got["dk"].isfinite().all()


def strided(x: Tensor, style: str) -> Tensor:
    """The same numbers, laid out another way."""
    if style == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if style == "width first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if style == "every third":
        wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), torch.nan, dtype=x.dtype)
        wide[..., ::3] = x
        return wide[..., ::3]
    wide = torch.full((x.shape[0], 2 * x.shape[1] + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
    wide[:, 3::2] = x
    return wide[:, 3::2]


@pytest.mark.parametrize("style", ["heads first", "width first", "every third", "every second token, from the third"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_any_strides(impl, causal, style):
    case = Case(time=20, impl=impl, causal=causal, dtype=torch.float32)
    x = make_inputs(case)
    moved = x | {name: strided(x[name], style) for name in ("q", "k", "v", "g")}
    moved |= {name: x[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("kv", "z", "g_kv", "g_z")}
    assert not moved["q"].is_contiguous() and not moved["kv"].is_contiguous()
    got = run_views(case, moved)
    assert_matches_oracle(got, case, x)


@pytest.mark.parametrize("expand", [("q",), ("k", "v"), ("q", "k", "v", "g"), ("kv", "z")], ids="-".join)
@pytest.mark.parametrize("impl", IMPLS)
def test_zero_strides(impl, expand):
    case = Case(3, 20, impl=impl, dtype=torch.float32)
    x = make_inputs(case)
    moved = x | {name: x[name][:1].expand_as(x[name]) for name in expand}
    assert all(moved[name].stride(0) == 0 for name in expand)
    assert_matches_oracle(run_views(case, moved), case, {name: t.contiguous() for name, t in moved.items()})


def run_views(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """`run` makes leaves by detach, which keeps strides; nothing here may make them contiguous on the way."""
    assert all(x[name].detach().stride() == x[name].stride() for name in x)
    return run(x, **case.options)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_sum_of_everything_has_a_gradient(impl):
    """The cotangent of `out.sum()` is one number with all strides zero."""
    case = Case(time=20, impl=impl, stateful=False)
    x = make_inputs(case)
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]
    grads = torch.autograd.grad(linear_attention(*leaves, impl=impl).sum(), leaves)
    y = {n: t.detach() for n, t in x.items()} | {"g": torch.ones_like(x["g"])}
    want, plain = (expected(case, y, precision, watch=("out",)) for precision in (np.float64, np.float32))
    for name, grad in zip("qkv", grads, strict=True):
        assert_near(name, grad, want[f"d{name}"], plain[f"d{name}"], factor=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("time", [1, 5, 300])
@pytest.mark.parametrize("impl", IMPLS)
def test_small_terms_are_not_lost_beside_a_large_sum(impl, time, dtype):
    """Beyond 2²⁴ an fp32 sum ignores +1; kv + kv_low does not. All terms are integers: the sum is exact."""
    start = State.empty(1, 1, 2, 3)
    for name in ("kv", "z"):
        start.tensors()[name].fill_(2.0**26)
    zeros, ones = torch.zeros(1, time, 1, 2, dtype=dtype), torch.ones(1, time, 1, 3, dtype=dtype)  # elu: φ(0) = 1
    state = start
    for _ in range(3):
        _, state = linear_attention(zeros, zeros, ones, state=state, return_state=True, impl=impl)
    parts = {name: part.double() for name, part in state.tensors().items()}
    for name in ("kv", "z"):
        assert (parts[name] + parts[f"{name}_low"] == 2.0**26 + 3 * time).all(), name


@pytest.mark.parametrize("impl", [*IMPLS, "Step"])
def test_a_state_without_low_parts_gets_them(impl):
    """kv and z alone are a state whose low parts are 0, not one that drifts."""
    bare = State(torch.full((1, 1, 2, 3), 2.0**26), torch.full((1, 1, 2), 2.0**26))
    q, v = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 1, 3)
    if impl == "Step":
        step = Step(bare)
        step(q, q, v)
        state = step.state()
    else:
        _, state = linear_attention(q, q, v, state=bare, return_state=True, impl=impl)
    parts = {name: part.double() for name, part in state.tensors().items()}
    for name in ("kv", "z"):
        assert (parts[name] + parts[f"{name}_low"] == 2.0**26 + 1).all(), name


@pytest.mark.parametrize("normalize", [True, False])
def test_reading_a_state_adds_nothing(normalize):
    case = Case(time=9, causal=False, normalize=normalize)
    x = make_inputs(case)
    leaf = {name: x[name].clone().requires_grad_() for name in ("q", "kv", "z")}
    state = State(leaf["kv"], leaf["z"] if normalize else None)
    out, same = linear_attention(
        leaf["q"], None, None, state=state, causal=False, normalize=normalize, return_state=True
    )
    f_q = torch.where(x["q"] > 0, x["q"] + 1, x["q"].exp())
    den = torch.einsum("bthc,bhc->bth", f_q, x["z"].repeat_interleave(2, 1))[..., None] if normalize else 1.0
    want = torch.einsum("bthc,bhcm->bthm", f_q, x["kv"].repeat_interleave(2, 1)) / den
    assert_near("out", out.detach(), want, want, factor=1)
    assert torch.equal(same.kv, x["kv"]) and same.kv.data_ptr() != state.kv.data_ptr()
    no_keys = x | {"k": x["k"][:, :0], "v": x["v"][:, :0], "g_kv": 0 * x["g_kv"], "g_z": 0 * x["g_z"]}
    exact = expected(case, no_keys)
    names = ("q", "kv", "z")[: 2 + normalize]
    grads = torch.autograd.grad(out, [leaf[name] for name in names], x["g"])
    for name, grad in zip(names, grads, strict=True):
        assert_near(name, grad, exact[f"d{name}"], exact[f"d{name}"], factor=1)
