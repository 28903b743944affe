"""Samplers against the probabilities that the loss uses: exactly, on a grid of uniforms, and by chi-square.

A value is a step function of its uniform. On a grid of N equally spaced uniforms each interval of length p holds
N p of them, give or take one: counts are then known to a few, not to √N.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from linattn.nn.heads import Categorical, Head, MixtureOfLogistics, TokenHead
from linattn.nn.heads.sampling import pick

N = 2**14
HEADS = {
    "logistics": lambda: MixtureOfLogistics(4, mixtures=3, values=16),
    "categorical": lambda: Categorical(4, 16),
    "tokens": lambda: TokenHead(4, 16),
}
OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 99},
    {"top_p": 0.7},
    {"top_p": 1.0},
    {"top_p": 1e-9},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
]


def params_of(head: Head, seed: int = 0) -> Tensor:
    params = torch.randn(head.num_params, generator=torch.Generator().manual_seed(seed))
    if isinstance(head, MixtureOfLogistics):
        params[-head.mixtures :] = torch.tensor([-3.0, -1.0, 0.5])[
            : head.mixtures
        ]  # a peak, a hill, and a plain with mass at both ends
    return params


def grid(n: int = N) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def frequencies(head: Head, params: Tensor, **options) -> np.ndarray:
    values = head.sample(params.expand(N, -1), uniforms=grid(), **options)
    return np.bincount(values.numpy(), minlength=head.num_values) / N


def expected(
    head: Head, params: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
):
    """The options one after the other, value by value."""
    p = np.exp(head.log_probs_all(params.double()).numpy() / temperature)
    p = p / p.sum()
    ranked = sorted(range(len(p)), key=lambda v: -p[v])[:top_k]
    mass, kept = 0.0, []
    for v in ranked:
        kept.append(v)
        mass += p[v]
        if top_p is not None and mass >= top_p * sum(p[ranked]):
            break
    return np.where(np.isin(np.arange(len(p)), kept), p, 0) / p[kept].sum()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_frequencies_are_the_probabilities(name, options):
    head = HEADS[name]()
    params = params_of(head)
    p, got = expected(head, params, **options), frequencies(head, params, **options)
    assert np.abs(got - p).max() <= 4 / N  # an interval a component and value, each known to one grid point
    assert (got[p == 0] == 0).all() and (got[p > 2 / N] > 0).all()


@pytest.mark.parametrize("seed", [1, 2])
def test_logistics_by_chi_square(seed):
    """Of all 256 values, with random uniforms: from the generator, and the same ones passed in."""
    head, n = MixtureOfLogistics(4), 200_000
    params = torch.randn(30, generator=torch.Generator().manual_seed(seed))
    p = head.log_probs_all(params).double().exp().numpy()
    values = head.sample(params.expand(n, -1), generator=torch.Generator().manual_seed(seed))
    uniforms = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(values, head.sample(params.expand(n, -1), uniforms=uniforms))
    counts = np.bincount(values.numpy(), minlength=256)
    assert (n * p).min() > 5
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5  # its mean and standard deviation over 255 degrees of freedom


def test_the_two_samplers_of_logistics_agree_on_extreme_parameters():
    """A point of one component, and the table of all values: also with all mass outside, or in one bin."""
    head = MixtureOfLogistics(4, mixtures=2, values=16)
    cases = [[0, 0, 1e4, -1e4, -9, 5], [0, 0, 0.0, 0.5, 30, -9], [3e38, -3e38, 0.1, 0, -4, 0], [0, 1, -1, 1, -7, -7]]
    for params in torch.tensor(cases):
        p = head.log_probs_all(params).double().exp().numpy()
        for options in ({}, {"top_k": 16}):
            assert np.abs(frequencies(head, params, **options) - p).max() <= 4 / N
        assert p.max() > 0.4


def test_a_point_falls_in_the_bin_of_its_uniform():
    """With one component value v is drawn for u in [F(v), F(v + 1)), where F sums the probabilities: to 10⁻¹²."""
    head = MixtureOfLogistics(4, mixtures=1)
    params = torch.tensor([0.0, 0.3, -2.0], dtype=torch.float64)
    ends = head.log_probs_all(params).exp().cumsum(-1)[:-1]
    for side, value in ((-1e-12, torch.arange(255)), (1e-12, torch.arange(1, 256))):
        assert torch.equal(head.sample(params.expand(255, -1), uniforms=ends + side), value)


@pytest.mark.parametrize("name", HEADS)
def test_temperature_0_is_the_most_probable_value(name):
    head = HEADS[name]()
    params = torch.stack([params_of(head, seed) for seed in range(20)]).view(4, 5, -1)
    best = head.log_probs_all(params).argmax(-1)
    uniforms = torch.rand(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.sample(params, temperature=0.0), best)
    assert torch.equal(head.sample(params, uniforms=uniforms, temperature=1e-9), best)
    assert torch.equal(head.sample(params, uniforms=uniforms, top_k=1), best)
    assert not torch.equal(head.sample(params, uniforms=uniforms), best)


@pytest.mark.parametrize("name", HEADS)
def test_rows_are_drawn_by_themselves(name):
    """Each row by its own parameters and uniform, whatever the layout; float32 uniforms serve as well."""
    head = HEADS[name]()
    params = torch.stack([params_of(head, seed) for seed in range(20)])
    uniforms = torch.rand(20, generator=torch.Generator().manual_seed(0))
    values = head.sample(params, uniforms=uniforms)
    alone = [head.sample(p, uniforms=u) for p, u in zip(params, uniforms, strict=True)]
    assert torch.equal(values, torch.stack(alone))
    turned = head.sample(params.view(4, 5, -1).transpose(0, 1), uniforms=uniforms.view(4, 5).T, top_k=16)
    assert torch.equal(turned.T.flatten(), head.sample(params, uniforms=uniforms, top_k=16))
    assert values.unique().numel() > 3


def test_a_generator_repeats_itself():
    head = Categorical(4, 16)
    params = params_of(head).expand(50, -1)
    first, again = (head.sample(params, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, head.sample(params, generator=torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("u", [0.0, 2.0**-60, 1 - 2.0**-53, 1.0])
def test_the_ends_of_the_unit_interval_are_values_too(u):
    """Never one of weight 0, before the first or behind the last."""
    weights = torch.tensor([0.0, 0.1, 0.0, 0.7, 0.1, 0.0], dtype=torch.float64)
    index, rest = pick(weights, torch.tensor(u, dtype=torch.float64))
    assert index == (1 if u < 0.5 else 4)
    assert 0 <= rest <= 1
    head = MixtureOfLogistics(4, mixtures=2, values=16)
    value = head.sample(params_of(head), uniforms=torch.tensor(u, dtype=torch.float64))
    assert 0 <= value <= 15


def test_what_a_pick_leaves_of_its_uniform_is_uniform():
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    index, rest = pick(weights.expand(1000, -1), grid(1000))
    for i, n in enumerate((200, 500, 300)):
        assert (rest[index == i] - grid(n)).abs().max() < 1e-12


def test_rare_tokens_of_a_large_vocabulary_are_drawn():
    """At the end of 50,000 tokens stand 100 of 10⁻⁹ each, less than float32 sums or uniforms tell apart."""
    logits = torch.zeros(50_000, dtype=torch.float64)
    logits[-100:] = -9 * np.log(10) + np.log(49_900)
    head = TokenHead(4, 50_000)
    p = head.log_probs_all(logits).exp()
    middles = 1 - p[-100:].flip(0).cumsum(0).flip(0) + p[-1] / 2
    got = torch.stack([head.sample(logits, uniforms=u) for u in middles[::10]])
    assert torch.equal(got, torch.arange(49_900, 50_000)[::10])


def test_wrong_options_are_named(unchecked):
    head = Categorical(4, 16)
    params = params_of(head).expand(2, 3, -1)
    uniforms = torch.zeros(2, 3)
    wrong: list[tuple[dict, str]] = [
        ({"temperature": -1.0}, "temperature must be 0 .* got -1.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"top_k": 0}, "top_k must be a positive integer, or None for all values, got 0"),
        ({"top_k": 2.0}, "got 2.0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], or be None for all values, got 0.0"),
        ({"top_p": 1.1}, "got 1.1"),
        ({"uniforms": uniforms[0]}, r"each value, \(2, 3\), got \(3,\)"),
        ({"uniforms": uniforms.long()}, "got .* torch.int64"),
        ({"uniforms": uniforms, "generator": torch.Generator()}, "both given"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            head.sample(params, **options)


def test_parameters_that_are_not_numbers_are_refused():
    """They would be drawn as value 0 for ever."""
    head = Categorical(4, 16)
    params = params_of(head).repeat(2, 3, 1)
    params[1, 2, 5] = torch.nan
    with pytest.raises(ValueError, match="1 of 96 parameters of the distribution are not finite"):
        head.sample(params)
