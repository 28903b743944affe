"""One small training run, kept in memory: the trainer of `linattn train`, on data that is at hand, writing no files.

    pupil = Pupil(run, datasets)        datasets(split) is the data; run.data is only its name
    pupil.learn()                       to the end of the run; pupil.curve is [[step, bits], …]

Axes:  B batch   T time   N = T - 1 predictions
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linattn._typing import Tensor
from linattn.models import SequenceModel
from linattn.train.config import Run
from linattn.train.data import Dataset, in_order
from linattn.train.evaluate import marks
from linattn.train.trainer import Trainer

Datasets = Callable[[str], Dataset]


class Diverged(Exception):
    """The loss is no number any more: a result, and not a mistake."""


class Pupil(Trainer):
    """Trainer, without a folder: its lines are kept, and it is judged by whoever made it."""

    def __init__(self, run: Run, datasets: Datasets):
        self.datasets, self.curve = datasets, []
        super().__init__(run, None, Path(), quiet=True)

    def load(self, split: str) -> Any:
        return self.datasets(split)

    def learn(self) -> Any:
        """The trained model, ready to be judged."""
        try:
            self.go_on(threading.Event())
        finally:
            self.close()
        return self.result_model.eval()

    def write(self, line: dict[str, Any]) -> None:
        self.curve.append([line["step"], round(line["bits"], 4)])

    def check_finite(self, number: float) -> None:
        if not math.isfinite(number):
            raise Diverged(f"the loss or its gradient is {number} by step {self.step}")

    def evaluate(self) -> None:
        """Afterwards, on the split that is asked for."""

    def checkpoint(self) -> None:
        """A run this small is made again."""


@torch.no_grad()
def accuracy(model: SequenceModel, dataset: Dataset, batch: int = 256) -> float:
    """The part of the values marked by the dataset's mask that the model holds for the likeliest."""
    right = counted = 0
    for some in in_order(dataset, batch, device=model.device):
        values = model.sequences(some.data)
        guessed = likeliest(model, values)
        marked = marks(some.mask, guessed.float())
        right += int(((guessed == values[:, 1:]) & marked).sum())
        counted += int(marked.sum())
    return right / counted


def likeliest(model: SequenceModel, values: Tensor) -> Tensor:
    """(B, N): for each value but the first, the likeliest one given those before it."""
    params, _ = model(values[:, :-1])
    return params.argmax(-1)
