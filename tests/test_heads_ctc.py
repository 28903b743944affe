"""CTC against the sum over every path, written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from linattn.nn.heads import CTCHead
from linattn.nn.heads.ctc import frames_needed

# The last: labels 1 1 need three frames and get two.
TARGETS = torch.tensor([[1, 2, 0], [2, 2, 1], [3, 0, 0], [0, 0, 0], [1, 1, 0]])
LABELS, FRAMES = [2, 3, 1, 0, 2], [4, 5, 1, 3, 2]
FITS = [True, True, True, True, False]


def made() -> CTCHead:
    torch.manual_seed(0)
    return CTCHead(6, num_labels=3).double()


def features(rows: int = 5, frames: int = 5, seed: int = 1) -> Tensor:
    return 3 * torch.randn(rows, frames, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def collapsed(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label != 0]


def nats(log_probs: Tensor, labels: list[int]) -> float:
    """-log Σ over the paths that collapse to the labels, for one utterance (T P)."""
    p = log_probs.exp().tolist()
    paths = itertools.product(range(log_probs.shape[1]), repeat=len(p))
    total = sum(math.prod(p[t][c] for t, c in enumerate(path)) for path in paths if collapsed(path) == labels)
    return -math.log(total) if total else math.inf


def test_against_the_sum_over_all_paths():
    head, x = made(), features()
    log_probs = head(x).detach()
    assert (log_probs.exp().sum(-1) - 1).abs().max() < 1e-14
    exact = [nats(log_probs[b, : FRAMES[b]], TARGETS[b, : LABELS[b]].tolist()) for b in range(5)]
    loss = head.loss(x, TARGETS, FRAMES, LABELS)
    assert torch.allclose(loss, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert loss.isfinite().tolist() == FITS
    assert torch.equal(loss, head.loss(x, TARGETS.to(torch.uint8), torch.tensor(FRAMES), torch.tensor(LABELS)))


def test_the_probabilities_of_all_label_sequences_sum_to_1():
    head, x = made(), features(1, 3)
    sequences = [s for n in range(4) for s in itertools.product((1, 2, 3), repeat=n)]
    targets = torch.tensor([[*s, *[0] * (3 - len(s))] for s in sequences])
    loss = head.loss(x.expand(len(sequences), -1, -1), targets, target_lengths=[len(s) for s in sequences])
    assert abs(float((-loss.detach()).exp().sum()) - 1) < 1e-12


def test_gradients():
    head, x = made(), features().requires_grad_()
    fits = torch.tensor(FITS)
    assert torch.autograd.gradcheck(lambda x, _: head.loss(x, TARGETS, FRAMES, LABELS)[fits], (x, head.linear.weight))


def test_labels_that_do_not_fit_show_and_do_no_harm():
    """The mean of the batch is inf, its gradient the one of the utterances that fit."""
    head, x = made(), features().requires_grad_()
    parameters = [x, *head.parameters()]
    loss = head.loss(x, TARGETS, FRAMES, LABELS)
    all_rows = torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
    fitting = torch.autograd.grad(loss[:4].sum(), parameters)
    assert loss.mean() == torch.inf
    for a, b in zip(all_rows, fitting, strict=True):
        assert torch.equal(a, b) and a.abs().max() > 0
    assert all_rows[0][4].abs().max() == 0


def test_padding_reaches_neither_loss_nor_gradient():
    """NaN in it neither, in frames and in any number in place of labels."""
    head = made()
    results = []
    for frame, label in ((0.0, 0), (torch.nan, 77)):
        x, targets = features().requires_grad_(), TARGETS.clone()
        padded, parameters = x.clone(), [x, *head.parameters()]
        for b in range(5):
            padded[b, FRAMES[b] :] = frame
            targets[b, LABELS[b] :] = label
        loss = head.loss(padded, targets, FRAMES, LABELS)[:4]
        results.append((loss, *torch.autograd.grad(loss.sum(), parameters)))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and clean.abs().max() > 0


@pytest.mark.parametrize("frames", [0, 1, 3])
def test_an_empty_utterance(frames):
    """No labels in no frames are certain; a label in no frame is impossible."""
    head, x = made(), features(2, 3).requires_grad_()
    loss = head.loss(x, torch.tensor([[2], [0]]), [frames, frames], [1, 0])
    exact = [nats(head(x)[b, :frames].detach(), labels) for b, labels in enumerate(([2], []))]
    assert torch.allclose(loss, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert gradient.isfinite().all() and (gradient[:, :frames] != 0).all()
    assert gradient[:, frames:].abs().sum() == 0
    none = head.loss(x, torch.zeros(2, 0, dtype=torch.int64))
    assert torch.allclose(none, -head(x)[..., 0].sum(-1), rtol=1e-12)


def test_frames_needed_against_the_shortest_path():
    shortest = {}
    for T in range(1, 6):
        for path in itertools.product(range(3), repeat=T):
            shortest.setdefault(tuple(collapsed(path)), T)
    sequences = [s for s in shortest if len(s) == 3]
    targets = torch.tensor(sequences)
    needed = frames_needed(targets, torch.full((len(sequences),), 3))
    assert needed.tolist() == [shortest[s] for s in sequences] and len(sequences) == 8
    cut = frames_needed(targets, torch.full((len(sequences),), 2))
    assert cut.tolist() == [shortest[s[:2]] for s in sequences]


def test_decode_collapses_the_best_path():
    paths = torch.tensor([[0, 1, 1, 0, 1, 2], [3, 3, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0], [1, 2, 1, 1, 3, 3]])
    log_probs = torch.nn.functional.one_hot(paths, 4).double().mul(5).log_softmax(-1)
    lengths = [6, 5, 6, 3]
    expected = [collapsed(tuple(row[:n])) for row, n in zip(paths.tolist(), lengths, strict=True)]
    assert expected == [[1, 1, 2], [3, 2], [], [1, 2, 1]]
    assert made().decode(log_probs, lengths) == expected
    assert made().decode(log_probs)[3] == [1, 2, 1, 3]


def test_half_precision_changes_the_inputs_only():
    head, x = made().float(), features().bfloat16()
    exact = head.loss(x.float(), TARGETS, FRAMES, LABELS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head.loss(x, TARGETS, FRAMES, LABELS), exact)
    assert exact.dtype == torch.float32 and torch.equal(head.loss(x, TARGETS, FRAMES, LABELS), exact)


def test_it_learns_what_it_is_told():
    torch.manual_seed(0)
    head, x = CTCHead(6, 3), features(4, 5).float()
    targets = torch.tensor([[1, 2, 3], [2, 2, 0], [3, 0, 0], [1, 3, 1]])
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        head.loss(x, targets, target_lengths=[3, 2, 1, 3]).mean().backward()
        optimizer.step()
    assert head.decode(head(x)) == [[1, 2, 3], [2, 2], [3], [1, 3, 1]]


@pytest.mark.parametrize(
    ("targets", "lengths", "target_lengths", "message"),
    [
        ([[1, 0], [1, 2]], None, None, "targets must lie in 1 … 3, got 0: 0 is the blank; padding is marked by"),
        ([[1, 4], [1, 2]], None, None, "1 … 3, got 4"),
        ([[1, 2], [1, 2]], [5, 6], None, r"lengths must lie in 0 … 5, got 6: the rows of \(2, 5, 6\) are 5 long"),
        ([[1, 2], [1, 2]], None, [2, 3], "target_lengths must lie in 0 … 2, got 3"),
        ([[1, 2], [1, 2]], [5], None, r"lengths must hold one length for each of 2 rows, got shape \(1,\)"),
        ([[1, 2], [1, 2]], [5.0, 4.0], None, "lengths must be integers"),
    ],
)
def test_wrong_targets_are_named(targets, lengths, target_lengths, message, unchecked):
    with pytest.raises(ValueError, match=message):
        made().loss(features(2), torch.tensor(targets), lengths, target_lengths)
