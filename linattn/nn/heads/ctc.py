"""Connectionist temporal classification: frames to a shorter sequence of labels (Graves et al. 2006).

    p(labels) = Σ over the paths c_1 … c_T that collapse to the labels of Π_t p_t(c_t)

A path names a label or the blank (0) for each frame; it collapses by merging equal neighbours, then dropping blanks.

Axes:  B batch   T frames   S labels of the longest utterance   W width of the features   P = 1 + number of labels
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.features.base import check_count, widen, without_autocast
from linattn.nn.checks import check_range
from linattn.nn.heads.base import check_width

BLANK = 0
Lengths = Tensor | Sequence[int] | None


class CTCHead(nn.Module):
    """Labels 1 … num_labels, and the blank as 0. Computes in float32 whatever the features are; float64 for float64.

    `lengths` are the frames of each utterance, `target_lengths` its labels; None is all of the axis. What stands
    behind them reaches neither the loss nor a gradient, NaN included.
    """

    def __init__(self, width: int, num_labels: int) -> None:
        super().__init__()
        self.width = check_count("width", width)
        self.num_labels = check_count("num_labels", num_labels)
        self.linear = nn.Linear(width, 1 + num_labels)

    def forward(self, features: Float[Tensor, "B T W"]) -> Float[Tensor, "B T P"]:
        """Log-probabilities of the blank and the labels, for each frame."""
        check_width(self, self.width, features)
        x = widen(features)
        with without_autocast(x):
            logits = F.linear(x, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype))
        return logits.log_softmax(-1)

    def loss(
        self,
        features: Float[Tensor, "B T W"],
        targets: Shaped[Tensor, "B S"],
        lengths: Lengths = None,
        target_lengths: Lengths = None,
    ) -> Float[Tensor, "B"]:
        """-log p(labels) of each utterance, in nats.

        Labels that do not fit the frames (each takes one, and one more between two equal neighbours) have probability
        0: the loss of that utterance is inf, and its gradient 0. So such utterances show, and do no harm; a mean to
        report is over `loss[loss.isfinite()]`, with the number of the others beside it.
        """
        frames = read_lengths("lengths", lengths, features)
        labels = read_lengths("target_lengths", target_lengths, targets)
        real = torch.arange(features.shape[1], device=features.device) < frames.unsqueeze(1)
        log_probs = self(features.where(real.unsqueeze(-1), 0))
        targets = self.real_labels(targets, labels)
        nats = F.ctc_loss(
            log_probs.transpose(0, 1), targets, frames, labels, blank=BLANK, reduction="none", zero_infinity=True
        )
        return nats.where(frames >= frames_needed(targets, labels), torch.inf)

    def real_labels(self, targets: Tensor, labels: Tensor) -> Tensor:
        """The targets as int64, checked, with 1 in the padding."""
        real = torch.arange(targets.shape[1], device=targets.device) < labels.unsqueeze(1)
        targets = targets.long().where(real, 1)
        check_range("targets", targets, 1, self.num_labels, "0 is the blank; padding is marked by target_lengths")
        return targets

    def decode(self, log_probs: Float[Tensor, "B T P"], lengths: Lengths = None) -> list[list[int]]:
        """The labels that the most probable path of each utterance collapses to (greedy)."""
        frames = read_lengths("lengths", lengths, log_probs)
        path = log_probs.argmax(-1)
        new = F.pad(path[:, 1:] != path[:, :-1], (1, 0), value=True)
        real = torch.arange(path.shape[1], device=path.device) < frames.unsqueeze(1)
        kept = new & real & (path != BLANK)
        return [row[keep].tolist() for row, keep in zip(path, kept, strict=True)]

    def extra_repr(self) -> str:
        return f"num_labels={self.num_labels}"


def frames_needed(targets: Int[Tensor, "B S"], labels: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
    """One for each label, and a blank between two equal neighbours."""
    inner = torch.arange(targets.shape[1], device=targets.device)[1:] < labels.unsqueeze(1)
    return labels + ((targets[:, 1:] == targets[:, :-1]) & inner).sum(-1)


def read_lengths(name: str, lengths: Lengths, x: Tensor) -> Tensor:
    """int64 on x's device, one a row, within 0 … x.shape[1]; values are read where that costs no synchronisation."""
    B, T = x.shape[:2]
    given = torch.as_tensor([T] * B if lengths is None else lengths)
    if given.shape != (B,):
        raise ValueError(f"{name} must hold one length for each of {B} rows, got shape {tuple(given.shape)}")
    check_range(name, given, 0, T, f"the rows of {tuple(x.shape)} are {T} long")
    return given.to(x.device, torch.int64)
