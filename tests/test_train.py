"""The loop against one that is written out, and what is true of every run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_cases import TINY, assert_same_weights, lines_of, tiny, weights_of

from linattn.models import build, load
from linattn.models.files import record_of
from linattn.train import Run, evaluate, train
from linattn.train.data import batches, in_order
from linattn.train.data import load as load_data
from linattn.train.trainer import Trainer


def by_hand(run, make_optimizer):
    """The weights after run.steps of a loop that shares nothing with ours but model, data and torch's optimizer."""
    data = load_data(run.data, **run.data_options)
    with torch.random.fork_rng([]):
        torch.manual_seed(run.seed)
        model = build(dataclasses.replace(run.config(), shape=data.shape))
    start = {name: x.clone() for name, x in model.named_parameters()}
    optimizer = make_optimizer(model.parameters())
    loader = batches(data, run.batch, generator=torch.Generator().manual_seed(run.seed))
    for _ in range(run.steps):
        values = next(loader).data.flatten(1).long()
        params, _ = model(values[:, :-1])
        log_p = torch.log_softmax(params, -1)
        loss = -log_p.gather(-1, values[:, 1:, None]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return start, dict(model.named_parameters())


OPTIMIZERS = {
    "radam": lambda parameters: torch.optim.RAdam(parameters, 1e-2, weight_decay=0.0),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_a_loop_by_hand(tmp_path, name):
    run = tiny(optimizer=name, weight_decay=0.0, schedule="constant", clip=0.5, steps=9)
    train(run, tmp_path / "run", quiet=True)
    start, expected = by_hand(run, OPTIMIZERS[name])
    made = weights_of(tmp_path / "run")
    for key, x in expected.items():
        moved = (x - start[key]).abs().max()
        assert (made[key] - x).abs().max() <= 1e-4 * moved, key
        assert moved > 3e-4, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_of_matrices_only(tmp_path, name):
    """With no gradient at all (clip far below rounding) decoupled decay is what moves: w ← (1 - lr · decay) w."""
    run = tiny(optimizer=name, weight_decay=0.5, schedule="constant", steps=1)
    trainer = Trainer(run, None, tmp_path, quiet=True)
    before = {key: x.detach().clone() for key, x in trainer.model.named_parameters()}
    for x in trainer.model.parameters():
        x.grad = torch.zeros_like(x)
    trainer.optimizer.step()
    for key, x in trainer.model.named_parameters():
        torch.testing.assert_close(x.detach(), before[key] * (1 - 1e-2 * 0.5) if x.dim() > 1 else before[key])


@pytest.mark.parametrize("data", ["synthetic", "copy"])
def test_parts_of_a_batch_add_up(tmp_path, data):
    """accumulate=4 is one batch in four parts: the same gradient, with masks that mark unequally many too (float64)."""
    changes = {"preset": "copy", "data_options": {"length": 12, "num_examples": 64}} if data == "copy" else {}
    run = tiny(data=data, batch=16, **changes)
    gradients, losses = [], []
    for accumulate in (1, 4):
        trainer = Trainer(dataclasses.replace(run, accumulate=accumulate), None, tmp_path, quiet=True)
        trainer.model.double()
        torch.manual_seed(0)
        for x in trainer.model.parameters():
            x.data.normal_(std=0.3)
        batch = next(trainer.loader)
        losses.append(trainer.backward(batch, trainer.model.sequences(batch.data)))
        gradients.append([x.grad.clone() for x in trainer.model.parameters()])  # pyright: ignore
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for whole, parts in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-12 * float(whole.abs().max()))
    assert min(float(whole.abs().max()) for whole in gradients[0]) > 1e-6


def test_the_loss_is_that_of_the_mask(tmp_path):
    run = tiny(preset="copy", data="copy", data_options={"length": 12, "num_examples": 64})
    trainer = Trainer(run, None, tmp_path, quiet=True)
    batch = next(trainer.loader)
    loss = float(trainer.backward(batch, batch.data.long()))
    params, _ = trainer.model(batch.data[:, :-1].long())
    log_p = params.detach().double().log_softmax(-1).numpy()
    nats = [
        -log_p[b, t - 1, int(batch.data[b, t])]
        for b in range(len(batch.data))
        for t in range(1, 12)
        if batch.mask is not None and batch.mask[b, t]
    ]
    assert loss == pytest.approx(np.mean(nats), rel=1e-5)
    assert len(nats) < 0.6 * batch.data[:, 1:].numel()


def test_digits_are_learnt_within_thirty_steps(tmp_path):
    """From guessing (8 bits) to below what a lone pixel's frequencies give: the model reads its past."""
    run = Run("digits", "digits", changes={"width": 48, "num_heads": 2, "depth": 2}, steps=30, batch=32, lr=5e-3)
    run = dataclasses.replace(run, optimizer="adamw", warmup=5, log_every=1)
    train(run, tmp_path / "run", quiet=True)
    bits = [line["bits"] for line in lines_of(tmp_path / "run", "train")]
    assert len(bits) == 30 and bits[0] > 7.5
    pixels = load_data("digits").data.flatten()
    frequencies = np.bincount(pixels.numpy(), minlength=256) / pixels.numel()
    alone = -sum(p * math.log2(p) for p in frequencies if p)
    assert np.mean(bits[-5:]) < alone, (bits, alone)


def test_bf16_keeps_float32_weights(tmp_path):
    """Products in bfloat16 give nearly the gradient of float32, and not the same; weights and moments stay wide."""
    gradients = []
    for precision in ("fp32", "bf16"):
        trainer = Trainer(tiny(precision=precision), None, tmp_path, quiet=True)
        torch.manual_seed(1)
        for x in trainer.model.parameters():
            x.data.normal_(std=0.2)
        batch = next(trainer.loader)
        trainer.backward(batch, trainer.model.sequences(batch.data))
        gradients.append({name: x.grad.clone() for name, x in trainer.model.named_parameters()})  # pyright: ignore
        trainer.update()
        assert {x.dtype for x in trainer.model.parameters()} == {torch.float32}
        moments = trainer.optimizer.state.values()
        assert {x.dtype for kept in moments for x in kept.values()} == {torch.float32}
    for name, wide in gradients[0].items():
        narrow = gradients[1][name]
        assert 1e-5 < (narrow - wide).norm() / wide.norm() < 0.1, name  # least at the head, which stays float32


def test_bf16_learns_as_fp32_does(tmp_path):
    for precision in ("fp32", "bf16"):
        run = tiny(precision=precision, optimizer="adamw", lr=2e-2, steps=20, eval_every=0, checkpoint_every=0)
        train(run, tmp_path / precision, quiet=True)
    wide, narrow = ([x["nats"] for x in lines_of(tmp_path / p, "train")] for p in ("fp32", "bf16"))
    learnt = wide[0] - wide[-1]
    assert learnt > 0.3
    assert abs(narrow[-1] - wide[-1]) < 0.1 * learnt


def test_metrics_are_json_lines(tmp_path):
    train(TINY, tmp_path / "run", quiet=True)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and len(lines) == 6 + 3
    assert [line["step"] for line in lines_of(tmp_path / "run", "train")] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines_of(tmp_path / "run", "eval")] == [4, 8, 12]
    for line in lines:
        assert line["bits"] == pytest.approx(line["nats"] / math.log(2))
        assert line["seconds"] > 0
        assert line["epoch"] == pytest.approx(line["step"] * TINY.batch / 48, abs=1e-4)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)


def test_a_log_line_is_the_mean_since_the_last(tmp_path):
    for every in (1, 4):
        train(tiny(log_every=every, steps=8), tmp_path / str(every), quiet=True)
    single, means = ([x["nats"] for x in lines_of(tmp_path / e, "train")] for e in ("1", "4"))
    np.testing.assert_allclose(means, np.reshape(single, (2, 4)).mean(1), rtol=1e-12)


def test_the_weights_load_and_say_where_they_come_from(tmp_path):
    folder = tmp_path / "run"
    result = train(TINY, folder, quiet=True)
    model, record = load(folder), record_of(folder)
    assert record["run"] == json.loads(json.dumps(TINY.to_json()))
    assert record["data"]["sha256"] == load_data("synthetic", **TINY.data_options).sha256
    assert record["step"] == result.step == 12 and record["evaluation"] == result.evaluation
    again = evaluate(model, load_data("synthetic", split="dev", **TINY.data_options))  # pyright: ignore
    assert again["nats"] == pytest.approx(record["evaluation"]["nats"], rel=1e-6)
    assert set(record["versions"]) == {"python", "torch", "linattn"}


def test_the_first_value_is_counted_in_the_training_set(tmp_path):
    train(TINY, tmp_path / "run", quiet=True)
    first = load_data("synthetic", **TINY.data_options).data.flatten(1)[:, 0]
    assert weights_of(tmp_path / "run")["first.counts"].tolist() == np.bincount(first, minlength=256).tolist()


def test_keep_best_saves_no_worse_weights(tmp_path):
    """A learning rate that ruins the model half-way: the best weights are from before, the last are bad."""
    for keep in ("best", "last"):
        run = tiny(keep=keep, schedule="step", drops=(1,), lr_decay=1.0, lr=0.3, clip=None, optimizer="adamw", steps=40)
        train(run, tmp_path / keep, quiet=True)
    losses = [line["nats"] for line in lines_of(tmp_path / "best", "eval")]
    assert min(losses) < losses[-1]
    assert record_of(tmp_path / "best")["evaluation"]["nats"] == min(losses)
    assert record_of(tmp_path / "last")["evaluation"]["nats"] == losses[-1]


def test_samples_change_nothing(tmp_path):
    """Random numbers drawn for a sheet are not those of training (dropout draws from the same generator)."""
    seen = []

    def sample(model, count, seed):
        seen.append((model.training, count))
        torch.rand(1000)
        return torch.randint(256, (count, 4, 4, 1), dtype=torch.uint8)

    dropout = {**TINY.changes, "dropout": 0.2}
    train(tiny(changes=dropout, sample_every=3, samples=5), tmp_path / "with", sample=sample, quiet=True)
    train(tiny(changes=dropout), tmp_path / "without", quiet=True)
    assert_same_weights(tmp_path / "with", tmp_path / "without")
    assert seen == [(False, 5)] * 4
    assert sorted(path.name for path in (tmp_path / "with" / "samples").iterdir()) == [
        f"step-{step:08d}.png" for step in (3, 6, 9, 12)
    ]


def test_the_callers_random_numbers_and_threads_are_left_alone(tmp_path, monkeypatch):
    before, asked = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(tiny(threads=3), tmp_path / "run", quiet=True)
    assert torch.rand(3).equal(expected) and asked == [3, before]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_finishes_the_step_and_keeps_it(tmp_path, number):
    def interrupt(model, count, seed):
        os.kill(os.getpid(), number)
        return torch.zeros(1, 4, 4, 1, dtype=torch.uint8)

    handler = signal.getsignal(number)
    folder = tmp_path / "run"
    result = train(tiny(sample_every=5), folder, sample=interrupt, quiet=True)
    assert result.interrupted and result.step == 5 and signal.getsignal(number) is handler
    result = train(None, folder, resume=True, quiet=True)
    assert not result.interrupted and result.step == 12
    train(TINY, tmp_path / "whole", quiet=True)
    assert_same_weights(folder, tmp_path / "whole")


def test_what_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    good = Trainer.backward
    monkeypatch.setattr(
        Trainer, "backward", lambda self, *batch: good(self, *batch) * (math.nan if self.step == 7 else 1)
    )
    with pytest.raises(ValueError, match=r"nan by step 8, since step 6 .* lower lr"):
        train(TINY, folder, quiet=True)
    monkeypatch.undo()
    assert train(None, folder, resume=True, quiet=True).step == 12
    train(TINY, tmp_path / "whole", quiet=True)
    assert_same_weights(folder, tmp_path / "whole")


def test_fine_tuning_starts_from_weights(tmp_path):
    train(TINY, tmp_path / "old", quiet=True)
    start = str(tmp_path / "old")
    trainer = Trainer(tiny(start=start), None, tmp_path, quiet=True)
    old = weights_of(tmp_path / "old")
    assert all(x.equal(old[name]) for name, x in trainer.model.state_dict().items())
    with pytest.raises(ValueError, match=r"the weights in .*old are of another model: .* there and .* here"):
        train(tiny(start=start, changes={**TINY.changes, "width": 24}), tmp_path / "new", quiet=True)


def test_minutes_end_a_run(tmp_path):
    result = train(tiny(steps=None, minutes=0.005, checkpoint_every=0), tmp_path / "run", quiet=True)
    assert result.step > 1 and result.seconds >= 0.3
    rates = [line["lr"] for line in lines_of(tmp_path / "run", "train")]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.5 * rates[0]  # cosine, by the clock


def test_only_predictions_are_compiled(tmp_path, monkeypatch):
    """With a stand-in for torch.compile that marks what goes through it: all of training does, and nothing changes."""
    calls = []

    def compile_(function):
        return lambda *arguments: calls.append(len(arguments)) or function(*arguments)

    monkeypatch.setattr(torch, "compile", compile_)
    train(tiny(compile=True, accumulate=2), tmp_path / "compiled", quiet=True)
    train(tiny(accumulate=2), tmp_path / "plain", quiet=True)
    assert calls == [2] * 24
    assert_same_weights(tmp_path / "compiled", tmp_path / "plain")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_is_the_same(tmp_path, precision):
    """In a process of its own: annotations that are executed cannot be compiled."""
    script = """
import sys
from train_cases import tiny
from linattn.train import train
for compile in (False, True):
    train(tiny(compile=compile, precision=sys.argv[2], steps=3), f"{sys.argv[1]}/{compile}", quiet=True)
"""
    folder = Path(__file__).parent
    subprocess.run([sys.executable, "-c", script, str(tmp_path), precision], check=True, cwd=folder)
    plain = weights_of(tmp_path / "False")
    for name, x in weights_of(tmp_path / "True").items():
        torch.testing.assert_close(x, plain[name], rtol=1e-3, atol=1e-5 if precision == "fp32" else 1e-3)


def test_evaluation_against_numpy(tmp_path):
    model = Trainer(TINY, None, tmp_path, quiet=True).model
    data = load_data("synthetic", split="dev", **TINY.data_options)
    found = evaluate(model, data, batch=7)
    values = data.data.flatten(1).long()
    log_p = model(values[:, :-1])[0].detach().double().log_softmax(-1).numpy()
    nats = -np.take_along_axis(log_p, values[:, 1:, None].numpy(), -1)
    counts = np.bincount(load_data("synthetic", **TINY.data_options).data.flatten(1)[:, 0], minlength=256)
    p_first = (counts + 1 / 256) / (counts.sum() + 1)
    first = -np.log(p_first[values[:, 0]])
    assert found["examples"] == 48 and found["nats"] == pytest.approx(nats.mean(), rel=1e-6)
    assert found["bits"] == pytest.approx(nats.mean() / np.log(2), rel=1e-6)
    assert found["bits_all"] == pytest.approx((nats.sum() + first.sum()) / values.numel() / np.log(2), rel=1e-6)
    assert model.training  # as it was
    some = evaluate(model, data, batch=7, examples=10)
    assert some["examples"] == 10 and some["nats"] == pytest.approx(nats[:10].mean(), rel=1e-6)


def test_a_text_is_evaluated_to_its_last_byte(tmp_path):
    """Windows that know nothing of each other, with a shorter last one; and one stream, whose state goes on."""
    path = tmp_path / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 105, 1000, dtype=np.uint8).tobytes())
    run = tiny(preset="text", data=str(path), data_options={}, window=8, batch=4)
    model = Trainer(run, None, tmp_path, quiet=True).model.eval()
    dev = load_data(path, split="dev")
    text = dev.data.long()[None]
    assert len(dev) == 50 and (len(dev) - 1) % 8
    apart = [model.nats(text[:, start : start + 9])[0] for start in range(0, 49, 8)]
    found = evaluate(model, dev, batch=4, window=8)
    assert found["examples"] == 49 and found["nats"] == pytest.approx(torch.cat(apart, 1).mean().item(), rel=1e-5)
    carried = evaluate(model, dev, batch=2, window=8, carry=True)
    assert carried["examples"] == 49
    assert carried["nats"] == pytest.approx(model.nats(text)[0].mean().item(), rel=1e-5)
    assert abs(carried["nats"] - found["nats"]) > 1e-3
    assert len(list(in_order(dev, 4, window=8))) == 3
