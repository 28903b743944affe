"""Piano rolls: which of 88 keys are down at each step, and a model that says how likely that was.

    x_t in {0, 1}^88      p(x_{t+1} | x_1 … x_t) = Π_k p_k^x (1 - p_k)^(1 - x)      nats of a step: -log of it

The measure of Boulanger-Lewandowski, Bengio, Vincent 2012: the mean over all steps of the test pieces; the first step
of a piece is predicted from silence. Long pieces are trained on in crops and judged whole.

Axes:  U pieces   B batch   T steps   K = 88 keys
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.models import LanguageConfig
from linattn.nn import Stack
from linattn.study.data import music_file
from linattn.study.learn import Diverged
from linattn.study.matfile import read_mat
from linattn.study.sizes import TaskSize
from linattn.train.config import Run
from linattn.train.optim import clip, lr_at, make_optimizer, set_lr

KEYS = 88
SPLITS = {"train": "traindata", "dev": "validdata", "test": "testdata"}
LONGEST = 4096  # steps of a batch in evaluation, in all


class MusicModel(nn.Module):
    """Keys in, a stack, the logits of the next step's keys out."""

    def __init__(self, config: LanguageConfig, *, generator: torch.Generator | None = None):
        super().__init__()
        self.enter = nn.Linear(KEYS, config.layer.width)
        self.stack = Stack(config.layer, config.depth, generator=generator)
        self.leave = nn.Linear(config.layer.width, KEYS)

    def nats(self, rolls: Float[Tensor, "B T K"], lengths: Int[Tensor, " B"]) -> Float[Tensor, "B T"]:
        """Of every step, given those before it; 0 beyond a piece's length."""
        before = F.pad(rolls, (0, 0, 1, 0))[:, :-1]  # the first step follows silence
        features, _ = self.stack(self.enter(before), lengths=lengths)
        nats = F.binary_cross_entropy_with_logits(self.leave(features), rolls, reduction="none").sum(-1)
        real = torch.arange(rolls.shape[1], device=rolls.device) < lengths[:, None]
        return nats.where(real, 0)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


@functools.lru_cache(maxsize=4)
def pieces(name: str) -> dict[str, list[Shaped[Tensor, "T K"]]]:
    """All three splits, uint8."""
    path = music_file(name)
    found = read_mat(path.read_bytes(), path)
    return {split: [_roll(array, path) for array in found[key]] for split, key in SPLITS.items()}


def _roll(array: np.ndarray, path: object) -> Tensor:
    if array.ndim != 2 or array.shape[1] != KEYS or not np.isin(array, (0, 1)).all():
        raise ValueError(f"{path} should hold rolls of zeros and ones, (steps, {KEYS}); one is {array.shape}")
    return torch.from_numpy(np.ascontiguousarray(array, np.uint8))


def learn(run: Run, task: TaskSize, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train and judge one model: nats of a step on dev or test."""
    data = pieces(task.data["file"])
    torch.manual_seed(run.seed)
    torch.set_num_threads(run.threads or torch.get_num_threads())
    config = run.config()
    assert isinstance(config, LanguageConfig)
    model = MusicModel(config).to(run.device).train()
    optimizer, curve, steps = make_optimizer(run, model), [], 0
    for step, rolls in enumerate(crops(data["train"], run, task.data["crop"])):
        set_lr(optimizer, lr_at(run, step))
        optimizer.zero_grad()
        batch, lengths = padded(rolls, run.device)
        loss = model.nats(batch, lengths).sum() / lengths.sum()
        loss.backward()
        clip(model.parameters(), run.clip)
        optimizer.step()
        steps += int(lengths.sum())
        if (step + 1) % run.log_every == 0:
            curve.append([step + 1, round(float(loss.detach()), 4)])
            if not np.isfinite(curve[-1][1]):
                raise Diverged(f"the loss is {curve[-1][1]} by step {step + 1}")
    split = "dev" if settings["stage"] == "screen" else "test"
    found = {"data": task.data["file"], "split": split, "curve": curve, "steps": run.steps, "tokens": steps}
    found |= {"parameters": model.num_parameters}
    found |= {"state_bytes": model.stack.empty_state(1, capacity=task.data["crop"]).nbytes}
    return found | {"score": judge(model.eval(), data[split], run.device)}


def crops(rolls: list[Tensor], run: Run, crop: int) -> Iterator[list[Tensor]]:
    """Batches of pieces in random order, each cut to a random stretch of at most `crop` steps."""
    draw = torch.Generator().manual_seed(run.seed)
    order: list[int] = []
    for _ in range(run.steps or 0):
        while len(order) < run.batch:
            order += torch.randperm(len(rolls), generator=draw).tolist()
        chosen, order = order[: run.batch], order[run.batch :]
        begins = [int(torch.randint(max(1, len(rolls[i]) - crop + 1), (), generator=draw)) for i in chosen]
        yield [rolls[i][begin : begin + crop] for i, begin in zip(chosen, begins, strict=True)]


def padded(rolls: list[Tensor], device: str) -> tuple[Tensor, Tensor]:
    batch = nn.utils.rnn.pad_sequence([roll.float() for roll in rolls], batch_first=True)
    return batch.to(device), torch.tensor([len(roll) for roll in rolls], device=device)


@torch.no_grad()
def judge(model: MusicModel, rolls: list[Tensor], device: str) -> float:
    """Mean nats over all steps of all pieces, whole; similar lengths together."""
    total, count = 0.0, 0
    todo = sorted(rolls, key=len)
    while todo:
        size = max(1, LONGEST // len(todo[-1]))
        batch, lengths = padded(todo[-size:], device)
        todo = todo[:-size]
        total += float(model.nats(batch, lengths).double().sum())
        count += int(lengths.sum())
    return total / count
