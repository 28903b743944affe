"""Every form of the operator against finite differences in float64: what a detached denominator cannot pass."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from cases import TORCH_IMPLS
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from linattn import State, linear_attention

FORMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "lengths": {"causal": True, "lengths": [3, 0]},
    "full, lengths of both": {"causal": False, "lengths": [1, 4], "q_lengths": [4, 2]},
    "packed": {"causal": True, "cu_seqlens": [0, 3, 3, 8]},
    "packed, full": {"causal": False, "cu_seqlens": [0, 3, 3, 8], "cu_seqlens_q": [0, 1, 4, 8]},
    "identity, eps": {"causal": True, "feature_map": "identity", "eps": 0.3},
    "elu, eps": {"causal": False, "feature_map": "elu", "eps": 2.0},
    "relu": {"causal": True, "feature_map": "relu"},
    "softplus, scale": {"causal": True, "feature_map": "softplus", "scale": 0.3},
    "taylor": {"causal": True, "feature_map": "taylor"},
    "quadratic, full": {"causal": False, "feature_map": "quadratic"},
}


def make_leaves(form: dict[str, Any], normalize: bool, stateful: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    packed = "cu_seqlens" in form
    batch, time, rows = (1, 8, 3) if packed else (2, 4, 2)
    features = {"taylor": 1 + 2 + 3, "quadratic": 4}.get(form.get("feature_map", "elu"), 2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = [normal(batch, time, 2, 2), normal(batch, time, 1, 2), normal(batch, time, 1, 3)]
    if stateful:
        leaves.append(normal(rows, 1, features, 3))
        if normalize:
            leaves.append(normal(rows, 1, features).abs() + 0.5)
    return [leaf.requires_grad_() for leaf in leaves]


def function_of(form: dict[str, Any], normalize: bool, impl: str):
    options = {key: value for key, value in form.items() if key != "eps"} | (
        {"eps": form["eps"]} if normalize and "eps" in form else {}
    )

    def attend(
        q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None, z: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        state = None if kv is None else State(kv, z)
        out, final = linear_attention(
            q, k, v, state=state, return_state=True, normalize=normalize, impl=impl, **options
        )
        return out, *(final.tensors()[name] for name in ("kv", "z")[: 1 + normalize])

    return attend


CASES = [
    pytest.param(
        form, normalize, stateful, impl, id=f"{impl}-{name}-{'mean' if normalize else 'sum'}-{'state' * stateful}"
    )
    for (name, form), normalize, stateful, impl in product(FORMS.items(), (True, False), (True, False), TORCH_IMPLS)
    # a made-up z of features that may be negative would leave the denominator near zero
    if not (stateful and normalize and form.get("feature_map") in ("taylor", "quadratic"))
]


@pytest.mark.parametrize(("form", "normalize", "stateful", "impl"), CASES)
def test_gradcheck(form, normalize, stateful, impl):
    leaves = make_leaves(form, normalize, stateful)
    assert gradcheck(
        function_of(form, normalize, impl),
        leaves,
        eps=1e-6,
        atol=1e-6,
        rtol=1e-5,
        fast_mode=True,
        check_undefined_grad=False,
    )


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ["causal", "full", "lengths", "packed", "identity, eps", "softplus, scale"])
def test_gradgradcheck_of_quadratic(name, normalize, stateful):
    leaves = make_leaves(FORMS[name], normalize, stateful)
    assert gradgradcheck(
        function_of(FORMS[name], normalize, "quadratic"),
        leaves,
        atol=1e-5,
        rtol=1e-4,
        fast_mode=True,
        check_undefined_grad=False,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("impl", ["chunked", "recurrent"])
def test_double_backward_of_the_others_names_the_way_out(impl, causal):
    leaves = make_leaves(FORMS["causal"], normalize=True, stateful=False)
    out = linear_attention(*leaves, causal=causal, impl=impl)
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r'impl="quadratic"'):
        dq.square().sum().backward()
