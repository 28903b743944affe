"""The operator's benchmark: what is measured is what is meant.

Nothing here asserts a time. Where times decide, the clock is replaced by one that ticks as told.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from bench_cases import TINY, row

from linattn.bench import measure, operator, report
from linattn.bench.measure import Cell, Effort, Peak, race
from linattn.bench.operator import MODES, OURS, Rival, Size
from linattn.bench.report import Row

LINUX = sys.platform == "linux"


def size(mode: str = "forward", tokens: int = 12, **changed) -> Size:
    return dataclasses.replace(Size("cpu", torch.float64, 2, 3, 5, mode, tokens), **changed)


@pytest.fixture
def clock(monkeypatch):
    """Calls take as long as `ticks` says; `turns` lists who was called, once a sample."""
    ticks, turns = {}, []

    def time_calls(run, calls, device="cpu"):
        turns.append(run())
        return ticks[turns[-1]]

    monkeypatch.setattr(measure, "time_calls", time_calls)
    return ticks, turns


def test_rivals_take_turns_and_share_the_time(clock):
    ticks, turns = clock
    ticks.update(fast=0.1, slow=0.3)
    cells = race({name: lambda name=name: name for name in ticks}, Effort(budget=1.0, least=1))
    assert cells["fast"].samples in (10, 11)  # ten times 0.1 may be less than 1.0
    assert cells["slow"].samples == 4
    sampled = turns[2:]  # after each one's first call
    spent = {name: np.cumsum([ticks[name] * (turn == name) for turn in sampled]) for name in ticks}
    assert np.abs(spent["fast"] - spent["slow"]).max() <= 0.3 + 1e-9


def test_a_long_call_is_measured_once_and_a_short_one_often_enough(clock):
    ticks, turns = clock
    ticks.update(long=5.0, short=0.9)
    cells = race({name: lambda name=name: name for name in ticks}, Effort(budget=0.5, least=3, once=2.0))
    assert (cells["long"].seconds, cells["long"].samples, turns.count("long")) == (5.0, 1, 1)
    assert (cells["short"].seconds, cells["short"].samples) == (0.9, 3)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-4, 50), (4.9e-3, 2), (0.04, 1)])
def test_cheap_calls_are_timed_several_at_once(monkeypatch, seconds, calls):
    asked = []
    monkeypatch.setattr(measure, "time_calls", lambda run, calls, device: asked.append(calls) or seconds)
    race({"x": lambda: None}, Effort(budget=1e-9, least=1))
    assert asked == [1, 1, calls]  # the first call, the estimate, the sample


def test_lower_quartile():
    assert [measure.lower_quartile(x) for x in ([3.0], [2.0, 1.0], [4.0, 3.0, 2.0, 1.0, 5.0])] == [3.0, 1.0, 2.0]


def test_seconds_are_those_of_one_call(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def run():
        now[0] += 0.25
        calls.append(1)

    assert measure.time_calls(run, 4) == 0.25 and len(calls) == 4


def test_peak_is_what_was_held_at_once():
    def use(megabytes: int, blocks: int = 1):
        held = [torch.ones(megabytes * 2**18 // blocks) for _ in range(blocks)]
        return len(held)

    use(64, blocks=1024)  # freed again, and held back by the allocator: it must not hide the next one
    peaks = {}
    for name, arguments in {"large": (64, 1), "small blocks": (32, 512), "nothing": (0, 1)}.items():
        with Peak() as peak:
            use(*arguments)
            use(*arguments)  # not the sum: the first is gone by now
        peaks[name] = None if peak.bytes is None else peak.bytes / 2**20
    if not LINUX:
        assert peaks == dict.fromkeys(peaks)
        return
    assert peaks["large"] == pytest.approx(64, abs=4) and peaks["nothing"] < 4, peaks
    assert 28 < peaks["small blocks"] < 60, peaks  # with what the allocator wastes between them


def numpy_attention(name: str, q, k, v):
    """Causal attention in numpy float64, (B, T, H, D)."""
    q, k, v = (x.detach().numpy() for x in (q, k, v))
    if name == report.SOFTMAX:
        scores = np.exp(np.einsum("bthd,buhd->bhtu", q, k) / q.shape[-1] ** 0.5)
    else:
        scores = np.einsum("bthd,buhd->bhtu", *(np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k)))
    scores = np.tril(scores)
    return np.einsum("bhtu,buhd->bthd", scores / scores.sum(-1, keepdims=True), v)


EXACT = [rival for rival in operator.rivals() if rival.name != "native"]  # which takes no float64: test_ops_values.py


@pytest.mark.parametrize("rival", EXACT, ids=lambda rival: rival.name)
def test_every_rival_computes_its_attention_and_its_gradients(rival):
    operands = operator.make_operands(size(), rival.heads_first)
    turned = [x.transpose(1, 2) if rival.heads_first else x for x in operands]
    exact = numpy_attention(rival.name, *turned)
    out = operator.prepare(rival, operands, "forward")()
    np.testing.assert_allclose(out.transpose(1, 2) if rival.heads_first else out, exact, rtol=1e-9)
    # The loss is out·v with v held fixed: a central difference along one direction knows all three gradients.
    grads = operator.prepare(rival, operands, "forward+backward")()
    way = torch.randn(3, *operands[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value = [
        (rival.run(*(x + h * w for x, w in zip(operands, way, strict=True))) * operands[2]).sum() for h in (1e-5, -1e-5)
    ]
    slope = sum((g * w).sum() for g, w in zip(grads, way, strict=True))
    torch.testing.assert_close(slope, (value[0] - value[1]) / 2e-5, rtol=1e-7, atol=1e-7)


def test_interpreted_kernels_are_no_rival_on_the_cpu(monkeypatch):
    everything = dict.fromkeys(("chunked", "quadratic", "triton"), (True, "can run"))
    monkeypatch.setattr(operator, "backends", lambda: everything)
    names = {device: [rival.name for rival in operator.rivals(device)] for device in ("cpu", "cuda")}
    assert names == {"cpu": ["chunked", "quadratic", "sdpa"], "cuda": ["chunked", "quadratic", "triton", "sdpa"]}


def test_the_table_is_complete():
    rows = list(operator.measure_table(TINY, "cpu", torch.float32))
    expected = [(width, mode, tokens) for width in TINY.widths for mode in MODES for tokens in TINY.tokens]
    assert [(row.width, row.mode, row.tokens) for row in rows] == expected
    everyone = [rival.name for rival in operator.rivals()]
    assert everyone[0] == OURS and everyone[-1] == "sdpa" and {"quadratic", "recurrent"} < set(everyone)
    for made in rows:
        assert list(made.cells) == [name for name in everyone if name != "recurrent" or made.tokens <= 1024]
        assert all(cell.seconds > 0 and not cell.extrapolated for cell in made.cells.values())
        assert all(cell.peak_bytes is not None for cell in made.cells.values()) or not LINUX
        assert made.ratios[OURS] == made.cells[OURS].seconds / made.cells["sdpa"].seconds
        assert made.ratios.keys() == made.cells.keys() - {"sdpa"}


def test_extrapolation_goes_by_the_power_of_time():
    before = row(512, quadratic=Cell(3.0, 1, 10**6), chunked=0.1)
    quadratic, linear = (operator.implementation(name) for name in ("quadratic", "chunked"))
    assert operator.extrapolate(quadratic, before, 1024) == Cell(12.0, 0, None, extrapolated=True)
    assert operator.extrapolate(quadratic, before, 2048) == Cell(48.0, 0, None, extrapolated=True)
    assert operator.extrapolate(linear, before, 2048) == Cell(0.4, 0, None, extrapolated=True)
    assert operator.extrapolate(quadratic, None, 1024) is None
    assert operator.extrapolate(quadratic, row(512, chunked=0.1), 1024) is None


@pytest.fixture
def calls(monkeypatch):
    """Three rivals in place of the real ones, and who was run."""
    called = []

    def rival(name, **options):
        return Rival(name, lambda q, k, v: called.append(name) or q, **options)

    made = [rival(OURS), rival("quadratic", power=2, tables=(1, 1)), rival("sdpa", power=2)]
    monkeypatch.setattr(operator, "rivals", lambda device: made)
    return called


def test_what_would_take_too_long_is_extrapolated_and_not_run(calls):
    before = row(16, chunked=0.001, quadratic=6.0, sdpa=0.001)
    settings = dataclasses.replace(TINY, longest=20.0)
    made = operator.measure_row(size(tokens=32), before, settings)
    assert "quadratic" not in calls and {"chunked", "sdpa"} == set(calls)
    assert made.cells["quadratic"] == Cell(24.0, 0, None, extrapolated=True)
    assert not made.cells["sdpa"].extrapolated
    again = operator.measure_row(size(tokens=64), made, settings)  # on from the extrapolated one
    assert again.cells["quadratic"].seconds == 96.0
    operator.measure_row(size(tokens=32), row(16, quadratic=4.9), settings)
    assert "quadratic" in calls


def test_what_would_take_too_much_memory_is_not_run(calls, monkeypatch):
    monkeypatch.setattr(operator, "available_memory", lambda device: 2 * 2**20)
    kept = operator.measure_row(size(tokens=64), None, TINY)  # a table takes 2·3·64²·8 bytes = 0.2 MB
    assert "quadratic" in kept.cells
    calls.clear()
    left = operator.measure_row(size(tokens=256), None, TINY)  # and here 3 MB
    assert "quadratic" not in calls and list(left.cells) == [OURS, "sdpa"]
    guessed = operator.measure_row(size(tokens=256), kept, TINY)
    assert guessed.cells["quadratic"].seconds == 16 * kept.cells["quadratic"].seconds


def test_the_memory_bound_holds():
    """Nobody is run who holds more tables than were counted for him."""
    for rival in operator.rivals():
        for mode in MODES:
            problem = Size("cpu", torch.float32, 1, 4, 32, mode, tokens=2048)
            if rival.most_tokens is not None and problem.tokens > rival.most_tokens:
                continue
            run = operator.prepare(rival, operator.make_operands(problem, rival.heads_first), mode)
            with Peak() as peak:
                run()
            room = 60e6  # threads, tiles, and what else does not grow; a table takes 67e6
            assert (peak.bytes or 0) < operator.bytes_needed(rival, problem) + room, (rival.name, mode)


def test_long_sequences_are_measured_as_far_as_memory_goes(monkeypatch):
    rows = [x for x in operator.measure_long(TINY, "cpu", torch.float32) if isinstance(x, Row)]
    assert [(row.mode, row.tokens) for row in rows] == [(mode, tokens) for mode in MODES for tokens in TINY.long_tokens]
    assert all(list(row.cells) == [OURS] and row.ratios == {} for row in rows)

    def race_of_lengths(runs, effort, device):
        made = {name: run() for name, run in runs.items()}
        lengths = {name: (out if isinstance(out, torch.Tensor) else out[0]).shape[1] for name, out in made.items()}
        assert lengths == {str(tokens): tokens for tokens in lengths.values()}
        return {name: Cell(1.0, 1) for name in runs}

    monkeypatch.setattr(operator, "race", race_of_lengths)
    monkeypatch.setattr(operator, "available_memory", lambda device: 4 * 200 * 4 * 4 / 0.8)  # 200 tokens, with 10% less
    items = list(operator.measure_long(TINY, "cpu", torch.float32))
    measured = [(x.mode, x.tokens) for x in items if isinstance(x, Row)]
    assert measured == [("forward", 64), ("forward", 128), ("forward+backward", 64)]
    notes = [x for x in items if isinstance(x, str)]
    assert len(notes) == 3 and all("was left out" in note for note in notes)
    assert "T = 256" in notes[0] and "T = 128" in notes[1]
