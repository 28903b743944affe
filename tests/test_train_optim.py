"""Schedules, averaged weights and clipping against formulas written down by hand, and against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from train_cases import tiny

from linattn.train.optim import Average, Watch, clip, lr_at, narrowed
from linattn.train.trainer import Trainer

COSINE = {"schedule": "cosine", "lr": 1.0, "steps": 110, "warmup": 10, "lr_decay": 0.2}

RATES = [
    ({"schedule": "constant", "lr": 0.5}, {0: 0.5, 11: 0.5}),
    ({"schedule": "constant", "lr": 0.5, "warmup": 4}, {0: 0.125, 1: 0.25, 2: 0.375, 3: 0.5, 4: 0.5, 9: 0.5}),
    # half-way through what follows the warm-up the wave is at its middle, at the end at its foot
    (COSINE, {0: 0.1, 4: 0.5, 10: 1.0, 35: 0.6 + 0.4 * math.sqrt(0.5), 60: 0.6, 110: 0.2}),
    ({"schedule": "step", "lr": 1e-3, "drops": (3000,)}, {0: 1e-3, 2999: 1e-3, 3000: 1e-4, 9999: 1e-4}),
    ({"schedule": "step", "lr": 1.0, "drops": (2, 5), "lr_decay": 0.5}, {1: 1.0, 2: 0.5, 4: 0.5, 5: 0.25}),
]


@pytest.mark.parametrize(("changes", "expected"), RATES)
def test_schedules_by_hand(changes, expected):
    run = tiny(**changes)
    assert {step: lr_at(run, step) for step in expected} == pytest.approx(expected, rel=1e-12)


def test_cosine_against_torch():
    run = tiny(schedule="cosine", lr=0.3, steps=50, lr_decay=0.1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.03)
    for step in range(50):
        assert lr_at(run, step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_minutes_move_the_schedule_by_the_clock():
    run = tiny(schedule="cosine", lr=1.0, lr_decay=0.0, steps=None, minutes=2.0)
    assert [lr_at(run, 7, seconds) for seconds in (0.0, 60.0, 120.0)] == pytest.approx([1.0, 0.5, 0.0])
    both = tiny(schedule="cosine", lr=1.0, lr_decay=0.0, steps=10, minutes=2.0)
    assert lr_at(both, 5, 30.0) == pytest.approx(0.5)  # the steps are further
    assert lr_at(both, 1, 60.0) == pytest.approx(0.5)  # the clock is


def test_plateau_against_torch():
    """torch drops the rate when evaluations without a new best are *more* than its patience."""
    losses = [3.0, 2.0, 2.1, 1.99995, 2.0, 1.5, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.4, 1.5, 1.5, 1.5]
    run, watch = tiny(schedule="plateau", lr=1.0, lr_decay=0.5, patience=3), Watch(3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=2, threshold=1e-4, threshold_mode="abs"
    )
    rates = []
    for loss in losses:
        watch.update(loss)
        scheduler.step(loss)
        assert lr_at(run, 0, drops=watch.drops) == pytest.approx(optimizer.param_groups[0]["lr"])
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[-1] == 0.0625 and watch.best == 1.4


def test_a_plateau_lowers_the_rate_of_the_run(tmp_path):
    trainer = Trainer(tiny(schedule="plateau", patience=1, lr=1.0), None, tmp_path, quiet=True)
    for loss in (1.0, 2.0):
        trainer.watch.update(loss)
    trainer.update()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_averaged_weights_by_the_formula(tmp_path):
    """a ← β a + (1 - β) w with β = min(ema, (1 + t) / (10 + t)), from a = w at the start; in float64."""
    trainer = Trainer(tiny(ema=0.3, lr=0.1, optimizer="adamw"), None, tmp_path, quiet=True)
    assert trainer.average is not None
    expected = {name: x.detach().double().clone() for name, x in trainer.model.named_parameters()}
    for t in range(8):
        trainer.update()
        beta = min(0.3, (1 + t) / (10 + t))
        for name, x in trainer.model.named_parameters():
            expected[name] = beta * expected[name] + (1 - beta) * x.detach().double()
    for name, x in trainer.average.model.named_parameters():
        torch.testing.assert_close(x.double(), expected[name], rtol=1e-5, atol=1e-6)
        assert not x.requires_grad
    moved = [(x - dict(trainer.model.named_parameters())[name]).abs().max() for name, x in expected.items()]
    assert max(moved) > 1e-2  # the average is not the weights


def test_averaged_weights_are_what_is_judged_and_saved(tmp_path):
    from linattn.models import load

    trainer = Trainer(tiny(ema=0.9), None, tmp_path, quiet=True)
    trainer.update()
    trainer.update()
    trainer.evaluate()
    assert trainer.average is not None
    for name, x in load(tmp_path / "weights.safetensors").named_parameters():
        assert x.equal(dict(trainer.average.model.named_parameters())[name])


@pytest.mark.parametrize(("largest", "expected"), [(1.0, 1.0), (100.0, 13.0), (None, 13.0)])
def test_clipping(largest, expected):
    x, y = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    x.grad, y.grad = torch.tensor([5.0]), torch.tensor([0.0, 12.0])
    assert clip([x, y], largest) == pytest.approx(13.0)
    norm = math.hypot(float(x.grad), *y.grad.tolist())
    assert norm == pytest.approx(expected, rel=1e-5)
    assert float(x.grad) / float(y.grad[1]) == pytest.approx(5 / 12)


def test_heads_and_maps_stay_wide(tmp_path):
    run = tiny(precision="bf16", changes={"width": 16, "num_heads": 2, "depth": 1, "feature_map": "hedgehog"})
    trainer = Trainer(run, None, tmp_path, quiet=True)
    dtypes = {name: x.dtype for name, x in narrowed(trainer.model).items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {name for name in dtypes if name.startswith("head.") or ".feature_map." in name}
    assert any(".feature_map." in name for name in wide) and len(wide) < len(dtypes) / 2
    trainer.update()
    assert Average(trainer.model, 0.5).model is not trainer.model
