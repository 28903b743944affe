"""The experiments on speech: train every recogniser of a grid, several at a time, and make tables of them.

    linattn bench speech --only core --jobs 4          # trains what is missing, goes on where it was interrupted
    linattn bench speech --report                      # tables and curves from what was recorded, nothing is trained

Each run is a folder, FOLDER/group/name-seed, as `linattn train` makes it, with result.json beside its weights: what was
told, the error rate on the held-out speakers with each speaker's counts, seconds of an epoch, machine and versions.
The test set is read by `linattn eval` alone, once for each model that is reported.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from linattn.bench.machine import environment
from linattn.bench.speech_grid import PAPER, Case, chosen
from linattn.models import SpeechModel, load
from linattn.models.files import record_of
from linattn.state import write_atomically
from linattn.train.metrics import FILE, read_lines
from linattn.train.speech.data import load_speech

RESULT = "result.json"
LINATTN = (sys.executable, "-m", "linattn.cli.main")


def main(
    only: Annotated[
        str, typer.Option(help="all, a group (core, gap, speed, stream), or a case such as core/linear.")
    ] = "core",
    folder: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/speech-grid"),
    jobs: Annotated[int, typer.Option(help="Runs at a time; on one GPU they share it.")] = 1,
    change: Annotated[list[str] | None, typer.Option(help="key=value for all runs, such as steps=20 to try.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Only the tables, from what was recorded.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where the tables go as markdown, beside the terminal.")] = None,
) -> None:
    """Train the recognisers of a grid, and report them.

    Needs speechocean762 in LINATTN_DATA (or --change data_dir=FOLDER). A run that was interrupted goes on; one that has
    its result is left alone.

        linattn bench speech --only core --jobs 4
        linattn bench speech --report --out speech.md
    """
    cases = chosen(only)
    failed: list[str] = []
    if not report:
        tasks = [(case, seed) for case in cases for seed in range(case.seeds)]
        with ThreadPoolExecutor(jobs) as pool:
            done = pool.map(lambda task: run_one(task[0], task[1], folder, change or []), tasks)
            failed = [error for error in done if error]
    text = tables(read_results(folder))
    print(text)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if failed:
        raise ValueError(f"{len(failed)} runs did not end well:\n  " + "\n  ".join(failed))


def run_one(case: Case, seed: int, root: Path, changes: Sequence[str]) -> str | None:
    """Train and judge one recogniser where that was not done yet; what went wrong, if something did."""
    folder = root / case.group / f"{case.name}-{seed}"
    if (folder / RESULT).is_file():
        return None
    log = folder.with_name(f"{folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    if (folder / "run.json").is_file():
        train = ["train", str(folder), "--resume"]
    else:
        train = ["train", "speech", *case.told, *changes, f"seed={seed}", "--folder", str(folder)]
    judge = ["eval", str(folder), "--split", "dev"]
    with open(log, "a", encoding="utf-8") as words:
        for command in (train, judge):
            code, said = call(command, words)
            words.write(said)
            if code:
                return f"{folder}: `linattn {' '.join(command[:2])}` ended with {code}, see {log}"
    found = json.loads(said.splitlines()[-1])
    result = {"group": case.group, "name": case.name, "seed": seed, "settings": [*case.told, *changes]}
    result |= {"dev": found, **speed_of(folder), "environment": environment()}
    write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())
    return None


def call(command: Sequence[str], words: TextIO) -> tuple[int, str]:
    """A command of linattn in a process of its own: its exit code, and what it printed. `words` takes its errors."""
    made = subprocess.run([*LINATTN, *command], stdout=subprocess.PIPE, stderr=words, text=True, check=False)
    return made.returncode, made.stdout


def speed_of(folder: Path) -> dict[str, Any]:
    """Frames a second in training, the middle of all log lines but the first; what an epoch costs; parameters."""
    lines = read_lines(folder / FILE)
    rates = [line["tokens_per_second"] for line in lines if line["kind"] == "train"]
    rate = statistics.median(rates[1:] or rates)
    model, run = load(folder), record_of(folder)["run"]
    assert isinstance(model, SpeechModel)
    options = run["data_options"] | {"speeds": (1.0,)}
    frames = int(load_speech(run["data"], split="train", **options).versions[0].lengths.sum())
    return {
        "frames_per_second": rate,
        "frames_of_an_epoch": frames,
        "seconds_per_epoch": frames / rate,
        "parameters": model.num_parameters,
        "training_seconds": lines[-1]["seconds"],
        "curve": [[line["step"], line["error_rate"]] for line in lines if line["kind"] == "eval"],
    }


def read_results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*/*/{RESULT}"))]


def tables(results: list[dict[str, Any]]) -> str:
    """A table for each group, in markdown."""
    if not results:
        return "No run of the grid has been recorded yet."
    parts = []
    for group in dict.fromkeys(result["group"] for result in results):
        names = dict.fromkeys(result["name"] for result in results if result["group"] == group)
        rows = [row([r for r in results if (r["group"], r["name"]) == (group, name)]) for name in names]
        head = "| | parameters | error rate, dev | 95% | seconds an epoch | seeds |"
        paper = group == "core"
        head += " paper (WSJ): error rate, seconds |" if paper else ""
        line = "|---|---|---|---|---|---|" + ("---|" if paper else "")
        rows = [
            text + (f" {PAPER[name][0]}%, {PAPER[name][1]} |" if paper else "")
            for name, text in zip(names, rows, strict=True)
        ]
        parts.append("\n".join([f"### {group}", "", head, line, *rows]))
    return "\n\n".join(parts)


def row(runs: list[dict[str, Any]]) -> str:
    """Means over seeds; the interval is that of the first seed, over speakers."""
    rates = [run["dev"]["error_rate"] for run in runs]
    low, high = runs[0]["dev"]["interval"]
    spread = f" ± {statistics.stdev(rates):.2%}" if len(rates) > 1 else ""
    seconds = statistics.mean(run["seconds_per_epoch"] for run in runs)
    return (
        f"| {runs[0]['name']} | {runs[0]['parameters']:,} | {statistics.mean(rates):.2%}{spread} "
        f"| {low:.1%} to {high:.1%} | {seconds:.2f} | {len(runs)} |"
    )
