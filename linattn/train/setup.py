"""What a run needs before its first step: device, model, loader, prediction; and at its end, the record.

Axes:  B batch   T time
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.models import Config, SequenceModel, SpeechModel, build, load
from linattn.nn import StackState
from linattn.train.checkpoint import load_weights
from linattn.train.config import Run, fit_to
from linattn.train.data import Dataset, batches, streams
from linattn.train.data.loader import Walk
from linattn.train.optim import narrowed
from linattn.train.speech.data import SpeechData

Predict = Callable[
    [Int[Tensor, "B T"], StackState | None],
    tuple[Float[Tensor, "B N"], StackState | None],
]


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={name} was asked for, and torch {torch.__version__} sees no CUDA here: take device=cpu"
        )
    return device


def make_model(run: Run, config: Config | None, data: Dataset) -> SequenceModel:
    """The run's model, fresh or from `start`, on the CPU. config=None is the run's own, fitted to the data."""
    config = config or fit_to(run.config(), data.kind, data.shape, data.num_values)
    model = build(config)
    assert not isinstance(model, SpeechModel)  # fit_to refuses its config
    if run.start is not None:
        load_weights(model, load(run.start).state_dict(), run.start)
    model.first.fit(data.data if data.kind == "text" else data.data.flatten(1)[:, 0])
    return model


def make_loader(run: Run, data: Dataset, device: torch.device) -> Walk:
    if run.stateful:
        assert run.window is not None
        return streams(data, run.batch, run.window, device=device)
    draw = torch.Generator().manual_seed(run.seed)
    return batches(data, run.batch, window=run.window, device=device, generator=draw)


class Predictions(nn.Module):
    """-log p of each next value: model.nats as a module, so that its parameters can be put in another dtype."""

    def __init__(self, model: SequenceModel):
        super().__init__()
        self.model = model

    def forward(self, values: Int[Tensor, "B T"], state: StackState | None):
        return self.model.nats(values, state)


def make_predict(run: Run, model: SequenceModel) -> Predict:
    """nats, state = predict(values, state), in the run's precision, compiled if it says so."""
    predictions = Predictions(model)

    def narrow(values: Int[Tensor, "B T"], state: StackState | None):
        return torch.func.functional_call(predictions, narrowed(predictions), (values, state))

    predict = narrow if run.precision == "bf16" else predictions
    return torch.compile(predict) if run.compile else predict


def make_record(
    run: Run, data: Dataset | SpeechData, step: int, seconds: float, evaluation: dict[str, Any] | None
) -> dict[str, Any]:
    """How weights came about: what `linattn.models.files.record_of` gives back."""
    return {
        "run": run.to_json(),
        "data": {"name": data.name, "split": data.split, "sha256": data.sha256, "licence": data.licence},
        "step": step,
        "seconds": round(seconds, 1),
        "evaluation": evaluation,
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "linattn": _installed_version(),
        },
    }


def _installed_version() -> str | None:
    try:
        return metadata.version("linattn")
    except metadata.PackageNotFoundError:  # a checkout on the path
        return None
