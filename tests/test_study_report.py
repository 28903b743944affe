"""The page says what the numbers say: no difference where intervals overlap, and every difference where they do not."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from study_cases import TINY, found_for, made_up
from typer.testing import CliRunner

from linattn.cli.main import app
from linattn.study import conclude, report, sections
from linattn.study.arms import LINEAR, SOFTMAX
from linattn.study.conclude import TASKS, verdict
from linattn.study.folder import load
from linattn.study.jobs import Study

ROOT = Path(__file__).parents[1]


def study_with(best: dict[str, float], spread: float) -> Study:
    return made_up(TINY, lambda job: found_for(job, best, spread))


def scores(study: Study, task: str, arm: str, width: int) -> list[float]:
    found = study.of(task.partition("-")[0], task=task, stage="final", arm=arm, head_width=width)
    return [one["found"]["score"] for one in found]


def ends(values: list[float], task: str) -> tuple[float, float]:
    low, high = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    return (max(low, 0), min(high, 1)) if task == "recall" else (low, high)


@pytest.mark.parametrize("spread", [0.001, 0.02, 0.8])
def test_a_difference_is_claimed_where_intervals_do_not_overlap(spread):
    study = study_with({"taylor": 2.0, "exp": 2.05, "relu": 2.2, "elu": 2.4, SOFTMAX: 1.9}, spread)
    for task in ("text", "images", "music-jsb", "recall"):
        made = verdict(study, task)
        assert made is not None
        low, high = ends(scores(study, task, made.best.arm, made.best.head_width), task)
        for entry in (*made.alike, *made.worse):
            a, b = ends(scores(study, task, entry.arm, entry.head_width), task)
            assert (b < low or high < a) == (entry in made.worse), (entry, low, high, a, b)
        assert made.softmax is not None
        a, b = ends(scores(study, task, SOFTMAX, made.best.head_width), task)
        assert (b < low or high < a) == (made.against_softmax != "not told apart")
    claims = [verdict(study, task) for task in TASKS if verdict(study, task)]
    kinds = (
        [bool(made.worse) for made in claims if made] if spread < 0.1 else [bool(made.alike) for made in claims if made]
    )
    assert all(kinds), "the test has both kinds"


def test_where_nothing_is_apart_the_page_names_no_winner():
    study = study_with({"taylor": 2.999}, 0.3)
    made = verdict(study, "text")
    assert made is not None and made.nothing_apart and made.against_softmax == "not told apart"
    row = sections.decision(study, "text")
    assert row is not None and row[1] == "`elu`, the default: no map was told apart"
    assert "not told apart from softmax attention" in row[3]
    lines = "".join(sections.task_lines(study, "text"))
    assert "Told apart, as worse: none." in lines and "better" not in lines
    assert not any("better" in line or "told apart" in line for line in conclude.surprises(study))


def test_a_clear_winner_is_taken_and_backed():
    study = study_with({"taylor": 1.0, SOFTMAX: 2.0}, 0.01)
    row = sections.decision(study, "text")
    assert row is not None and row[1] == "`taylor`" and row[2] == "8, the only one tried"
    figure = r"\d\.\d+ \[\d\.\d+, \d\.\d+\]"
    claim = f"bits a byte: taylor {figure}; elu {figure}; linear is better than softmax attention, {figure}"
    assert re.fullmatch(claim, row[3]), row[3]
    found = conclude.surprises(study)
    assert any("Text: a linear map is better than softmax attention" in line for line in found)
    assert any("Text: the default map is told apart from the best, as worse" in line for line in found)


def test_head_widths_are_told_apart_or_both_named():
    def found(job):
        made = found_for(job, {"taylor": 2.5}, 0.001)
        wide = job.part == "recall" and job.settings["head_width"] == 8
        return made | ({"score": made["score"] + 0.2} if wide else {})

    row = sections.decision(made_up(TINY, found), "recall")
    assert row is not None and row[1] == "`taylor`" and row[2] == "8, told apart from 4"
    row = sections.decision(study_with({"taylor": 2.5}, 0.001), "recall")
    assert row is not None and re.fullmatch(r"[48] or [48]: not told apart", row[2])


def test_one_seed_is_no_evidence():
    study = study_with({"taylor": 1.0}, 0.0)
    study.results = {key: x for key, x in study.results.items() if x["settings"].get("stage") != "final"}
    assert verdict(study, "text") is None
    row = sections.decision(study, "text")
    assert row is not None and row[1:] == ("not known yet", "-", "no finals with several seeds were recorded")
    assert sections.task_lines(study, "text")[0].startswith("One seed of each: an order, and no evidence")


def test_reading_on_is_judged_by_its_interval():
    for score, says in ((3.5, "does harm"), (2.5, "helps"), (3.005, "not told apart from reading in windows")):
        study = study_with({LINEAR: score, SOFTMAX: 3.0}, 0.0)
        assert next(one for one in conclude.far(study) if one.arm == LINEAR).says == says


def test_exponents_and_where_it_pays_reach_the_page():
    page = report.page(study_with({}, 0.1), {}, Path("x.json"))
    assert re.search(r"\| cpu \| elu \| 16 … 128 \|.* 1.00 \[1.00, 1.00\] ", page)
    assert re.search(r"\| cpu \| softmax attention \| .* 2.00 \[2.00, 2.00\] ", page)
    assert "not up to 8" in page, "4 / sqrt(8) is above 1"


def test_the_page_is_made_again_and_remarks_are_kept(tmp_path):
    pytest.importorskip("matplotlib")
    study = study_with({"taylor": 1.0, "fourier": 30.0}, 0.01)
    source, out = tmp_path / "s.json", tmp_path / "docs" / "page.md"
    source.write_text(json.dumps(study.to_json()))
    report.report_study(source, out)
    first = out.read_text()
    assert first.count(report.BEGIN) == 1 and first.rstrip().endswith("made again.")
    links = re.findall(r"\]\((.+?\.png)\)", first)
    assert len(links) >= 8 and all((out.parent / link).is_file() for link in links)
    assert all((out.parent / link).stat().st_size < 60_000 for link in links)
    out.write_text("Above.\n" + first + "\nA remark.\n")
    report.report_study(source, out)
    assert out.read_text() == "Above.\n" + first + "\nA remark.\n"
    assert load(source).to_json() == study.to_json()


def test_a_quick_study_says_that_it_is_one():
    page = report.page(study_with({}, 0.1), {}, Path("x.json"))
    assert "This is the quick study" in page and "linattn study --minutes 9" in page and "Left out" in page
    study = study_with({}, 0.1)
    study.to_come = 100.0
    assert "It is not complete" in report.page(study, {}, Path("x.json"))


def test_the_recorded_page_is_what_its_json_says():
    """docs/study.md is not written by hand, and does not lag behind the code that makes it."""
    text = (ROOT / "docs" / "study.md").read_text()
    name = re.search(r"Recorded in `(.+\.json)`", text)
    assert name
    source = ROOT / "benchmarks" / "results" / name[1]
    plots = {path.stem: f"study/{path.name}" for path in (ROOT / "docs" / "study").glob("*.png")}
    made = f"{report.BEGIN}\n{report.page(load(source), plots, source)}{report.END}"
    assert made in text, "run `linattn report study` again"


def test_commands_say_what_they_miss(tmp_path, monkeypatch):
    def said(*arguments: str) -> str:
        return str(CliRunner().invoke(app, list(arguments)).exception)

    assert "no part 'sleep' in the study: there are copy, recall" in said("study", "--quick", "--only", "text,sleep")
    assert "there is no study at" in said("report", "study", str(tmp_path))
    (tmp_path / "study.jsonl").write_text('{"line": "begun", "scale": "quick"}\n')
    assert "holds no results yet" in said("report", "study", str(tmp_path))
    source = tmp_path / "s.json"
    source.write_text(json.dumps(study_with({}, 0.1).to_json()))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "linattn.study.plots", raising=False)
    assert "pip install 'linattn[plots]'" in said("report", "study", str(source), "--out", str(tmp_path / "p.md"))
    assert not (tmp_path / "p.md").exists()
