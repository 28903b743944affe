"""benchmarks/compare.py: two tiny runs side by side."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from train_cases import tiny
from typer.testing import CliRunner

from linattn.models import load
from linattn.train import evaluate, train
from linattn.train.data import load as load_data

ROOT = Path(__file__).parents[1]


@pytest.fixture
def compare():
    spec = importlib.util.spec_from_file_location("compare", ROOT / "benchmarks" / "compare.py")
    assert spec and spec.loader
    module = sys.modules["compare"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare"]


def test_runs_are_evaluated_as_they_were_trained(compare, tmp_path):
    (tmp_path / "notes").write_bytes(bytes(i * i % 251 for i in range(4000)))
    changes = {"width": 16, "num_heads": 2, "depth": 1}
    for attention in ("linear", "softmax"):
        run = tiny(preset="text", data=str(tmp_path / "notes"), data_options={}, window=8, steps=2)
        train(tiny(**{**vars(run), "changes": {**changes, "attention": attention}}), tmp_path / attention, quiet=True)
    folders = [str(tmp_path / attention) for attention in ("linear", "softmax")]
    run = CliRunner().invoke(compare.app, [*folders, "--out", str(tmp_path)])
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.glob("*-compare-notes.json")
    kept = json.loads(path.read_text())
    assert [one["attention"] for one in kept["runs"]] == ["linear", "softmax"]
    for one in kept["runs"]:
        text = load_data(str(tmp_path / "notes"), split="test")
        found = evaluate(load(tmp_path / one["attention"]), text, window=8)  # pyright: ignore[reportArgumentType]
        assert one["test"]["bits"] == pytest.approx(found["bits"], rel=1e-6) and one["step"] == 2
        assert f"{found['bits']:.4f}" in run.output
