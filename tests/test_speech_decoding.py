"""Prefix search against the sum over all paths; error rates against jiwer."""

from __future__ import annotations

import itertools
import math
import random

import jiwer
import pytest
import torch

from linattn.nn.heads.beam import beam_search
from linattn.train.speech.error_rate import Errors, errors, interval


def log_probs(frames: int, labels: int, seed: int) -> torch.Tensor:
    made = 2 * torch.randn(frames, labels + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.log_softmax(-1)


def all_sequences(table: torch.Tensor) -> dict[tuple[int, ...], float]:
    """p of every label sequence, path by path."""
    p, found = table.exp().tolist(), {}
    for path in itertools.product(range(table.shape[1]), repeat=len(table)):
        labels = tuple(label for label, _ in itertools.groupby(path) if label)
        found[labels] = found.get(labels, 0.0) + math.prod(p[t][c] for t, c in enumerate(path))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_an_unbounded_search_is_exact(seed):
    table = log_probs(6, 2, seed)
    expected = sorted(all_sequences(table).items(), key=lambda item: -item[1])
    found = beam_search(table, width=10_000, least=-math.inf)
    assert [tuple(one.labels) for one in found] == [labels for labels, _ in expected]
    assert all(abs(math.exp(one.log_prob) - p) < 1e-12 for one, (_, p) in zip(found, expected, strict=True))


def test_a_narrow_search_finds_what_greedy_decoding_misses():
    """One path is the most probable, yet the paths of A together are more so."""
    table = torch.tensor([[0.55, 0.45], [0.55, 0.45]], dtype=torch.float64).log()
    assert beam_search(table, width=2)[0].labels == [1]  # 0.45² + 2 · 0.45 · 0.55 = 0.70


def test_a_width_of_1_is_allowed_and_0_is_not():
    assert len(beam_search(log_probs(5, 3, 0), width=1)) == 1
    with pytest.raises(ValueError, match="at least 1, got 0"):
        beam_search(log_probs(5, 3, 0), width=0)
    assert beam_search(log_probs(5, 3, 0)[:0])[0].labels == []


def test_errors_against_jiwer():
    draw = random.Random(0)
    for _ in range(300):
        said, heard = (" ".join(draw.choices("abcd", k=draw.randint(low, 12))) for low in (1, 0))
        theirs = jiwer.process_words(said, heard)
        ours = errors(said.split(), heard.split())
        assert ours.rate == pytest.approx(theirs.wer)
        assert ours.length == theirs.hits + theirs.substitutions + theirs.deletions
        assert ours.total == theirs.substitutions + theirs.deletions + theirs.insertions
        assert ours.insertions - ours.deletions == len(heard.split()) - ours.length


def test_characters_against_jiwer():
    for said, heard in (("kitten", "sitting"), ("we call it bear", "we called a beer"), ("abc", "")):
        assert errors(said, heard).rate == pytest.approx(jiwer.cer(said, heard))


def test_counts_add_and_nothing_said_has_no_rate():
    assert Errors(1, 2, 3, 10) + Errors(1, 0, 0, 5) == Errors(2, 2, 3, 15)
    assert math.isnan(errors([], []).rate) and errors([], ["a"]).total == 1
    assert errors("abab", "abab") == Errors(0, 0, 0, 4)


def test_the_interval_of_many_speakers_is_that_of_the_normal_distribution():
    draw = torch.Generator().manual_seed(0)
    wrong = torch.randint(0, 100, (400,), generator=draw)
    low, high = interval({str(i): Errors(int(w), 0, 0, 200) for i, w in enumerate(wrong)})
    mean, spread = float(wrong.double().mean()) / 200, float(wrong.double().std()) / 200 / math.sqrt(400)
    assert abs(low - (mean - 1.96 * spread)) < 0.2 * spread and abs(high - (mean + 1.96 * spread)) < 0.2 * spread
    assert interval({"one": Errors(1, 0, 0, 4)}) == (0.25, 0.25)
