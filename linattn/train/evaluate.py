"""How good a model is on data that it was not trained on: exact, over every value of a split, sums in float64.

    nats        mean of -log p over the values that are predicted: of an image values 2 … L, of a text every byte but
                the first, of sequences with a mask those that it marks
    bits        nats / log 2
    bits_all    of images: over all L values, the first coded by its frequency in the training set

A text is read in windows that know nothing of each other, or with `carry` as one stream whose state goes on.

Axes:  B batch   T time   N = T - 1 predictions
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from linattn._typing import Bool, Float, Tensor
from linattn.models import ImageModel, SequenceModel
from linattn.train.data import Dataset, in_order, load

WINDOW = 512  # of a text, where none is given


@torch.no_grad()
def evaluate(
    model: SequenceModel,
    dataset: Dataset,
    *,
    batch: int = 64,
    window: int | None = None,
    carry: bool = False,
    examples: int | None = None,
) -> dict[str, Any]:
    """What is listed above, with the number of examples (of a text: bytes predicted). The model is left as it was."""
    if dataset.kind == "text" and window is None:
        window = WINDOW
    dataset = first(dataset, examples, window)
    if carry:
        # One row with the tokens of a whole batch: the same result as window after window, in fewer calls.
        window, batch = (window or 1) * batch, 1
    was_training = model.training
    model.eval()
    try:
        total, count, of_first = _totals(model, dataset, batch, window, carry)
    finally:
        model.train(was_training)
    nats = total / count
    made: dict[str, Any] = {"examples": count if dataset.kind == "text" else len(dataset), "nats": nats}
    made["bits"] = nats / math.log(2)
    if isinstance(model, ImageModel):
        made["bits_all"] = (total + of_first) / ((count + len(dataset)) * math.log(2))
    return made


def training_data(record: Mapping[str, Any], split: str, data: str | None = None) -> Dataset:
    """A split of what weights were trained on, by their record; or of other `data`."""
    if data is None and "run" not in record:
        raise ValueError("these weights do not say what they were trained on: name the data")
    trained: Mapping[str, Any] = record.get("run", {})
    if data is None or data == trained.get("data"):
        return load(trained["data"], split=split, **trained["data_options"])
    return load(data, split=split)


def first(dataset: Dataset, examples: int | None, window: int | None) -> Dataset:
    """The first examples of a dataset, None: all."""
    if examples is None:
        return dataset
    if examples < 1:
        raise ValueError(f"examples must be at least 1, or none for all, got {examples}")
    end = examples if window is None else examples * window + 1
    kept = {name: getattr(dataset, name) for name in ("data", "labels", "mask")}
    kept = {name: None if x is None else x[:end] for name, x in kept.items()}
    return dataclasses.replace(dataset, **kept, redraw=None, sha256="")


def _totals(
    model: SequenceModel, dataset: Dataset, batch: int, window: int | None, carry: bool
) -> tuple[float, int, float]:
    """Nats of all predicted values, how many they are, and the nats of the first ones."""
    device = model.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    of_first, counted = total.clone(), total.clone()
    state = model.empty_state(1) if carry else None
    for some in in_order(dataset, batch, window=window, device=device):
        values = model.sequences(some.data)
        nats, state = model.nats(values, state)
        marked = marks(some.mask, nats)
        total += nats.double().where(marked, 0).sum()
        counted += marked.sum()
        of_first -= model.first.log_prob(values[:, 0]).sum()
    return float(total), int(counted), float(of_first)


def marks(mask: Bool[Tensor, "B T"] | None, nats: Float[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Which predictions count: those of values 2 … T that the mask of values 1 … T marks."""
    return torch.ones_like(nats, dtype=torch.bool) if mask is None else mask[:, 1:]
