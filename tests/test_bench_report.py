"""The benchmark's report: verdicts follow from the numbers, and all that was measured is printed and kept."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from bench_cases import TINY, row
from typer.testing import CliRunner

from linattn.bench import __main__ as command
from linattn.bench import machine, operator, report
from linattn.bench.measure import Cell
from linattn.bench.operator import MODES, OURS
from linattn.bench.report import Report, Row
from linattn.bench.verdicts import END, FLAT_FROM, START, judge

ROOT = Path(__file__).parents[1]


def good_table() -> list[Row]:
    ratios = {32: 4.9, 256: 1.2, 512: 0.9, 65_536: 0.01}
    return [
        row(tokens, width, mode, chunked=ratio, sdpa=1.0)
        for width in (32, 128)
        for mode in MODES
        for tokens, ratio in ratios.items()
    ]


def good_long() -> list[Row]:
    """1 µs a token at 1,024, then 1.1 to 1.2 µs; memory falls to 1,000 bytes a token from far more."""
    costs = {START: (1.0, 9000), FLAT_FROM: (1.1, 1500), 65_536: (1.2, 1100), END: (1.15, 1000)}
    return [
        row(t, width, mode, chunked=Cell(t * time * 1e-6, 3, t * size))
        for width in (32, 64)
        for mode in MODES
        for t, (time, size) in costs.items()
    ]


def outcomes(table: list[Row], long: list[Row]) -> list[str]:
    return [verdict.outcome for verdict in judge(table, long)]


def with_row(rows: list[Row], place: int, **changed) -> list[Row]:
    return [dataclasses.replace(r, **changed) if i == place % len(rows) else r for i, r in enumerate(rows)]


def test_a_miss_says_what_is_left_without_the_time_of_the_system():
    long = good_long()
    slow = {OURS: Cell(1.5e-6 * END, 3, 1000 * END, system_seconds=0.3e-6 * END)}
    long = [dataclasses.replace(r, cells={OURS: dataclasses.replace(r.cells[OURS], system_seconds=0.0)}) for r in long]
    flat = judge(good_table(), with_row(long, -1, cells=slow))[2]
    assert flat.outcome == "MISS" and "worst 1.36×" in flat.seen and "; 1.09× without the time the system" in flat.seen
    assert "system" not in judge(good_table(), long)[2].seen  # nothing to explain


def long_cell(tokens: int, microseconds: float = 1.15, size: float | None = 1000) -> dict[str, Cell]:
    return {OURS: Cell(tokens * microseconds * 1e-6, 3, None if size is None else round(tokens * size))}


def test_good_numbers_pass():
    assert outcomes(good_table(), good_long()) == ["PASS"] * 5


@pytest.mark.parametrize(
    ("place", "cells", "missed"),
    [
        (2, {"chunked": Cell(1.0, 5), "sdpa": Cell(1.0, 5)}, 0),  # T = 512: as fast is not faster
        (-1, {"chunked": Cell(1.1, 5), "sdpa": Cell(1.0, 0, extrapolated=True)}, 0),
        (0, {"chunked": Cell(5.01, 5), "sdpa": Cell(1.0, 5)}, 1),
    ],
)
def test_one_slow_row_misses(place, cells, missed):
    said = judge(with_row(good_table(), place, cells=cells), good_long())
    assert [i for i, verdict in enumerate(said) if verdict.outcome == "MISS"] == [missed]
    assert "1 of 8 rows" in said[missed].seen
    assert f"T = {good_table()[place].tokens:,}" in said[missed].seen
    assert ("SDPA extrapolated in 1" in said[missed].seen) == cells["sdpa"].extrapolated


@pytest.mark.parametrize(
    ("place", "cells", "missed"),
    [
        (-1, long_cell(END, 1.3), [2]),  # 1.3 / 1.1 > 1.15
        (-2, long_cell(65_536, 0.9), [2]),  # too fast is not flat either
        (-4, long_cell(START, 0.7), [3]),  # 1.2 / 0.7 > 1.5
        (-1, long_cell(END, 1.6), [2, 3]),
        (-1, long_cell(END, size=1800), [4]),  # 1800 / 1500 > 1.15
        (-1, long_cell(END, size=1500 * END / FLAT_FROM), [4]),  # quadratic
    ],
)
def test_one_bad_length_misses(place, cells, missed):
    said = judge(good_table(), with_row(good_long(), place, cells=cells))
    assert [i for i, verdict in enumerate(said) if verdict.outcome == "MISS"] == missed


def test_the_limits_themselves():
    short = [row(256, chunked=5.0, sdpa=1.0)]
    assert judge(short, [])[1].outcome == "PASS"  # at most
    long = [row(t, chunked=long_cell(t, us)[OURS]) for t, us in ((START, 1.0), (FLAT_FROM, 1.31), (END, 1.5))]
    assert [verdict.outcome for verdict in judge([], long)][2:4] == ["PASS", "PASS"]


def test_what_was_not_measured_stays_open():
    assert outcomes([], []) == ["OPEN"] * 5
    brief = [row for row in good_long() if row.tokens < END]
    assert outcomes(good_table(), brief)[2:] == ["OPEN"] * 3
    assert "measured up to 65,536" in judge([], brief)[2].seen
    slow = with_row(brief, -1, cells=long_cell(65_536, 9.0, 9000))
    assert outcomes(good_table(), slow)[2:] == ["MISS"] * 3  # enough to know that
    one_short = [row for row in good_long() if (row.tokens, row.width, row.mode) != (END, 64, MODES[1])]
    assert outcomes(good_table(), one_short) == ["PASS"] * 5
    assert "forward+backward, D = 64 up to 65,536" in judge([], one_short)[2].seen
    unknown = [dataclasses.replace(row, cells=long_cell(row.tokens, size=None)) for row in good_long()]
    assert outcomes([], unknown)[4] == "OPEN"


def test_rows_of_a_gpu_and_guesses_of_ours_do_not_count():
    gpu = [row(512, device="cuda", chunked=9.0, sdpa=1.0), row(END, device="cuda", chunked=9e9)]
    guess = row(512, chunked=Cell(9.0, 0, extrapolated=True), sdpa=1.0)
    assert outcomes([*good_table(), gpu[0], guess], [*good_long(), gpu[1]]) == ["PASS"] * 5


def test_report_round_trip(tmp_path):
    table = [*good_table(), row(64, chunked=Cell(0.1, 0, None, True), sdpa=Cell(0.2, 3, 7))]
    settings = json.loads(json.dumps(dataclasses.asdict(TINY)))
    made = Report("operator", settings, machine.environment(), table, good_long(), ["left"], judge(table, []), True)
    path = made.save(tmp_path)
    assert Report.load(path) == made
    data = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["table"][-1]["ratios"] == {"chunked": 0.5}
    assert data["table"][-1]["cells"]["chunked"]["extrapolated"] is True
    about = data["environment"]
    assert path.name.startswith(about["date"][:10]) and path.name.endswith("-operator-partial.json")
    assert {"cpu", "cores", "threads", "memory_bytes", "gpu"} <= about["machine"].keys()
    assert {"os", "python", "torch", "linattn"} <= about["versions"].keys() and "load_average" in about
    assert made.save(tmp_path / "here.json") == tmp_path / "here.json"


def test_result_names():
    about = {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "Intel(R) Core(TM) i7 @ 2 GHz", "cores": 8, "gpu": None},
    }
    assert machine.result_name(about, "operator") == "2026-01-02-intel-core-i7-2-ghz-8-cores-operator.json"
    about["machine"]["gpu"] = "NVIDIA H200"
    assert machine.result_name(about, "x") == "2026-01-02-intel-core-i7-2-ghz-8-cores-nvidia-h200-x.json"


def test_results_go_to_the_checkout_or_here(monkeypatch, tmp_path):
    assert machine.results_folder() == ROOT / "benchmarks" / "results"
    monkeypatch.setattr(machine.linattn, "__file__", str(tmp_path / "site-packages" / "linattn" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert machine.results_folder() == tmp_path and machine.commit() is None


def test_the_commit_and_whether_there_is_more(monkeypatch, tmp_path):
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    monkeypatch.setattr(machine, "checkout", lambda: tmp_path)
    git("init")
    (tmp_path / "a.py").write_text("1")
    assert machine.commit() is None
    git("add", ".")
    git("commit", "-m", "a")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "new.json").touch()
    assert machine.commit() == {"hash": git("rev-parse", "HEAD").strip(), "dirty": False}
    (tmp_path / "a.py").write_text("2")
    assert machine.commit() == {"hash": git("rev-parse", "HEAD").strip(), "dirty": True}


def test_the_table_in_print():
    names = [OURS, "recurrent", "sdpa"]
    guessed = row(65_536, chunked=Cell(0.21, 3, 134_200_000), sdpa=Cell(97.0, 0, None, True))
    measured = row(32, chunked=Cell(61.3e-6, 9, 100_000), recurrent=3.1e-3, sdpa=49e-6)
    head, below = report.table_head(measured, names).splitlines()
    first, last = report.table_line(measured, names), report.table_line(guessed, names)
    assert head.startswith("forward, D = 32") and len(below) == len(first) == len(last)
    assert first.split() == ["32", "61.3", "µs", "3.10", "ms", "49.0", "µs", "1.25", "0.1", "0.0", "0.0"]
    assert last.split() == ["65,536", "210", "ms", "-", "≈", "97.0", "s", "≈", "0.00216", "134.2", "-", "-"]
    line = report.long_line(row(1_048_576, chunked=Cell(2.0972, 3, 2**31, system_seconds=0.10486)))
    assert line.split() == ["1,048,576", "2.10", "s", "2,000", "100", "2,147.5", "2,048"]
    assert len(line) == len(report.long_head(guessed).splitlines()[1])


def test_seconds_in_words():
    words = {
        1.234e-7: "0.12 µs",
        61.34e-6: "61.3 µs",
        9.999e-4: "1.00 ms",
        0.09996: "100 ms",
        0.9996: "1.00 s",
        320.4: "320 s",
        9.997e-3: "10.0 ms",
    }
    assert {seconds: report.seconds_in_words(seconds) for seconds in words} == words


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(command, "QUICK", TINY)


def invoke(*arguments: object):
    return CliRunner().invoke(command.app, [str(x) for x in arguments])


def test_the_command_prints_and_keeps_everything(tiny, tmp_path):
    run = invoke("--quick", "--device", "cpu", "--out", tmp_path)
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.iterdir()
    kept = Report.load(path)
    assert len(kept.table) == 12 and len(kept.long) == 6 and not kept.interrupted
    assert kept.table[0].dtype == "float32" and kept.verdicts == judge(kept.table, kept.long)
    for verdict in kept.verdicts:
        assert f"{verdict.outcome}  {verdict.claim}" in run.output
    assert run.output.count("chunked/SDPA") == 4 and run.output.count("ns a token") == 2 and str(path) in run.output
    assert report.table_line(kept.table[-1], [rival.name for rival in operator.rivals()]) in run.output


@pytest.mark.parametrize(("part", "sizes"), [("table", (12, 0)), ("long", (0, 6))])
def test_one_table_alone(tiny, tmp_path, part, sizes):
    run = invoke("--quick", "--device", "cpu", "--part", part, "--out", tmp_path)
    assert run.exit_code == 0, run.output
    (path,) = tmp_path.glob(f"*-operator-quick-{part}.json")
    kept = Report.load(path)
    assert (len(kept.table), len(kept.long)) == sizes and "OPEN" in {verdict.outcome for verdict in kept.verdicts}


def test_an_interrupted_run_keeps_what_was_measured(tiny, tmp_path, monkeypatch):
    def interrupted(*_):
        yield row(512, chunked=0.5, sdpa=1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(operator, "measure_table", interrupted)
    run = invoke("--quick", "--device", "cpu", "--out", tmp_path)
    assert run.exit_code == 130 and "interrupted" in run.output
    (path,) = tmp_path.glob("*-operator-quick-partial.json")
    kept = Report.load(path)
    assert kept.interrupted and len(kept.table) == 1 and kept.verdicts[0].outcome == "PASS"


@pytest.mark.parametrize("wrong", [("--device", "tpu"), ("--dtype", "int8"), ("--part", "half")])
def test_a_wrong_choice_is_told_the_right_ones(wrong):
    run = invoke("--quick", *wrong)
    assert (
        run.exit_code == 2
        and wrong[1] in run.output
        and any(name in run.output for name in ("'cpu'", "'bfloat16'", "'table'"))
    )
