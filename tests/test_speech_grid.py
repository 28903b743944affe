"""The grid of experiments: every case is a run that can be made, and a run leaves what the tables need."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sound_cases import little_ocean
from typer.testing import CliRunner

from linattn.bench import speech
from linattn.bench.speech_grid import CASES, chosen
from linattn.cli.main import app
from linattn.models import SpeechConfig, build
from linattn.train import load_run, override


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.group}-{case.name}")
def test_every_case_is_a_run(case):
    run = override(load_run("speech"), case.told)
    assert isinstance(run.config(), SpeechConfig) and run.steps


def test_rivals_of_the_gap_have_nearly_equal_parameters():
    sizes = {c.name: build(override(load_run("speech"), c.told).config()).num_parameters for c in chosen("gap")}
    linear = build(override(load_run("speech"), chosen("core/linear")[0].told).config()).num_parameters
    far = {name: size for name, size in sizes.items() if abs(size / linear - 1) > 0.2}
    assert set(far) <= {"map-taylor"}, far


def in_this_process(command, words):
    """In place of a process that would import torch for seconds."""
    made = CliRunner().invoke(app, command)
    words.write(str(made.exception or ""))
    return made.exit_code, made.stdout


def test_a_run_is_trained_once_and_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speech, "call", in_this_process)
    little_ocean(tmp_path)
    data = [f"data_dir={tmp_path}", "cache_dir=none", "batch_frames=2000", "device=cpu"]
    change = [*data, "steps=2", "depth=1", "width=16", "num_heads=2", "attentions=", "precision=fp32", "speeds=1.0"]
    options: Any = {"only": "core/linear", "folder": tmp_path / "grid", "jobs": 1, "change": change}
    speech.main(**options, report=False, out=tmp_path / "tables.md")
    results = speech.read_results(tmp_path / "grid")
    assert [(r["name"], r["seed"]) for r in results] == [("linear", 0), ("linear", 1), ("linear", 2)]
    assert all(r["seconds_per_epoch"] > 0 and r["dev"]["speakers"] and r["curve"] for r in results)
    first = capsys.readouterr().out
    assert "| linear |" in first and "8.08%, 824" in first and "| 3 |" in first
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grid/*/*/*")}
    speech.main(**options, report=False, out=None)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("grid/*/*/*")} == before, "trained again"
    speech.main(**options | {"change": None}, report=True, out=None)
    assert capsys.readouterr().out.strip().endswith((tmp_path / "tables.md").read_text().strip())


def test_a_run_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(speech, "call", in_this_process)
    with pytest.raises(
        ValueError, match=r"3 runs did not end well(?s:.*)linear-2: `linattn train speech` ended with 1"
    ):
        speech.main(only="core/linear", folder=tmp_path, jobs=1, change=["data=/nowhere"], report=False, out=None)
    assert "no speech '/nowhere'" in (tmp_path / "core" / "linear-0.log").read_text()


def test_no_result_and_no_such_case(tmp_path):
    assert speech.tables(speech.read_results(tmp_path)) == "No run of the grid has been recorded yet."
    with pytest.raises(ValueError, match=r"no experiment 'nothing': choose all, a group \(core, gap, speed, stream\)"):
        chosen("nothing")


def test_the_table_shows_means_over_seeds():
    dev = {"error_rate": 0.2, "interval": [0.15, 0.25]}
    one = {"group": "gap", "name": "x", "seed": 0, "parameters": 10, "seconds_per_epoch": 2.0, "dev": dev}
    other = json.loads(json.dumps(one)) | {"seed": 1, "dev": {"error_rate": 0.3, "interval": [0.2, 0.4]}}
    assert speech.row([one, other]) == "| x | 10 | 25.00% ± 7.07% | 15.0% to 25.0% | 2.00 | 2 |"
