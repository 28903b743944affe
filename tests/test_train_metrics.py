"""The metrics file after an interruption, and what the terminal shows."""

from __future__ import annotations

import json

import pytest
from train_cases import tiny

from linattn.train import train
from linattn.train.metrics import Metrics, clock, in_words, read_lines, short_count


def test_lines_after_the_checkpoint_are_taken_out(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step in (1, 2, 3):
        metrics.write({"kind": "train", "step": step, "nats": 0.1 + 0.2})
    metrics.close()
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = Metrics(tmp_path, 2)
    metrics.write({"kind": "train", "step": 3, "nats": 7.0})
    metrics.close()
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:2] == before[:2] and json.loads(after[2])["nats"] == 7.0 and len(after) == 3


def test_a_damaged_line_is_named_and_half_of_one_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert read_lines(path) == [{"step": 1}]
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no JSON: 'nonsense'"):
        read_lines(path)


def test_nan_is_no_json(tmp_path):
    metrics = Metrics(tmp_path, 0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics.write({"kind": "train", "step": 1, "nats": float("nan")})
    metrics.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (41.6, "0:42"), (725, "12:05"), (10_800, "3:00:00"), (-3, "0:00")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(950, "950"), (41_230, "41.2k"), (1_254_000, "1.25M"), (7, "7")])
def test_short_count(count, text):
    assert short_count(count) == text


def test_lines_in_words():
    line = {"kind": "train", "step": 1200, "nats": 1.0, "bits": 1.4427, "tokens_per_second": 41_230}
    assert in_words(line, "bits/dim", 5000, 42.0) == "step 1,200/5,000  1.4427 bits/dim  41.2k tokens/s  0:42 left"
    line = {"kind": "eval", "step": 500, "split": "dev", "examples": 2000, "bits": 2.0}
    assert in_words(line, "bits/byte") == "step 500  dev, 2,000 examples  2.0000 bits/byte"


def test_a_log_has_a_line_for_each_event_and_quiet_has_none(tmp_path, capsys):
    train(tiny(), tmp_path / "run")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 + 6 + 3
    assert "parameters, <synthetic train: 48 images 4×4×1" in said[0] and "on cpu" in said[0]
    assert said[1].startswith("step 2/12  ") and "bits/dim" in said[1] and said[1].endswith(" left")
    train(tiny(), tmp_path / "quiet", quiet=True)
    assert capsys.readouterr() == ("", "")
