"""The study's pieces: its tasks against other ways of making them, its arms, its numbers, what is planned when."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import io, stats
from study_cases import TINY, found_for, made_up

from linattn.features import FEATURE_MAPS
from linattn.models import build, preset
from linattn.study import conclude, lengths, music
from linattn.study.arms import LINEAR, SOFTMAX, changes, own_weights, screened
from linattn.study.folder import apply
from linattn.study.jobs import PARTS, Missing, Study
from linattn.study.learn import accuracy
from linattn.study.matfile import read_mat
from linattn.study.numbers import Interval, apart, crossing, exponent, interval, t95
from linattn.study.plan import finalists, finals, plan, screen, series
from linattn.study.sizes import FULL, QUICK
from linattn.train.data import load

# The tasks


def test_recall_is_what_a_dictionary_answers():
    data = load("recall", pairs=5, keys=9, values=7, num_examples=50)
    assert data.mask is not None and data.num_values == 16
    for row, counts in zip(data.data.tolist(), data.mask.tolist(), strict=True):
        known = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(known) == 5, "the keys of a sequence differ"
        assert all(key < 9 <= value < 16 for key, value in known.items())
        assert sorted(row[10::2]) == sorted(known), "every key is asked for once"
        assert row[11::2] == [known[key] for key in row[10::2]]
        assert [i for i, counted in enumerate(counts) if counted] == [11, 13, 15, 17, 19]
    assert any(row[10::2] != row[0:10:2] for row in data.data.tolist()), "asked in another order"


def test_recall_is_drawn_anew_in_training_and_stays_for_the_others():
    train, dev = (load("recall", split=split, num_examples=20) for split in ("train", "dev"))
    assert train.redraw is not None and dev.redraw is None
    assert not torch.equal(train.redraw(1).data, train.data) and not torch.equal(train.data, dev.data)
    assert torch.equal(dev.data, load("recall", split="dev", num_examples=20).data)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pairs": 9, "keys": 8}, "at least pairs=9, got 8"),
        ({"keys": 200, "values": 57}, "at most 256 together"),
        ({"values": 1}, "values must be at least 2"),
    ],
)
def test_recall_says_what_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        load("recall", **options)


class Knows(torch.nn.Module):
    """A model that answers from a dictionary, errs on the first key it is asked for, and guesses an unmarked value."""

    device = torch.device("cpu")

    def sequences(self, data):
        return data.long()

    def __call__(self, values):
        out = torch.zeros(*values.shape, 32)
        for b, row in enumerate(values.tolist()):
            for t, key in enumerate(row):
                before = [row[i + 1] for i in range(0, t - 1, 2) if row[i] == key]
                answer = before[0] if before and t > 16 else row[1] if t == 0 else 31
                out[b, t, answer] = 1.0
        return out, None


def test_accuracy_counts_marked_values_only(unchecked):
    data = load("recall", split="test", pairs=8, keys=8, values=8, num_examples=5)
    assert accuracy(Knows(), data) == pytest.approx(7 / 8)  # type: ignore[arg-type]


# The arms


@pytest.mark.parametrize("task", [*QUICK.tasks, *FULL.tasks], ids=lambda task: f"{task.name}-{task.run['steps']}")
def test_every_arm_has_as_many_parameters(task):
    layers = {}
    for arm in screened():
        config = preset(task.preset, **changes(arm, head_width=task.head_widths[0], **task.model))
        config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, width=config.layer.width), depth=1)
        layers[arm] = sum(p.numel() for p in build(config).parameters())
    elu = layers[LINEAR]
    assert all(abs(size / elu - 1) < 0.01 for size in layers.values()), layers
    assert own_weights("hedgehog", 16, 4) > 1000 and own_weights("elu", 16, 4) == 0


def test_everybody_is_screened():
    assert set(screened()) == {SOFTMAX, *FEATURE_MAPS} and len(screened()) == len(FEATURE_MAPS) + 1


# The numbers


@pytest.mark.parametrize("n", [2, 3, 8, 31])
def test_intervals_against_scipy(n):
    values = np.random.default_rng(n).normal(3, 2, n)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    made = interval(values.tolist())
    assert (made.mean, made.low, made.high) == pytest.approx((values.mean(), low, high), rel=1e-4)


def test_students_t_against_scipy():
    assert [t95(n) for n in range(1, 31)] == pytest.approx(stats.t.ppf(0.975, range(1, 31)), abs=1e-4)
    assert t95(1000) >= stats.t.ppf(0.975, 1000)


def test_one_value_tells_nothing_apart():
    assert not apart(interval([1.0]), interval([9.0])) and not interval([1.0]).known
    assert not apart(interval([1.0]), Interval(9.0, 8.9, 9.1, 3))
    with pytest.raises(ValueError, match="needs values"):
        interval([])


def test_apart_is_not_to_overlap():
    low, middle, high = Interval(1.0, 0.0, 2.0, 3), Interval(2.0, 1.9, 3.0, 3), Interval(4.0, 3.1, 5.0, 3)
    assert apart(low, high) and apart(high, low) and apart(middle, high)
    assert not apart(low, middle) and not apart(low, low)
    assert not apart(low, Interval(3.0, 2.0, 4.0, 3)), "they touch"


def test_the_exponent_of_a_power_law():
    sizes = [2.0**n for n in range(5, 12)]
    exact = exponent(sizes, [3e-7 * n**1.7 for n in sizes])
    assert (exact.mean, exact.low, exact.high) == pytest.approx((1.7, 1.7, 1.7), abs=1e-6)
    noisy = [
        3e-7 * n**1.3 * math.exp(e) for n, e in zip(sizes, np.random.default_rng(0).normal(0, 0.2, 7), strict=True)
    ]
    line: Any = stats.linregress(np.log(sizes), np.log(noisy))
    half = stats.t.ppf(0.975, 5) * line.stderr
    made = exponent(sizes, noisy)
    assert (made.mean, made.low, made.high) == pytest.approx(
        (line.slope, line.slope - half, line.slope + half), rel=1e-3
    )
    assert not exponent(sizes[:2], noisy[:2]).known


def test_where_linear_begins_to_pay():
    assert crossing([16, 32, 64, 128], [2.0, 0.9, 1.1, 0.5]) == 128, "not 32: it was slower again at 64"
    assert crossing([128, 64, 16], [0.5, 0.9, 2.0]) == 64
    assert crossing([16, 32], [0.5, 1.0]) is None


# Piano rolls


def test_mat_files_against_scipy(tmp_path):
    rolls = np.empty((1, 3), dtype=object)
    draw = np.random.default_rng(0)
    for i, steps in enumerate((1, 7, 40)):
        rolls[0, i] = (draw.random((steps, 88)) < 0.1).astype(("u1", "f8", "i2")[i])
    other = draw.normal(size=(3, 5))
    for compressed in (False, True):
        path = tmp_path / f"{compressed}.mat"
        io.savemat(path, {"traindata": rolls, "x": other, "longer_than_eight": other[:1]}, do_compression=compressed)
        mine, theirs = read_mat(path.read_bytes()), io.loadmat(path)
        assert set(mine) == {"traindata", "x", "longer_than_eight"}
        np.testing.assert_array_equal(mine["x"], theirs["x"])
        np.testing.assert_array_equal(mine["longer_than_eight"], theirs["longer_than_eight"])
        for a, b in zip(mine["traindata"], theirs["traindata"].ravel(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_mat_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="no MATLAB file of version 5"):
        read_mat(b"\x89HDF" * 50)
    path = tmp_path / "whole.mat"
    io.savemat(path, {"x": np.eye(20)})
    with pytest.raises(ValueError, match="damaged"):
        read_mat(path.read_bytes()[:-100], path)
    io.savemat(path, {"x": "letters"})
    with pytest.raises(ValueError, match="'x' is of class 4"):
        read_mat(path.read_bytes(), path)


def write_music(folder, steps=(5, 12, 9, 20)):
    """A data folder with a file of little pieces."""
    draw = np.random.default_rng(1)
    splits = {}
    for name in ("traindata", "validdata", "testdata"):
        splits[name] = np.empty((1, len(steps)), dtype=object)
        for i, n in enumerate(steps):
            splits[name][0, i] = (draw.random((n, 88)) < 0.1).astype("u1")
    (folder / "music").mkdir()
    io.savemat(folder / "music" / "JSB_Chorales.mat", splits, do_compression=True)


def music_model():
    config = preset("text", width=16, num_heads=2, ff_width=16, depth=1)
    torch.manual_seed(0)
    return music.MusicModel(config).eval()  # type: ignore[arg-type]


def test_the_likelihood_of_a_step_by_hand():
    model, draw = music_model(), torch.Generator().manual_seed(0)
    rolls = (torch.rand(2, 6, 88, generator=draw) < 0.2).float()
    nats = model.nats(rolls, torch.tensor([6, 3]))
    for b, length in ((0, 6), (1, 3)):
        before = torch.cat([torch.zeros(1, 88), rolls[b, : length - 1]])[None]
        p = model.leave(model.stack(model.enter(before))[0]).sigmoid()[0]
        by_hand = -torch.where(rolls[b, :length] > 0, p, 1 - p).log().sum(-1)
        torch.testing.assert_close(nats[b, :length], by_hand, rtol=1e-4, atol=1e-4)
    assert (nats[1, 3:] == 0).all()
    later = rolls.clone()
    later[:, 4:] = 1 - later[:, 4:]
    torch.testing.assert_close(
        model.nats(later, torch.tensor([6, 6]))[:, :4], model.nats(rolls, torch.tensor([6, 6]))[:, :4]
    )


def test_music_is_judged_over_all_steps_alike(monkeypatch):
    model, draw = music_model(), torch.Generator().manual_seed(0)
    rolls = [(torch.rand(n, 88, generator=draw) < 0.2).to(torch.uint8) for n in (3, 11, 7)]
    with torch.no_grad():
        one_by_one = [model.nats(roll[None].float(), torch.tensor([len(roll)])).sum() for roll in rolls]
    assert music.judge(model, rolls, "cpu") == pytest.approx(float(sum(one_by_one)) / 21, rel=1e-5)
    monkeypatch.setattr(music, "LONGEST", 1)
    assert music.judge(model, rolls, "cpu") == pytest.approx(float(sum(one_by_one)) / 21, rel=1e-5)


def test_music_that_is_not_there_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_DATA", str(tmp_path))
    music.pieces.cache_clear()
    with pytest.raises(Missing, match=r"JSB_Chorales.mat is not there: put the piano rolls"):
        music.pieces("JSB_Chorales")
    write_music(tmp_path)
    assert [len(roll) for roll in music.pieces("JSB_Chorales")["dev"]] == [5, 12, 9, 20]
    music.pieces.cache_clear()


# Far beyond the trained length


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_reading_on_is_one_pass(attention):
    torch.manual_seed(0)
    model = build(preset("text", width=16, num_heads=2, depth=2, attention=attention)).eval()
    values = torch.randint(256, (2, 41), generator=torch.Generator().manual_seed(1))
    whole, _ = model.nats(values)  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(lengths.read_on(model, values, 7), whole / math.log(2), rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_windows_have_half_a_window_of_context_or_more():
    torch.manual_seed(0)
    model = build(preset("text", width=16, num_heads=2, depth=1)).eval()
    values = torch.randint(256, (1, 38), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        bits = lengths.in_halves(model, values, 8)  # type: ignore[arg-type]
        assert bits.isfinite().all()
        for place in range(37):  # prediction of value place + 1
            begin = 0 if place < 8 else 4 * ((place - 4) // 4)
            alone, _ = model.nats(values[:, begin : place + 2])  # type: ignore[union-attr]
            assert place < 8 or 4 <= place - begin < 8
            torch.testing.assert_close(bits[0, place], alone[0, -1] / math.log(2), rtol=1e-4, atol=1e-4)


def test_stretches_of_a_text():
    text = torch.arange(100, dtype=torch.uint8)
    made = lengths.stretches(text, 20, 3)
    assert made[:, 0].tolist() == [0, 39, 79] and made.shape == (3, 21)
    assert lengths.stretches(text, 500, 3).shape == (1, 100)
    assert lengths.bins(128, 2048) == [0, 128, 256, 512, 1024, 2048] and lengths.bins(8, 20) == [0, 8, 16, 20]


# The plan


def test_the_plan_covers_every_part_once():
    for sizes in (QUICK, FULL, TINY):
        study = made_up(sizes, lambda job: found_for(job, {}))
        jobs = plan(sizes, study, "cpu")
        assert len({job.id for job in jobs}) == len(jobs) == len(study.results)
        parts = set(PARTS) if sizes is FULL else set(PARTS) - {"speech"}
        assert {job.part for job in jobs} == parts
        assert [job.rank for job in jobs] == sorted(job.rank for job in jobs)
        assert {job.part for job in plan(sizes, study, "cpu", ["text"])} == {"text"}


def test_finals_come_of_a_complete_screen():
    task = next(task for task in TINY.tasks if task.name == "text")
    best = {"taylor": 1.0, "quadratic": 1.1, "quadratic_symmetric": 1.2, "exp": 1.3, "relu": 1.4, "elu": 0.5}
    study = Study("quick")
    jobs = screen(TINY, task)
    for job in jobs[:-1]:
        line = {"line": "result", "id": job.id, "part": job.part, "settings": dict(job.settings)}
        apply(study, line | {"found": found_for(job, best, 0.0)})
        assert finals(TINY, task, study) == []
    apply(study, {"line": "failed", "id": jobs[-1].id, "why": "it broke"})
    assert finalists(TINY, task, study) == [SOFTMAX, LINEAR, "taylor", "quadratic_symmetric", "exp", "relu"]
    assert {job.settings["seed"] for job in finals(TINY, task, study)} == {1, 2, 3}, "not the screen's"


def test_recall_is_better_when_it_is_higher():
    study = made_up(TINY, lambda job: found_for(job, {"taylor": 0.5, "exp": 0.6, "relu": 0.7, "dpfp": 0.8}))
    chosen = finalists(TINY, TINY.tasks[0], study)
    assert chosen == [SOFTMAX, LINEAR, "taylor", "exp", "relu", "dpfp"]


def test_a_series_ends_where_it_becomes_too_long_or_too_large():
    def found(job):
        return {**found_for(job, {}), "call_seconds": job.settings["tokens"] / 40}

    study = Study("quick")
    assert [job.settings["tokens"] for job in series(TINY, study, "cpu", "elu")] == [16]
    study = made_up(TINY, lambda job: found(job) if job.kind == "scaling" else found_for(job, {}))
    # 64 took 1.6 s, so 128 tokens are expected to take 3.2 with elu, and 6.4 with softmax attention
    assert [job.settings["tokens"] for job in series(TINY, study, "cpu", "elu")] == [16, 32, 64, 128]
    assert [job.settings["tokens"] for job in series(TINY, study, "cpu", SOFTMAX)] == [16, 32, 64]
    big = made_up(TINY, lambda job: {"too_large": "full", "batch": 1} if job.kind == "scaling" else found_for(job, {}))
    assert [job.settings["tokens"] for job in series(TINY, big, "cpu", "elu")] == [16]
    assert conclude.scalings(big)[0].stopped == "at 16: full"
