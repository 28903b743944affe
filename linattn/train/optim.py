"""How weights move: torch's AdamW and RAdam, the learning rate over time, bfloat16 products, averaged weights.

lr(t) = lr · min(1, (t + 1) / warmup) · f(t)             before update t = 0, 1, …
constant  f = 1
cosine    f = d + (1 - d) (1 + cos πp) / 2               d = lr_decay, p the part of the run after warm-up that is over
step      f = d^n                                        n of the `drops` are behind: drop ≤ t
plateau   f = d^n                                        n times `patience` evaluations in a row brought no new best

averaged weights   a ← β a + (1 - β) w,   β = min(ema, (1 + t) / (10 + t)): at first w changes too fast to be averaged
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from linattn._typing import Tensor
from linattn.features import FeatureMap
from linattn.nn.heads import CTCHead, Head
from linattn.train.config import Run

STILL_BETTER = 1e-4  # nats by which an evaluation must beat the best one to be a new best


def make_optimizer(run: Run, model: nn.Module) -> Optimizer:
    """One group for matrices and embeddings, which decay, and one for biases and norms, which do not."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() >= 2], "weight_decay": run.weight_decay},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (run.betas[0], run.betas[1])
    if run.optimizer == "radam":
        return torch.optim.RAdam(groups, run.lr, betas, decoupled_weight_decay=True)
    return torch.optim.AdamW(groups, run.lr, betas, fused=weights[0].is_cuda)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_at(run: Run, step: int, seconds: float = 0.0, drops: int = 0) -> float:
    """The learning rate of update `step`, begun after `seconds` of training; `drops` are those of the plateau."""
    warm = min(1.0, (step + 1) / run.warmup) if run.warmup else 1.0
    if run.schedule == "cosine":
        wave = (1 + math.cos(math.pi * part_over(run, step, seconds))) / 2
        return run.lr * warm * (run.lr_decay + (1 - run.lr_decay) * wave)
    if run.schedule == "step":
        drops = sum(drop <= step for drop in run.drops)
    return run.lr * warm * run.lr_decay**drops


def part_over(run: Run, step: int, seconds: float) -> float:
    """0 … 1: of the updates after warm-up or of the minutes, whichever is further."""
    parts = [0.0]
    if run.steps is not None:
        parts.append((step - run.warmup) / max(run.steps - run.warmup, 1))
    if run.minutes is not None:
        parts.append(seconds / (60 * run.minutes))
    return min(max(parts), 1.0)


def is_over(run: Run, step: int, seconds: float) -> bool:
    """Whether all steps are done, or all minutes have passed."""
    return (run.steps is not None and step >= run.steps) or (run.minutes is not None and seconds >= 60 * run.minutes)


@dataclasses.dataclass
class Watch:
    """Over the evaluations: the best one, those since without a new best, and how often the plateau dropped lr."""

    patience: int
    best: float | None = None
    bad: int = 0
    drops: int = 0

    def update(self, nats: float) -> bool:
        """Whether this evaluation is a new best."""
        if self.best is None or nats < self.best - STILL_BETTER:
            self.best, self.bad = nats, 0
            return True
        self.bad += 1
        if self.bad >= self.patience:
            self.bad, self.drops = 0, self.drops + 1
        return False


def clip(parameters: Iterable[Tensor], largest: float | None) -> Tensor:
    """Scale the gradient to a norm of at most `largest`; the norm it had."""
    return nn.utils.clip_grad_norm_(parameters, math.inf if largest is None else largest)


def narrowed(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters, in bfloat16 where matrix products are to be.

    In place of autocast, which decides anew at every operation: the weights stay float32 and are what the optimizer
    moves, the forward pass runs on rounded copies, and the gradient flows back through the rounding (as if it were
    not there). Heads and feature maps compute in float32 anyway, and keep their weights.
    """
    wide = [f"{name}." for name, module in model.named_modules() if isinstance(module, (Head, CTCHead, FeatureMap))]
    return {
        name: w if any(name.startswith(prefix) for prefix in wide) else w.bfloat16()
        for name, w in model.named_parameters()
    }


class Average:
    """A copy of the model with averaged weights."""

    def __init__(self, model: nn.Module, ema: float):
        self.model: Any = copy.deepcopy(model).requires_grad_(False).eval()
        self.ema = ema

    def update(self, model: nn.Module, step: int) -> None:
        """After update `step` = 0, 1, …"""
        move = get_ema_multi_avg_fn(min(self.ema, (1 + step) / (10 + step)))
        move(list(self.model.parameters()), list(model.parameters()), step)
