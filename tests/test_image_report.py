"""The page of results says what was recorded, and of everything else that it was not measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image
from test_cli import call
from train_cases import tiny

from linattn.bench import image_report
from linattn.bench.image_pictures import draw_curves, paint
from linattn.bench.image_record import ImageRun, gathered, points, recorded
from linattn.models import build, preset, save
from linattn.train import train

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def image_run(
    name="mnist", data="mnist", method="linear", minutes=5.0, bits: float | None = 0.7, **changes
) -> ImageRun:
    test = None if bits is None else {"bits": bits, "bits_all": bits + 0.001, "examples": 10_000}
    curve = [[30.0, 0.5, 1.5], [60.0 * (minutes or 1), 9.0, 0.72]]
    made = ImageRun(
        name, data, method, minutes, 60 * (minutes or 1), 900, 9.0, 6, 2.5e6, "a GPU", {"seed": 0}, curve, [], test
    )
    return ImageRun(**{**asdict(made), **changes})


def rows_of(page: str, first: str) -> list[list[str]]:
    """The cells of every table row that begins so."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] == first]


def test_without_measurements_nothing_is_claimed():
    page = image_report.page([], {}, [])
    for method in image_report.BITS["mnist"]:
        quality, latency = rows_of(page, method)[:2]
        assert [quality[i] for i in (2, 4, 5)] == [image_report.NOTHING] * 3
        assert [latency[i] for i in (2, 4)] == [image_report.NOTHING] * 2
    assert page.count("reached") == page.count("missed") == 0


def test_a_run_stands_in_its_own_cell():
    runs = [
        image_run(bits=0.7), image_run(method="softmax", bits=0.66), image_run(method="LSH-1", bits=None),
        image_run(minutes=20.0, bits=0.6421), image_run(name="mnist-best", minutes=40.0, bits=0.61),
        image_run(data="cifar10", name="cifar10", minutes=5.0, bits=3.9),
    ]  # fmt: skip
    page = image_report.page(runs, {}, [])
    ours = {method: [row[2] for row in rows_of(page, method) if len(row) == 6] for method in image_report.BITS["mnist"]}
    nothing = image_report.NOTHING
    assert ours == {
        "linear": ["0.700", nothing], "softmax": ["0.660", nothing], "softmax, cached": ["0.660", nothing],
        "LSH-1": [nothing, nothing], "LSH-4": [nothing, nothing],
    }  # fmt: skip
    assert rows_of(page, "mnist") == [
        ["mnist", "20:00", "9.0", "2.5M", "0.6421", "0.6431", "≤ 0.644 within 20 minutes", "reached"]
    ]
    assert rows_of(page, "mnist-best")[0][-3:] == ["0.6110", "≤ 0.600 within 120 minutes", "missed"]


def test_an_aim_is_not_reached_too_late():
    late = image_run(minutes=30.0, bits=0.64)
    assert rows_of(image_report.page([late], {}, []), "mnist")[0][-1] == "missed"


def test_generation_is_what_was_recorded():
    measured = image_report.generated(RESULTS)
    lines = measured["mnist", "cpu", "linear"]
    page = image_report.page([], measured, [])
    best = max(line["images_per_second"] for line in lines)
    assert rows_of(page, "linear")[0][-1] == f"{best:.3g}"
    ones = [line for line in measured["cifar10", "cpu", "softmax"] if line["batch"] == 1]
    assert ones[0]["extrapolated"] and rows_of(page, "softmax")[3][2] == f"≈ {ones[0]['seconds']:.0f} s"


def test_the_newest_measurement_counts(tmp_path):
    for day, name, speed in ((2, "a", 20.0), (1, "b", 10.0)):
        line = {"preset": "mnist", "device": "cpu", "method": "linear", "batch": 1, "seconds": 1, "extrapolated": False}
        data = {
            "what": "generation",
            "environment": {"date": f"2026-01-0{day}"},
            "lines": [line | {"images_per_second": speed}],
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert image_report.best_of(image_report.generated(tmp_path)["mnist", "cpu", "linear"]) == "20"


@pytest.fixture
def finished(tmp_path):
    train(tiny(steps=8, log_every=1), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_the_command_records_and_writes(finished, tmp_path, monkeypatch, capsys):
    """From a run's folder to the page, and again from what was recorded."""
    words = ("eval", str(finished), "--data", "synthetic", "--examples", "3", "--record")
    monkeypatch.setattr("linattn.cli.judging.training_data", lambda record, split, data: _synthetic(split))
    assert call(monkeypatch, capsys, *words)[0] == 0
    out = tmp_path / "docs" / "results.md"
    options = ("--results", str(tmp_path / "results"), "--out", str(out), "--no-pictures")
    code, said, _ = call(monkeypatch, capsys, "report", "images", str(finished), *options)
    assert code == 0 and "recorded:" in said
    (run,) = recorded(tmp_path / "results")
    assert asdict(run) == json.loads(json.dumps(asdict(gathered(finished)))) and run.test is not None
    assert run.test["examples"] == 3
    assert [point[1] for point in run.curve] == [pytest.approx(step * 8 / 48, abs=1e-4) for step in (4, 8)]
    assert "pictures/synthetic-curves.png" in out.read_text()
    with Image.open(out.parent / "pictures" / "synthetic-curves.png") as image:
        assert image.width > 1000
    first = out.read_text()
    assert call(monkeypatch, capsys, "report", "images", *options)[0] == 0 and out.read_text() == first


def _synthetic(split: str):
    from linattn.train.data import load

    return load("synthetic", split=split, size=4, num_examples=48)


def test_curves_are_thinned():
    lines = [{"seconds": float(i), "epoch": i / 10, "bits": 1.0} for i in range(1001)]
    kept = points(lines)
    assert 200 <= len(kept) <= 252 and kept[0][0] == 0.0 and kept[-1][0] == 1000.0
    assert draw_curves([], Path("nowhere")) == []


def test_pictures_are_painted_by_what_ships(tmp_path, monkeypatch):
    folder = tmp_path / "weights"
    folder.mkdir()
    save(build(preset("digits", width=8, num_heads=2, depth=1)), folder / "digits.safetensors")
    monkeypatch.setattr("linattn.models.files.SHIPPED", folder)
    made = paint(tmp_path / "pictures")
    assert [path.name for _, path in made] == ["digits.png", "digits-strip.png", "digits-completed.png"]
    assert all(path.is_file() for _, path in made)


def test_a_run_without_an_evaluation(tmp_path):
    train(tiny(steps=1, eval_every=0), tmp_path / "run", quiet=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no evaluation yet"):
        gathered(tmp_path / "run")
