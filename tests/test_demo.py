"""The demo, and the measurement of the constants: they run, and show what they say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_cases import BRIEF, row
from PIL import Image
from typer.testing import CliRunner

from linattn import demo
from linattn.bench import machine
from linattn.bench.measure import Cell
from linattn.bench.operator import MODES
from linattn.bench.report import Row
from linattn.models import build, preset, save
from linattn.ops import short

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tiny_digits(tmp_path, monkeypatch):
    """A small model in the place of the one that ships."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save(build(preset("digits", width=8, num_heads=2, depth=1)), folder / "digits.safetensors")
    monkeypatch.setattr("linattn.models.files.SHIPPED", folder)


def test_the_demo_paints_what_ships(tmp_path, tiny_digits, capsys):
    demo.paint(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["completed.png", "digits.gif", "digits.png"]
    with Image.open(tmp_path / "completed.png") as image, Image.open(tmp_path / "digits.png") as sheet:
        assert image.size[0] > 4 * image.size[1] and sheet.size[0] == sheet.size[1]
    said = capsys.readouterr().out
    assert "64 images of 64 bytes in" in said and "the upper half of a test image, 3 completions" in said


def test_the_demo_without_weights_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("linattn.models.files.SHIPPED", tmp_path / "none")
    demo.paint(tmp_path)
    assert "linattn train digits" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_demo_measures_images_beside_softmax(capsys):
    small = {"shape": (4, 4, 1), "width": 16, "num_heads": 2, "depth": 1}
    lines = demo.show_images(dataclasses.replace(demo.TABLE, changes=small, effort=BRIEF))
    assert [line.method for line in lines] == ["linear", "softmax, cached", "softmax"]
    rows = [row for row in capsys.readouterr().out.splitlines() if "×" in row]
    assert len(rows) == 3 and rows[0].split()[-3] == "1×"
    assert lines[0].state_bytes < 2000 and all(line.batch == 1 for line in lines)


def test_the_demo_writes_a_plot_that_opens(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "LENGTHS", (16, 32))
    monkeypatch.setattr(demo, "paint", lambda out: None)
    monkeypatch.setattr(demo, "show_images", lambda: None)
    monkeypatch.setattr(demo, "show_costs", lambda lengths, costs=demo.show_costs: costs(lengths, BRIEF))
    monkeypatch.setattr(demo, "show_agreement", lambda tokens, show=demo.show_agreement: show(tokens=20))
    demo.main(tmp_path / "out")
    with Image.open(tmp_path / "out" / "demo.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for colour in (demo.LINEAR, demo.SOFTMAX):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(1).sum() > 100, f"no curve in {colour}"
    said = capsys.readouterr().out
    assert "the outputs differ by at most" in said and f"{16:>8,}" in said and "demo.png" in said


def test_the_plot_shows_the_numbers():
    def cell(seconds: float) -> Cell:
        return Cell(seconds, 1)

    points = [demo.Point(n, cell(1e-3 * n), cell(2e-3 * n), cell(3e-3), cell(4e-3 * n), 5, 6 * n) for n in (16, 32)]
    panels = demo.draw(points, machine.environment()).axes
    drawn = [[(line.get_color(), *np.asarray(line.get_ydata()).tolist()) for line in axes.lines] for axes in panels]
    assert drawn == [
        [(demo.LINEAR, 0.016, 0.032), (demo.SOFTMAX, 0.032, 0.064)],
        [(demo.LINEAR, 0.003, 0.003), (demo.SOFTMAX, 0.064, 0.128)],
        [(demo.LINEAR, 5, 5), (demo.SOFTMAX, 96, 192)],
    ]
    assert all(np.array_equal(line.get_xdata(), [16, 32]) for axes in panels for line in axes.lines)
    assert [text.get_text() for text in panels[0].texts] == ["linear\n32.0 ms", "softmax\n64.0 ms"]
    assert all(axes.get_xscale() == axes.get_yscale() == "log" for axes in panels)


def test_the_demo_measures_what_is_kept():
    points = [demo.measure(tokens, BRIEF) for tokens in (16, 64)]
    assert [point.cache_bytes for point in points] == [2 * n * demo.HEADS * demo.WIDTH * 4 for n in (16, 64)]
    assert points[0].state_bytes == points[1].state_bytes > 4 * demo.HEADS * demo.WIDTH**2


def test_the_demo_compares_both_forms(monkeypatch):
    assert 0 < demo.show_agreement(tokens=40) < 1e-5
    real = demo.linear_attention
    monkeypatch.setattr(demo, "linear_attention", lambda q, k, v: real(q, k, v, causal=False))
    assert demo.show_agreement(tokens=40) > 0.01


def test_the_demo_without_matplotlib_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    demo.show_plot([], tmp_path / "demo.png", {})
    assert "pip install 'linattn[plots]'" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.fixture
def crossover():
    spec = importlib.util.spec_from_file_location("crossover", ROOT / "benchmarks" / "crossover.py")
    assert spec and spec.loader
    module = sys.modules["crossover"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["crossover"]


def test_crossover_recommends_what_is_regretted_least(crossover):
    def made(tokens: int, times: dict[str, float]) -> Row:
        return dataclasses.replace(row(tokens), cells={name: Cell(seconds, 5) for name, seconds in times.items()})

    times = {96: (1.0, 2.0), 128: (2.0, 2.5), 192: (4.0, 3.0), 256: (8.0, 4.0)}
    rows = [made(tokens, {"single": one, "cut": cut}) for tokens, (one, cut) in times.items()]
    assert crossover.best_single_chunk(rows) == crossover.crossing(rows) == 128
    assert crossover.best_single_chunk([made(96, {"single": 3.0, "cut": 2.0})]) == crossover.crossing([]) == 0
    assert crossover.regret(rows, lambda row: "single") == pytest.approx((4 / 3 * 2) ** (1 / 4))
    blocks = [made(2048, {"64": 3.0, "128": 1.01, "256": 1.0}), made(4096, {"64": 1.0, "128": 1.0, "256": 1.0})]
    assert crossover.best_block(blocks) == 128  # 256 is better by less than two percent


def test_crossover_tries_the_constants_and_puts_them_back(crossover, tmp_path, monkeypatch):
    small = crossover.Settings(widths=(4,), short=(48, 96), long=(200,), cpu_blocks=(2**8, 2**12), heads=1, budget=1e-3)
    monkeypatch.setattr(crossover, "QUICK", small)
    before = crossover.tiles.SINGLE_CHUNK, dict(crossover.tiles.BLOCK_ELEMENTS)
    used, at_once = [], []
    spans, forward = crossover.tiles.spans, short.forward
    monkeypatch.setattr(crossover.tiles, "spans", lambda *a: used.append(made := spans(*a)) or made)
    monkeypatch.setattr(short, "forward", lambda q, *a: at_once.append(q.shape[1]) or forward(q, *a))
    run = CliRunner().invoke(crossover.app, ["--quick", "--out", str(tmp_path)])
    assert run.exit_code == 0, run.output
    after = crossover.tiles.SINGLE_CHUNK, dict(crossover.tiles.BLOCK_ELEMENTS)
    assert after == before
    shapes = {tuple((span.chunks, span.length) for span in made) for made in used}
    assert set(at_once) == {96} and ((1, 64), (1, 32)) in shapes  # one chunk, and several
    assert {((1, 64), (1, 64), (1, 64), (1, 8)), ((3, 64), (1, 8))} <= shapes  # small and large blocks
    data = json.loads(next(tmp_path.iterdir()).read_text())
    assert [(r["mode"], r["tokens"]) for r in data["single_or_cut"]] == [(mode, 96) for mode in MODES]
    assert data["recommended"]["BLOCK_ELEMENTS"] in (2**8, 2**12) and "recommended for cpu" in run.output
