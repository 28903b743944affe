"""Bits per dimension against sums written out, and the first value's distribution against counts."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from linattn.nn.heads import Categorical, FirstValue, bits_per_dim

TRAINING = torch.tensor([0, 0, 0, 1, 1, 3, 0, 3], dtype=torch.uint8)


def fitted() -> FirstValue:
    first = FirstValue(4)
    first.fit(TRAINING)
    return first


def test_both_figures_against_sums_written_out():
    """Two images of four values from 0 … 3, with probabilities in a table."""
    head, first = Categorical(5, 4), fitted()
    images = torch.tensor([[0, 3, 1, 1], [2, 0, 2, 3]])
    params = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    nats = -head.log_prob(params, images[:, 1:])
    p, counts = params.double().softmax(-1), Counter(TRAINING.tolist())
    for b, image in enumerate(images.tolist()):
        bits = [-math.log2(p[b, i - 1, image[i]]) for i in range(1, 4)]
        bits_of_first = -math.log2((counts[image[0]] + 1 / 4) / (len(TRAINING) + 1))
        assert float(bits_per_dim(nats)[b]) == pytest.approx(sum(bits) / 3, rel=1e-6)
        full = bits_per_dim(nats, first=-first.log_prob(images[:, 0]))
        assert float(full[b]) == pytest.approx((bits_of_first + sum(bits)) / 4, rel=1e-6)


def test_the_full_figure_is_the_code_length_of_a_whole_sequence():
    """So the probabilities 2^-(L · bits) of all sequences sum to 1."""
    first, transition = fitted(), torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sequences = torch.tensor(list(itertools.product(range(4), repeat=3)))
    nats = -Categorical(1, 4).log_prob(transition[sequences[:, :-1]], sequences[:, 1:])
    full = bits_per_dim(nats, first=-first.log_prob(sequences[:, 0]))
    assert float((2 ** (-3 * full)).sum()) == pytest.approx(1, abs=1e-12)


def test_sums_are_float64():
    nats = torch.full((1, 100_000), 0.1)
    assert float(bits_per_dim(nats)) == pytest.approx(float(nats[0, 0]) / math.log(2), rel=1e-12)


def test_the_first_value_follows_its_counts():
    first = fitted()
    expected = torch.tensor([4.25, 2.25, 0.25, 2.25], dtype=torch.float64) / 9
    assert torch.allclose(first.probabilities, expected, rtol=1e-14)
    assert torch.allclose(first.log_prob(torch.arange(4)), expected.log(), rtol=1e-14)
    uniforms = (torch.arange(9000) + 0.5) / 9000
    drawn = first.sample(9000, uniforms=uniforms)
    assert torch.bincount(drawn).tolist() == [4250, 2250, 250, 2250]
    again = first.sample(50, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again, first.sample(50, generator=torch.Generator().manual_seed(1)))


def test_the_first_value_is_uniform_before_it_is_fitted_and_forgets_when_it_is_fitted_again():
    first = FirstValue()
    assert torch.allclose(first.probabilities, torch.full((256,), 1 / 256, dtype=torch.float64))
    first.fit(torch.tensor([7, 7]))
    first.fit(torch.tensor([200]))
    assert first.counts.sum() == 1 and first.probabilities.argmax() == 200


def test_casts_and_saving_keep_the_counts():
    """A buffer of bfloat16 would hold 59,999 of 60,000 as 59,904."""
    first, loaded = FirstValue(), FirstValue()
    first.fit(torch.tensor([0] * 59_999 + [255]))
    exact = first.probabilities
    loaded.load_state_dict(first.bfloat16().state_dict())
    assert torch.equal(first.probabilities, exact) and torch.equal(loaded.probabilities, exact)
    assert float(exact[0]) == pytest.approx((59_999 + 1 / 256) / 60_001, rel=1e-12)


def test_wrong_calls_are_named(unchecked):
    with pytest.raises(ValueError, match=r"no values to take the mean of: nats is \(2, 0\)"):
        bits_per_dim(torch.zeros(2, 0))
    with pytest.raises(ValueError, match="0 … 3, got 4"):
        fitted().log_prob(torch.tensor([4]))
    with pytest.raises(ValueError, match="0 … 3, got 9"):
        fitted().fit(torch.tensor([1, 9]))
