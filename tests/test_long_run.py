"""benchmarks/long_run.py: a short run of it, and what it concludes from numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]


@pytest.fixture
def long_run():
    spec = importlib.util.spec_from_file_location("long_run", ROOT / "benchmarks" / "long_run.py")
    assert spec and spec.loader
    module = sys.modules["long_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["long_run"]


def test_a_short_run(long_run, tmp_path, monkeypatch):
    monkeypatch.setattr(long_run, "WARM_UP", 0)
    monkeypatch.setattr(long_run.torch, "set_num_threads", lambda n: None)
    run = CliRunner().invoke(long_run.app, ["--tokens", "10", "--rival-tokens", "70", "--out", str(tmp_path)])
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.glob("*-long-run.json")
    kept = json.loads(path.read_text())
    linear, softmax = kept["runs"]["linear"], kept["runs"]["softmax"]
    assert [mark["tokens"] for mark in linear] == list(range(1, 11))
    assert [mark["tokens"] for mark in softmax] == list(range(7, 71, 7))
    assert len({mark["state_bytes"] for mark in linear}) == 1 and softmax[-1]["state_bytes"] > softmax[0]["state_bytes"]
    assert all(mark["cpu_seconds"] > 0 and mark["clock_seconds"] > 0 for mark in linear + softmax)
    assert run.output.count("CPU ms a token") == 2 and all(v["claim"] in run.output for v in kept["verdicts"])


def test_what_it_concludes(long_run):
    flat = [long_run.Mark(n, 1e-3, 2e-3, 1000, 100_000_000) for n in (10, 20, 30)]

    def outcomes(**last) -> list[str]:
        return [verdict.outcome for verdict in long_run.judge([*flat, replace(flat[0], tokens=40, **last)])]

    assert outcomes() == outcomes(cpu_seconds=1.15e-3) == outcomes(cpu_seconds=0.5e-3) == ["PASS", "PASS"]
    assert outcomes(cpu_seconds=1.16e-3) == ["MISS", "PASS"]
    assert outcomes(clock_seconds=9.0) == ["PASS", "PASS"]  # other programs'
    assert outcomes(state_bytes=1001) == ["PASS", "MISS"]
    assert (
        outcomes(resident_bytes=104_000_000) == ["PASS", "PASS"] and outcomes(resident_bytes=104_000_001)[1] == "MISS"
    )
    unknown = [replace(mark, resident_bytes=None) for mark in flat]
    assert [verdict.outcome for verdict in long_run.judge(unknown)] == ["PASS", "OPEN"]
    slower = [flat[0], replace(flat[0], tokens=20, cpu_seconds=2.5e-3, state_bytes=2_000_000)]
    assert "2.5× the time of a token, and a cache of 0 MB became one of 2 MB" in long_run.growth(slower)
