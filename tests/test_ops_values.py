"""The operator's numbers against the oracle: outputs, final states and every gradient, for every implementation."""

from __future__ import annotations

from itertools import product

import numpy as np
import oracle
import pytest
import torch
from cases import (
    DTYPES,
    IMPLS,
    Case,
    assert_matches_oracle,
    assert_near,
    assert_same,
    expected,
    make_inputs,
    run,
    run_case,
)

from linattn import State, linear_attention

# (batch, time, keys, heads, kv_heads, width, values): grouped heads, M ≠ D, lengths around and far from any block's
SHAPES = (
    (2, 1, None, 1, 1, 1, 1),
    (1, 2, None, 2, 1, 3, 5),
    (3, 15, None, 4, 2, 8, 8),
    (2, 33, None, 3, 3, 1, 4),
    (1, 100, None, 6, 2, 7, 1),
    (1, 257, None, 2, 2, 16, 9),
    (2, 64, None, 8, 1, 5, 6),
    (1, 210, None, 2, 1, 80, 70),
)
STYLES = tuple(product(IMPLS, (True, False), (True, False), DTYPES))


def grid():
    """Every style (implementation, causal, normalised, dtype) at every shape; the map moves on with both."""
    for (s, shape), (n, (impl, causal, normalize, dtype)) in product(enumerate(SHAPES), enumerate(STYLES)):
        name = oracle.ELEMENTWISE[(s + n + n // len(DTYPES)) % len(oracle.ELEMENTWISE)]
        case = Case(*shape, dtype=dtype, feature_map=name, impl=impl, causal=causal, normalize=normalize, seed=n)
        words = (impl, "causal" if causal else "full", "mean" if normalize else "sum", name, f"T{case.time}")
        yield pytest.param(case, id="-".join((*words, str(dtype).removeprefix("torch."))))


@pytest.mark.parametrize("case", list(grid()))
def test_against_the_oracle(case):
    x = make_inputs(case)
    assert_matches_oracle(run_case(case, x), case, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", [None, [700, 333]], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_many_blocks(causal, normalize, lengths, dtype):
    """Wide and long enough that whatever works in chunks and blocks of chunks has several, and a rest."""
    layout = {} if lengths is None else {"lengths": lengths} | ({} if causal else {"q_lengths": [1, 700]})
    case = Case(2, 700, None, 6, 3, 80, 40, dtype, "softplus", "chunked", causal, normalize, layout=layout)
    x = make_inputs(case)
    assert_matches_oracle(run_case(case, x), case, x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("feature_map", ["taylor", "quadratic"])
def test_maps_over_features(feature_map, impl, causal, normalize, dtype):
    case = Case(2, 40, None, 4, 2, 3, 5, dtype, feature_map, impl, causal, normalize, stateful=False, scale=0.4)
    x = make_inputs(case)
    got = run(x, stateful=False, watch=("out",), **case.options)
    want, plain = (expected_outputs(case, x, precision) for precision in (np.float64, np.float32))
    for name in want:
        assert_near(name, got[name], want[name], plain[name], factor=8)


def expected_outputs(case: Case, x: dict[str, torch.Tensor], precision) -> dict[str, torch.Tensor]:
    """For maps whose features have an order of their own: the state is left out of the comparison."""
    features = oracle.MAPS[case.feature_map].features(np.zeros(case.width)).size
    z = torch.zeros(case.batch, case.kv_heads, features, dtype=torch.float64)
    kv = z[..., None].expand(-1, -1, -1, case.values)
    whole = expected(case, x | {"kv": kv, "z": z, "g_kv": kv, "g_z": z}, precision)
    return {name: whole[name] for name in ("out", "dq", "dk", "dv")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("time", "keys"), [(1, 33), (33, 1), (15, 100), (100, 15), (5, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize("impl", IMPLS)
def test_cross_attention(impl, time, keys, dtype):
    case = Case(2, time, keys, dtype=dtype, impl=impl, causal=False, seed=time)
    x = make_inputs(case)
    assert_matches_oracle(run_case(case, x), case, x)


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("batch", "time"), [(2, 0), (0, 7), (0, 0)])
@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_empty(impl, batch, time, causal, stateful):
    case = Case(batch, time, impl=impl, causal=causal, stateful=stateful, dtype=torch.float32)
    x = make_inputs(case)
    got = run_case(case, x)
    assert got["out"].shape == (batch, time, 4, 3)
    assert got["dq"].shape == x["q"].shape and got["dv"].shape == x["v"].shape
    assert torch.equal(got["kv"], x["kv"]) and torch.equal(got["z"], x["z"]), "nothing was seen, nothing changes"
    if stateful:
        assert_same("dkv", got["dkv"], x["g_kv"])
        assert_same("dz", got["dz"], x["g_z"])


def test_no_keys_and_no_state_give_zero():
    q, none = torch.randn(2, 5, 4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 0, 2, 3)
    for impl in IMPLS:
        assert torch.equal(linear_attention(q, none, none, causal=False, impl=impl), torch.zeros(2, 5, 4, 3))


@pytest.mark.parametrize("lengths", [[7, 0, 33], [33, 1, 16]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_padded_rows(impl, causal, lengths):
    layout = {"lengths": lengths} if causal else {"lengths": lengths, "q_lengths": [20, 3, 0]}
    case = Case(3, 33, impl=impl, causal=causal, layout=layout)
    x = make_inputs(case)
    got = run_case(case, x)
    assert_matches_oracle(got, case, x)
    assert_matches_oracle(run_case(case, x, lengths=torch.tensor(lengths)), case, x)


@pytest.mark.parametrize("cu_seqlens", [[0, 33], [0, 1, 1, 20, 33], [0, 0, 17, 33, 33]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_packed_sequences(impl, causal, cu_seqlens):
    case = Case(1, 33, impl=impl, causal=causal, layout={"cu_seqlens": cu_seqlens})
    x = make_inputs(case)
    got = run_case(case, x)
    assert_matches_oracle(got, case, x)
    assert_matches_oracle(run_case(case, x, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32)), case, x)


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_packed_nothing(impl, cu_seqlens, stateful):
    case = Case(1, 0, impl=impl, stateful=stateful, layout={"cu_seqlens": cu_seqlens})
    x = make_inputs(case)
    got = run_case(case, x)
    assert got["out"].shape == (1, 0, 4, 3) and got["kv"].shape == (len(cu_seqlens) - 1, 2, 5, 3)
    assert torch.equal(got["kv"], x["kv"]) and torch.equal(got["z"], x["z"])


@pytest.mark.parametrize("impl", IMPLS)
def test_packed_cross_attention(impl):
    layout = {"cu_seqlens": [0, 9, 9, 33], "cu_seqlens_q": [0, 2, 5, 20]}
    case = Case(1, 20, 33, impl=impl, causal=False, layout=layout)
    x = make_inputs(case)
    assert_matches_oracle(run_case(case, x), case, x)


@pytest.mark.parametrize("watch", [("out",), ("kv",), ("z",), ("kv", "z")], ids="-".join)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_of_one_result_alone(impl, causal, watch):
    case = Case(time=33, impl=impl, causal=causal)
    x = make_inputs(case)
    assert_matches_oracle(run_case(case, x, watch=watch), case, x, watch=watch)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv", "z"])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_by_one_input_alone(impl, wanted):
    case = Case(time=17, impl=impl)
    x = make_inputs(case)
    leaf = x[wanted].clone().requires_grad_()
    y = x | {wanted: leaf}
    out, state = linear_attention(y["q"], y["k"], y["v"], state=State(y["kv"], y["z"]), return_state=True, impl=impl)
    made = zip((out, state.kv, state.tensors()["z"]), (x["g"], x["g_kv"], x["g_z"]), strict=True)
    loss = torch.stack([(tensor * cotangent).sum() for tensor, cotangent in made]).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    exact, plain = (expected(case, x, dtype)[f"d{wanted}"] for dtype in (np.float64, np.float32))
    assert_near(wanted, grad, exact, plain, factor=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_dtypes_of_results(impl, dtype):
    case = Case(dtype=dtype, impl=impl)
    got = run_case(case)
    assert {got[name].dtype for name in ("out", "dq", "dk", "dv")} == {case.dtype}
    assert {got[name].dtype for name in ("kv", "z", "dkv", "dz")} == {case.sums}


def test_defaults_are_causal_normalised_elu():
    case = Case(2, 40, dtype=torch.float32, stateful=False)
    x = make_inputs(case)
    got, exact, plain = linear_attention(x["q"], x["k"], x["v"]), expected(case, x), expected(case, x, np.float32)
    assert_near("out", got, exact["out"], plain["out"], factor=8)
