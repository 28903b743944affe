"""Output heads: log-probabilities against decimal arithmetic and numpy, and the laws that hold for any parameters.

Sampling is in test_heads_sampling.py, CTC in test_heads_ctc.py, bits per dimension in test_heads_bits.py.
"""

from __future__ import annotations

import copy
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from helpers import assert_as_accurate
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from linattn.nn.heads import Categorical, Head, MixtureOfLogistics, TokenHead
from linattn.nn.heads.logistics import FARTHEST, MAX_LOG_SCALE, MIN_LOG_SCALE

HEADS = {
    "logistics": lambda: MixtureOfLogistics(12, mixtures=3, values=16),
    "categorical": lambda: Categorical(12, 16),
    "tokens": lambda: TokenHead(12, 16),
    "tied": lambda: TokenHead(12, 16, embedding=nn.Embedding(16, 12)),
}


def made(name: str) -> Head:
    torch.manual_seed(0)
    return HEADS[name]()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_log_probs(params: torch.Tensor, num_values: int) -> torch.Tensor:
    """The definition, log Σ π (σ(b) - σ(a)), in 60 digits; on the right of a mean its equal σ(-a) - σ(-b)."""
    with localcontext() as context:
        context.prec, context.Emin = 60, -(10**12)
        logits, means, log_scales = ([Decimal(float(x)) for x in part] for part in params.chunk(3))
        weights = [(logit - max(logits)).exp() for logit in logits]
        mass = [Decimal(0)] * num_values
        for weight, mean, log_scale in zip(weights, means, log_scales, strict=True):
            precision = (-min(max(log_scale, Decimal(MIN_LOG_SCALE)), Decimal(MAX_LOG_SCALE))).exp()
            edges = [(Decimal(2 * v - 1) / (num_values - 1) - 1 - mean) * precision for v in range(1, num_values)]
            below = [Decimal(0), *(1 / (1 + (-edge).exp()) for edge in edges), Decimal(1)]
            above = [Decimal(1), *(1 / (1 + edge.exp()) for edge in edges), Decimal(0)]
            for v in range(num_values):
                left = below[v + 1] - below[v]
                mass[v] += weight * (left if below[v + 1] < above[v] else above[v] - above[v + 1])
        return torch.tensor([float((m / sum(weights)).ln()) for m in mass], dtype=torch.float64)


MIXTURES = {  # logits, means, log-scales
    "one": [0.0, 0.3, -2.0],
    "mixed": [0.5, -1.0, 2.0, -0.9, 0.1, 1.3, -3.0, -1.0, 0.5],
    "narrowest": [0.0, 1.0, -0.73, 0.21, -7.0, -7.0],
    "below the floor": [0.0, 1.0, -0.73, 0.21, -30.0, -9.0],
    "flat": [0.0, 0.1, 30.0],
    "outside": [0.0, 0.2, 3.0, -5.0, -3.0, -3.0],
    "a bin's width": [0.0, 0.13, -2.7],
}


@pytest.mark.parametrize("num_values", [2, 16])
@pytest.mark.parametrize("case", MIXTURES)
def test_logistics_against_decimals(case, num_values):
    head = MixtureOfLogistics(4, len(MIXTURES[case]) // 3, num_values)
    params = torch.tensor(MIXTURES[case])
    exact = exact_log_probs(params, num_values)
    wide = head.log_probs_all(params.double())
    assert ((wide - exact).abs() <= 1e-12 * exact.abs().clamp_min(1)).all()
    # float32 may round each center by half a last place, which the narrowest scale turns into 1097 times as much
    _, means, log_scales = params.chunk(3)
    rounding = 2.0**-23 * (means.abs() * (-log_scales.clamp_min(MIN_LOG_SCALE)).exp()).max()
    assert ((head.log_probs_all(params) - exact).abs() <= 1e-6 * exact.abs().clamp_min(1) + rounding).all()


def test_all_256_values_in_the_far_tail():
    """Where the mass of a bin is 10⁻⁴⁷⁰, far below what a float can hold, and where densities would be a guess."""
    params = torch.tensor([0.0, 0.98, -7.0])
    exact = exact_log_probs(params, 256)
    got = MixtureOfLogistics(4, 1).log_probs_all(params)
    assert exact.min() < -1000
    assert ((got - exact).abs() <= 2e-7 * exact.abs() + 2.0**-23 * 1097).all()


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
EXTREME = np.float32(3e38)


@given(arrays(np.float32, 9, elements=FINITE))
@example(np.array([-EXTREME, EXTREME, 0, EXTREME, -EXTREME, 0, -EXTREME, EXTREME, 0], np.float32))
@example(np.array([0, 1, 2, EXTREME, EXTREME, EXTREME, -3, 0, 3], np.float32))
@example(np.array([0, 0, 0, 1e4, -1e4, 0, 30, -30, 30], np.float32))
@example(np.array([0, 0, 0, 1e4, 1e4, -1e4, -30, -30, -30], np.float32))
@example(np.array([0, -1, 1, 0.5, -0.5, 0, -5.5, -4.8, -4.2], np.float32))
def test_logistics_for_all_finite_parameters(values):
    """Probabilities sum to 1, none is NaN, gradients are finite."""
    params = torch.from_numpy(values).requires_grad_()
    log_probs = MixtureOfLogistics(4, 3).log_probs_all(params)
    assert abs(float(log_probs.detach().double().exp().sum()) - 1) < 1e-5
    assert log_probs.isfinite().all() and log_probs.max() <= 1e-6
    (gradient,) = torch.autograd.grad(log_probs, params, torch.ones(256))
    assert gradient.isfinite().all()


def test_logistics_gradients():
    head = MixtureOfLogistics(4, 3, 16)
    params = normal(5, 9).double()
    params[0] = torch.tensor([0.0, 1, 2, 3, -4, 0.1, -6.5, 5, -3])
    params.requires_grad_()
    assert torch.autograd.gradcheck(head.log_probs_all, (params,))


def test_what_is_held_has_no_gradient():
    params = torch.tensor([0.0, 2 * FARTHEST, MIN_LOG_SCALE - 1]).requires_grad_()
    inside = torch.tensor([0.0, 0.5, MIN_LOG_SCALE + 1]).requires_grad_()
    head = MixtureOfLogistics(4, 1)
    for p in (params, inside):
        head.log_prob(p, torch.tensor(3)).backward()
    assert params.grad is not None and inside.grad is not None
    assert params.grad[1:].tolist() == [0, 0] and (inside.grad[1:] != 0).all()


@pytest.mark.parametrize("name", ["categorical", "tokens", "tied"])
def test_softmax_heads_against_numpy(name):
    head, features = made(name), normal(2, 3, 12)
    weight = head.weight if isinstance(head, TokenHead) else head.linear.weight
    logits = features.double().numpy() @ weight.detach().double().numpy().T
    if head.linear.bias is not None:
        logits = logits + head.linear.bias.detach().double().numpy()
    exact = torch.from_numpy(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    assert (head.double().log_probs_all(head(features.double())) - exact).abs().max() < 1e-14
    head.float()
    assert_as_accurate(head.log_probs_all(head(features)), exact, exact.float(), factor=20)


@pytest.mark.parametrize("name", HEADS)
def test_loss_is_the_negative_of_each_value_s_log_probability(name):
    head, features = made(name), normal(3, 16, 12)
    targets = torch.arange(16).expand(3, 16)
    nats = head.loss(features, targets)
    everything = head.log_probs_all(head(features))
    assert nats.shape == (3, 16)
    assert torch.equal(nats, -head.log_prob(head(features), targets))
    assert torch.allclose(nats, -everything.diagonal(dim1=1, dim2=2), rtol=1e-6, atol=1e-6)
    assert torch.equal(nats, head.loss(features, targets.to(torch.uint8)))
    assert torch.allclose(nats[1, 4], head.loss(features[1, 4], targets[1, 4]))
    assert nats.std() > 0.01


@pytest.mark.parametrize("name", HEADS)
def test_nats_train_the_head(name):
    """The gradient by the features and by the weight is the one of finite differences."""
    head = made(name).double()
    for embedding in getattr(head, "tied", ()):
        embedding.double()
    weight = head.weight if isinstance(head, TokenHead) else head.linear.weight
    features, targets = normal(2, 2, 12).double().requires_grad_(), torch.tensor([[0, 3], [15, 3]])
    assert torch.autograd.gradcheck(lambda f, _: head.loss(f, targets), (features, weight))


@pytest.mark.parametrize("name", ["logistics", "categorical"])
def test_half_precision_changes_the_inputs_only(name):
    """bfloat16 features and weights, or autocast: the parameters are those of float32 arithmetic on them."""
    head, features, targets = made(name), normal(2, 5, 12).bfloat16(), torch.arange(10).view(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = head.loss(features, targets)
    assert torch.equal(autocast, head.loss(features.float(), targets))
    rounded = copy.deepcopy(head).bfloat16()
    narrow = rounded.loss(features, targets)
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, copy.deepcopy(rounded).float().loss(features.float(), targets))


def test_token_logits_are_float32_of_a_bfloat16_product():
    head, features = made("tied"), normal(2, 5, 12).bfloat16()
    assert isinstance(head, TokenHead)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, (features @ head.weight.bfloat16().T).float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.head = TokenHead(12, 16, embedding=self.embedding, bias=True)


def test_a_tied_weight_belongs_to_the_embedding():
    model = Tied()
    assert set(model.state_dict()) == {"embedding.weight", "head.linear.bias"}
    assert len(list(model.parameters())) == 2
    twin = copy.deepcopy(model)
    twin.head.loss(normal(2, 3, 12), torch.tensor([[1, 2, 3], [4, 5, 6]])).sum().backward()
    gradient = twin.embedding.weight.grad
    assert gradient is not None and gradient.abs().min() > 0
    assert model.embedding.weight.grad is None
    assert twin.double().head(normal(1, 1, 12).double()).dtype == torch.float64
    assert sum(p.numel() for p in TokenHead(12, 16).parameters()) == 12 * 16


@pytest.mark.parametrize("name", ["logistics", "tied"])
def test_compiles_and_maps(name, unchecked):
    torch.compiler.reset()
    head, features, targets = made(name), normal(2, 5, 12), torch.arange(10).view(2, 5)
    loss = torch.compile(head.loss, backend="aot_eager", fullgraph=True)
    sample = torch.compile(head.sample, backend="aot_eager", fullgraph=True)
    expected = head.loss(features, targets)
    assert torch.allclose(loss(features, targets), expected)
    assert torch.allclose(torch.func.vmap(head.loss)(features, targets), expected)
    params, uniforms = head(features).detach(), torch.linspace(0.05, 0.95, 10).view(2, 5)
    for options in ({}, {"temperature": 0.5, "top_k": 9, "top_p": 0.9}):
        values = head.sample(params, uniforms=uniforms, **options)
        assert torch.equal(sample(params, uniforms=uniforms, **options), values) and values.unique().numel() > 2


def test_wrong_calls_are_named(unchecked):
    head = made("logistics")
    params = head(normal(2, 3, 12))
    with pytest.raises(ValueError, match=r"features of width 12, got \(2, 3, 9\)"):
        head(normal(2, 3, 9))
    with pytest.raises(ValueError, match=r"expected 9 parameters a value.*got \(2, 3, 12\): pass head\(features\)"):
        head.log_prob(normal(2, 3, 12), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="values must lie in 0 … 15, got 16: padding is marked by a mask"):
        head.log_prob(params, torch.full((2, 3), 16))
    with pytest.raises(ValueError, match="0 … 15, got -100"):
        head.loss(normal(2, 3, 12), torch.full((2, 3), -100))
    with pytest.raises(ValueError, match=r"values must be integers, got torch\.float32"):
        head.log_prob(params, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="at least 2 values, got values=1"):
        MixtureOfLogistics(12, values=1)
    with pytest.raises(ValueError, match="mixtures must be a positive integer, got 0"):
        MixtureOfLogistics(12, mixtures=0)
    with pytest.raises(ValueError, match=r"\(vocabulary, width\) = \(16, 12\), got \(16, 8\)"):
        TokenHead(12, 16, embedding=nn.Embedding(16, 8))
