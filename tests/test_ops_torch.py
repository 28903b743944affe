"""The operator inside torch: autocast, checkpointing, func transforms, pytrees. Compilation: test_ops_compile.py.

Expected values are the operator's own, called plainly; test_ops_values.py holds those against the oracle.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cases import IMPLS, Case, assert_agree, assert_same, make_inputs, run_case, run_outputs
from layer import Layer, layer_inputs, results_of, some_loss
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from linattn import State, linear_attention


@pytest.mark.parametrize("feature_map", ["elu", "taylor", "softmax"])
@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_autocast_does_not_reach_the_sums(impl, feature_map):
    """fp32 in is fp32 out, bit for bit the same: a bf16 product inside would be off by 10⁻³."""
    x = make_inputs(Case(2, 40, dtype=torch.float32))
    plain = partial(linear_attention, feature_map=feature_map, impl=impl)

    def under_autocast(*tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*tokens)

    got, want = run_outputs(under_autocast, x), run_outputs(plain, x)
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_a_layer_under_autocast():
    layer = Layer()
    exact = results_of(layer, layer)
    with torch.autocast("cpu", torch.bfloat16):
        got = results_of(layer, layer)
    assert got["result 0"].dtype == torch.bfloat16 and got["result 1"].dtype == torch.float32
    for name, want in exact.items():
        assert (got[name].float() - want).norm() < 0.02 * want.norm(), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant):
    layer, results = Layer(), []
    for call in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=reentrant)):
        layer.zero_grad()
        leaves = [x.requires_grad_() for x in layer_inputs()]
        made = call(*leaves)
        some_loss(made).backward()  # the reentrant kind knows only backward(), not grad()
        results.append([*made, *(x.grad for x in (*leaves, *layer.parameters()))])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("impl", ["chunked", "recurrent"])
@pytest.mark.parametrize("changed", ["q", "k", "v"])
def test_an_input_changed_in_place_is_noticed(impl, changed):
    """The backward pass reads the inputs again: with other numbers in them it would be silently wrong."""
    x = make_inputs(Case(2, 20))
    x = {name: x[name].requires_grad_().clone() for name in ("q", "k", "v")}
    out = linear_attention(x["q"], x["k"], x["v"], impl=impl)
    x[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_numbers_are_the_same(mode, impl):
    x = make_inputs(Case(2, 20, dtype=torch.float32))
    tokens = [x[name].requires_grad_() for name in ("q", "k", "v")]
    want, want_state = linear_attention(*tokens, return_state=True, impl=impl)
    with mode():
        got, state = linear_attention(*tokens, return_state=True, impl=impl)
    assert torch.equal(got, want.detach()) and not got.requires_grad
    for name, tensor in want_state.tensors().items():
        assert torch.equal(state.tensors()[name], tensor.detach())


def test_func_grad_is_autograd():
    case = Case(2, 20, dtype=torch.float64)
    x = make_inputs(case)

    def loss(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> Tensor:
        out, state = linear_attention(q, k, v, state=State(kv, z), return_state=True)
        return (out * x["g"]).sum() + (state.kv * x["g_kv"]).sum() + (state.tensors()["z"] * x["g_z"]).sum()

    names = ("q", "k", "v", "kv", "z")
    grads = torch.func.grad(loss, argnums=tuple(range(5)))(*(x[name] for name in names))
    want = run_case(case, x)
    assert_agree({f"d{n}": grad for n, grad in zip(names, grads, strict=True)}, {f"d{n}": want[f"d{n}"] for n in names})


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("causal", [True, False])
def test_vmap_is_a_loop(impl, causal):
    """Over q, k, v and a state, with the mapped axis in another place of each, and over q alone."""
    several = [make_inputs(Case(2, 12, impl=impl, seed=seed)) for seed in range(3)]

    def call(q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
        out, final = linear_attention(q, k, v, state=state, return_state=True, causal=causal, impl=impl)
        return out, final.kv, final.tensors()["z"]

    wants = [call(x["q"], x["k"], x["v"], State(x["kv"], x["z"])) for x in several]
    q, k, v = (torch.stack([x[name] for x in several], dim) for name, dim in (("q", 0), ("k", 1), ("v", 4)))
    state = State(torch.stack([x["kv"] for x in several]), torch.stack([x["z"] for x in several]))
    got = torch.func.vmap(call, in_dims=(0, 1, 4, 0))(q, k, v, state)
    for n, want in enumerate(zip(*wants, strict=True)):
        assert_same(f"result {n}", got[n], torch.stack(want))
    first = several[0]
    got = torch.func.vmap(call, in_dims=(0, None, None, None))(q, first["k"], first["v"], None)
    for n, x in enumerate(several):
        assert_same("out", got[0][n], call(x["q"], first["k"], first["v"], None)[0])


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_gradients_per_sample(impl):
    """vmap of grad: what differential privacy and influence functions ask for."""
    several = [make_inputs(Case(1, 12, impl=impl, seed=seed)) for seed in range(3)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, impl=impl).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    got = torch.func.vmap(grad)(*(torch.stack([x[name] for x in several]) for name in ("q", "k", "v")))
    for n, x in enumerate(several):
        leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v")]
        for name, alone, grad_of_all in zip("qkv", torch.autograd.grad(loss(*leaves), leaves), got, strict=True):
            assert_same(f"d{name}", grad_of_all[n], alone)


def test_a_state_is_a_pytree():
    _, state = linear_attention(
        *(make_inputs(Case(dtype=torch.float32))[n] for n in ("q", "k", "v")), return_state=True
    )
    leaves, form = pytree.tree_flatten(state)
    assert {id(leaf) for leaf in leaves} >= {id(state.kv), id(state.z)}
    same = pytree.tree_unflatten(leaves, form)
    assert isinstance(same, State) and same.kv is state.kv and same.z is state.z
    doubled = pytree.tree_map(lambda x: 2 * x, {"layers": [state]})["layers"][0]
    assert isinstance(doubled, State) and torch.equal(doubled.kv, 2 * state.kv)
    bare = State.empty(1, 1, 2, 2, normalize=False)
    assert pytree.tree_map(torch.clone, bare).z is None
