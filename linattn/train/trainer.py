"""A run under way: model, optimizer, data, and everything else that a checkpoint must hold.

Axes:  B batch   T time
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from linattn._typing import Float, Int, Tensor
from linattn.models import Config, SequenceModel, save
from linattn.models.files import IN_A_RUN
from linattn.nn import StackState
from linattn.train import checkpoint
from linattn.train.checkpoint import Checkpoint, load_optimizer, load_weights, named, optimizer_tensors, under
from linattn.train.config import Run
from linattn.train.data import Batch, Dataset
from linattn.train.data import load as load_data
from linattn.train.data.loader import Walk
from linattn.train.evaluate import evaluate, marks
from linattn.train.metrics import UNITS, Metrics, Show
from linattn.train.optim import Average, Watch, clip, is_over, lr_at, make_optimizer, set_lr
from linattn.train.run_folder import writing
from linattn.train.setup import Predict, choose_device, make_loader, make_model, make_predict, make_record
from linattn.train.sheets import write_sheet

# sample(model, count, seed): what a sheet shows, uint8 images (count, H, W, C) or texts.
Sample = Callable[[SequenceModel, int, int], Tensor | Sequence[str]]
# A sheet comes last: should its generation fail, the checkpoint is written.
EVENTS = {"log": "log_every", "evaluate": "eval_every", "checkpoint": "checkpoint_every", "sheet": "sample_every"}


class Trainer:
    """`go_on` trains, from the beginning or from the checkpoint that `restore` was given."""

    def __init__(
        self, run: Run, config: Config | None, folder: Path, *, sample: Sample | None = None, quiet: bool = False
    ):
        self.run, self.folder, self.sample = run, folder, sample
        self.device = choose_device(run.device)
        self.data = self.load("train")
        self.model = self.fresh_model(config).to(self.device).train()
        self.optimizer = make_optimizer(run, self.model)
        self.average = None if run.ema is None else Average(self.model, run.ema)
        self.loader = self.walk()
        self.predict = self.prediction()
        self.states: list[StackState | None] = [None] * run.accumulate
        self.watch = Watch(run.patience)
        self.evaluation: dict[str, Any] | None = None
        self.held_out: Dataset | None = None
        self.step, self.seconds_before = 0, 0.0
        self.begun, self.begun_at = time.perf_counter(), 0  # of this session
        self.done = dict.fromkeys(EVENTS, 0)  # the step of the last one
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss and gradient norm since the last log
        self.summed, self.tokens, self.logged_at = 0, 0, 0.0  # steps and values since then; its `seconds`
        self.metrics: Metrics | None = None
        self.show = Show(run.steps, UNITS[self.data.kind], quiet=quiet)

    # What another kind of data does in its own way: these down to `count`, `backward` and `judge`.
    WATCHED = "nats"  # what the best evaluation has least of

    def load(self, split: str) -> Dataset:
        return load_data(self.run.data, split=split, **self.run.data_options)

    def fresh_model(self, config: Config | None) -> SequenceModel:
        return make_model(self.run, config, self.data)

    def walk(self) -> Walk:
        return make_loader(self.run, self.data, self.device)

    def prediction(self) -> Predict:
        return make_predict(self.run, self.model)

    def values_of(self, batch: Batch) -> Int[Tensor, "B T"]:
        return self.model.sequences(batch.data)

    def count(self, values: Int[Tensor, "B T"]) -> int:
        """What `tokens_per_second` counts."""
        return values[:, 1:].numel()

    @property
    def seconds(self) -> float:
        """Of training, in all sessions; without each one's first update, in which kernels are compiled and loaded."""
        return self.seconds_before + time.perf_counter() - self.begun

    @property
    def result_model(self) -> Any:
        """What is evaluated, sampled from and saved."""
        return self.model if self.average is None else self.average.model

    def go_on(self, stop: threading.Event) -> None:
        """To the end of the run, or until `stop` is set; then a last checkpoint."""
        self.begun, self.begun_at, self.logged_at = time.perf_counter(), self.step, self.seconds_before
        while not stop.is_set() and not is_over(self.run, self.step, self.seconds):
            self.update()
            if self.step == self.begun_at + 1:
                self.start_clock()
            for event, every in EVENTS.items():
                if getattr(self.run, every) and self.step % getattr(self.run, every) == 0:
                    self.do(event)
        for event in ("checkpoint",) if stop.is_set() else EVENTS:
            if self.done[event] < self.step:
                self.do(event)

    def start_clock(self) -> None:
        """Rivals that compile longer are not to train shorter."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.begun, self.tokens = time.perf_counter(), 0

    def update(self) -> None:
        """One step of the optimizer."""
        batch = next(self.loader)
        set_lr(self.optimizer, lr_at(self.run, self.step, self.seconds, self.watch.drops))
        self.optimizer.zero_grad()
        values = self.values_of(batch)
        self.sums[0] += self.backward(batch, values)
        self.sums[1] += clip(self.model.parameters(), self.run.clip)
        self.optimizer.step()
        if self.average is not None:
            self.average.update(self.model, self.step)
        self.step, self.summed, self.tokens = self.step + 1, self.summed + 1, self.tokens + self.count(values)

    def backward(self, batch: Batch, values: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        """The gradient of the mean over all predictions that count, part by part; and that mean."""
        size = self.run.batch // self.run.accumulate
        count = values[:, 1:].numel() if batch.mask is None else batch.mask[:, 1:].sum().clamp(min=1)
        losses = []
        for i, part in enumerate(values.split(size)):
            nats, self.states[i] = self.predict(part, self.state_before(i, batch.fresh))
            marked = marks(None if batch.mask is None else batch.mask[i * size : (i + 1) * size], nats)
            loss = nats.where(marked, 0).sum() / count
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def state_before(self, part: int, fresh: bool) -> StackState | None:
        """What the rows of a part go on from, cut off from the gradient, which would reach back to the beginning."""
        if not self.run.stateful:
            return None
        before = self.states[part]
        if fresh or before is None:
            return self.model.empty_state(self.run.batch // self.run.accumulate)
        return before.detach()

    def do(self, event: str) -> None:
        self.done[event] = self.step
        getattr(self, event)()

    def log(self) -> None:
        """A line of means since the one before."""
        loss, norm = (self.finite_sums() / self.summed).tolist()
        now = self.seconds
        line = {
            "kind": "train",
            "step": self.step,
            "nats": loss,
            "bits": loss / math.log(2),
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "epoch": round(self.loader.epochs, 4),
            "tokens_per_second": round(self.tokens / max(now - self.logged_at, 1e-9)),
            "seconds": round(now, 3),
        }
        self.sums.zero_()
        self.summed, self.tokens, self.logged_at = 0, 0, now
        self.write(line)
        self.show.train_line(line, self.seconds_left())

    def evaluate(self) -> None:
        """On the held-out split; the weights are saved if they are the ones to keep."""
        run = self.run
        if self.held_out is None:
            self.held_out = self.load(run.split)
        made = self.judge(self.held_out)
        line = {"kind": "eval", "step": self.step, "split": run.split, **made}
        line |= {"epoch": round(self.loader.epochs, 4), "seconds": round(self.seconds, 3)}
        self.check_finite(made["nats"])
        self.evaluation = line
        self.write(line)
        self.show.eval_line(line)
        if self.watch.update(made[self.WATCHED]) or run.keep == "last":
            record = make_record(run, self.data, self.step, self.seconds, line)
            with writing(self.folder / IN_A_RUN):
                save(self.result_model, self.folder / IN_A_RUN, record)  # pyright: ignore[reportArgumentType]

    def judge(self, held_out: Dataset) -> dict[str, Any]:
        """What an evaluation finds, nats and bits among it."""
        run = self.run
        options = {"window": run.window, "carry": run.stateful, "examples": run.eval_examples}
        return evaluate(self.result_model, held_out, batch=run.batch // run.accumulate, **options)

    def sheet(self) -> None:
        """Samples as they are by now, from the same random numbers each time; those of training are not touched."""
        if self.sample is None:
            return
        model, path = self.result_model, self.folder / "samples" / f"step-{self.step:08d}"
        was_training = model.training
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), writing(path):
            write_sheet(path, self.sample(model.eval(), self.run.samples, self.run.seed))
        model.train(was_training)

    def checkpoint(self) -> None:
        self.finite_sums()
        if self.metrics is not None:
            self.metrics.sync()
        facts = {
            "step": self.step,
            "seconds": self.seconds,
            "place": self.loader.state_dict(),
            "watch": dataclasses.asdict(self.watch),
            "evaluation": self.evaluation,
            "done": self.done,
            "summed": self.summed,
        }
        checkpoint.save(self.folder, self.tensors(), facts)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on, by name."""
        made = named("model", self.model.state_dict())
        made |= named("optimizer", optimizer_tensors(self.optimizer, self.model))
        made |= {"sums": self.sums, "random.cpu": torch.get_rng_state()}
        if self.average is not None:
            made |= named("average", self.average.model.state_dict())
        if self.device.type == "cuda":
            made["random.cuda"] = torch.cuda.get_rng_state(self.device)
        for i, state in enumerate(self.states):
            made |= {} if state is None else named(f"state.{i}", state.tensors())
        return made

    def restore(self, found: Checkpoint) -> None:
        """Go on from a checkpoint. One of another model, or of other data, raises."""
        tensors, facts = found
        where = f"the checkpoint of step {facts['step']} in {self.folder}"
        load_weights(self.model, under("model", tensors), where)
        if self.average is not None:
            load_weights(self.average.model, under("average", tensors), where)
        load_optimizer(self.optimizer, self.model, under("optimizer", tensors))
        self.loader.load_state_dict(facts["place"])
        for i in range(len(self.states)):
            self.states[i] = self.state_from(under(f"state.{i}", tensors))
        self.watch = Watch(**facts["watch"])
        self.evaluation, self.done, self.summed = (facts[name] for name in ("evaluation", "done", "summed"))
        self.step, self.seconds_before = facts["step"], facts["seconds"]
        self.sums.copy_(tensors["sums"])
        torch.set_rng_state(tensors["random.cpu"])
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], self.device)

    def state_from(self, tensors: dict[str, Tensor]) -> StackState | None:
        """A part's state from its tensors by name, None where there are none."""
        if not tensors:
            return None
        empty = self.model.empty_state(self.run.batch // self.run.accumulate)
        in_turn = (tensors[name].to(self.device) for name in empty.tensors())
        return empty.map(lambda _: next(in_turn))

    def open_metrics(self) -> None:
        self.metrics = Metrics(self.folder, self.step)

    def close(self) -> None:
        self.show.close()
        if self.metrics is not None:
            self.metrics.close()

    def introduce(self) -> None:
        how = f"from step {self.step:,}" if self.step else f"{self.run.batch} examples a step"
        self.show.say(
            f"{self.folder}: {self.model.num_parameters:,} parameters, {self.data!r}, on {self.device}, {how}"
        )

    def write(self, line: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(line)

    def seconds_left(self) -> float | None:
        """By the steps of this session, or by the clock, whichever ends first."""
        left = []
        if self.run.steps is not None and self.step > self.begun_at:
            session = time.perf_counter() - self.begun
            left.append(session / (self.step - self.begun_at) * (self.run.steps - self.step))
        if self.run.minutes is not None:
            left.append(60 * self.run.minutes - self.seconds)
        return min(left, default=None)

    def finite_sums(self) -> Tensor:
        """The sums, once they are known to be numbers."""
        self.check_finite(float(self.sums.sum()))
        return self.sums

    def check_finite(self, number: float) -> None:
        """Stop before NaN reaches a checkpoint."""
        if not math.isfinite(number):
            raise ValueError(
                f"the loss or its gradient is {number} by step {self.step}, since step {self.step - self.summed} at "
                f"the latest. The last checkpoint is from before. Begin a new run with a lower lr, more warmup or a "
                f"smaller clip (lr={self.run.lr}, warmup={self.run.warmup}, clip={self.run.clip})"
            )
