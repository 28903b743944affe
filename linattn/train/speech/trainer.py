"""Training a recogniser: the one loop, with batches of utterances in place of next values.

    loss = Σ over utterances of -log p(labels) / Σ of their labels

Axes:  B batch   T frames   F features   S labels
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.audio import SpecAugment
from linattn.models import Config, SpeechConfig, SpeechModel, build, load
from linattn.train.checkpoint import load_weights
from linattn.train.config import Run
from linattn.train.optim import narrowed
from linattn.train.speech.data import SpeechBatch, SpeechData, SpeechWalk, load_speech
from linattn.train.speech.evaluate import evaluate_speech
from linattn.train.trainer import Trainer


class SpeechTrainer(Trainer):
    """Trainer, for utterances. The best weights are those with the fewest wrong labels."""

    WATCHED = "error_rate"
    data: SpeechData  # type: ignore[assignment]
    model: SpeechModel  # type: ignore[assignment]

    def load(self, split: str) -> SpeechData:  # type: ignore[override]
        return load_speech(self.run.data, split=split, **self.run.data_options)

    def fresh_model(self, config: Config | None) -> SpeechModel:  # type: ignore[override]
        model = build(config or fitted(self.run.config(), self.data))
        assert isinstance(model, SpeechModel)
        if self.run.start is not None:
            load_weights(model, load(self.run.start).state_dict(), self.run.start)
        return model

    def walk(self) -> SpeechWalk:  # type: ignore[override]
        return SpeechWalk(self.data, self.run.batch, self.run.seed)

    def prediction(self) -> Any:
        return make_nats(self.run, self.model)

    def values_of(self, batch: SpeechBatch) -> SpeechBatch:  # type: ignore[override]
        return batch

    def count(self, values: SpeechBatch) -> int:  # type: ignore[override]
        """Frames of sound, before subsampling and without padding."""
        return int(values.lengths.sum())

    def backward(self, batch: SpeechBatch, values: SpeechBatch) -> Float[Tensor, ""]:  # type: ignore[override]
        """The gradient of the mean over all labels, part by part; and that mean."""
        count = batch.label_lengths.sum()
        losses = []
        for rows in torch.arange(len(batch.rows)).chunk(self.run.accumulate):
            nats = self.predict(*self.part(batch, rows))  # type: ignore[call-arg]
            loss = nats.where(nats.isfinite(), 0).sum() / count  # type: ignore[union-attr]
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def part(self, batch: SpeechBatch, rows: Int[Tensor, " R"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Some rows of a batch on the device, no longer than the longest of them, some of it blanked."""
        lengths, label_lengths = batch.lengths[rows], batch.label_lengths[rows]
        frames = batch.frames[rows, : int(lengths.max())]
        if self.data.augment:
            frames = SpecAugment()(frames, lengths)
        labels = batch.labels[rows, : int(label_lengths.max())]
        return frames.to(self.device), labels.to(self.device), lengths.to(self.device), label_lengths.to(self.device)

    def sheet(self) -> None:
        """A recogniser shows itself in its error rate."""

    def judge(self, held_out: SpeechData) -> dict[str, Any]:  # type: ignore[override]
        data = held_out.first(self.run.eval_examples)
        made = evaluate_speech(self.result_model, data, batch=self.run.batch)  # type: ignore[arg-type]
        made.pop("speakers")  # a line of metrics stays short; `linattn eval` has them
        return made


class Nats(nn.Module):
    """model.nats as a module, so that its parameters can be put in another dtype."""

    def __init__(self, model: SpeechModel):
        super().__init__()
        self.model = model

    def forward(
        self,
        frames: Float[Tensor, "B T F"],
        labels: Shaped[Tensor, "B S"],
        lengths: Int[Tensor, " B"],
        label_lengths: Int[Tensor, " B"],
    ) -> Float[Tensor, " B"]:
        return self.model.nats(frames, labels, lengths, label_lengths)


def make_nats(run: Run, model: SpeechModel) -> Any:
    """nats(frames, labels, lengths, label_lengths) in the run's precision, compiled if it says so."""
    module = Nats(model)

    def narrow(*batch: Tensor) -> Tensor:
        return torch.func.functional_call(module, narrowed(module), batch)

    nats = narrow if run.precision == "bf16" else module
    return torch.compile(nats) if run.compile else nats


def fitted(config: Config, data: SpeechData) -> SpeechConfig:
    """The config with the data's labels and front end. A causal model cannot read what needs the utterance's end."""
    if not isinstance(config, SpeechConfig):
        raise ValueError(f"a recogniser is trained on speech, got the config of a {type(config).__name__}")
    if config.layer.causal and data.front.scaling == "utterance":
        raise ValueError(
            "scaling=utterance needs the end of the utterance, which a causal model does not wait for: "
            "take scaling=running, or causal=false"
        )
    return dataclasses.replace(
        config,
        num_labels=len(data.label_names),
        labels=data.label_names,
        num_features=data.front.bins,
        front=data.front,
    )
