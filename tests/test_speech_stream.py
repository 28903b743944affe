"""benchmarks/speech_stream.py: a stream of seconds in place of an hour."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from sound_cases import little_ocean

from linattn.train import Run, train

ROOT = Path(__file__).parents[1]


def module():
    spec = importlib.util.spec_from_file_location("speech_stream", ROOT / "benchmarks" / "speech_stream.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_a_short_stream_is_recorded(tmp_path, capsys):
    little_ocean(tmp_path)
    run = Run(
        preset="transcriber",
        changes={"width": 16, "num_heads": 2, "depth": 1},
        data="speechocean762",
        data_options={"data_dir": str(tmp_path), "cache_dir": None},
        steps=2,
        device="cpu",
    )
    train(run, tmp_path / "run", quiet=True)
    module().main(tmp_path / "run", minutes=0.5, split="dev", threads=1, out=tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["seconds"] >= 30 and found["real_time_factor"] > 0 and len(found["minutes"]) >= 2
    first, last = found["minutes"][0], found["minutes"][-1]
    assert abs(first["remembered_bytes"] - last["remembered_bytes"]) < 4 * 400
    assert last["begun_seconds"] > 0 and last["error_rate"] >= 0 and first["median_ms"] <= first["longest_ms"]
    assert "real-time factor" in capsys.readouterr().out
