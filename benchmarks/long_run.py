"""A hundred thousand tokens, one after the other: what each costs, and what the process holds.

What    A linear model streams text without end. Its state has one size, so the last token should cost what the first
        did, in time and in memory. Beside it the same architecture with softmax attention and its cache, for fewer
        tokens: its time and memory grow.
Why     "Constant memory" is a claim about a process that runs for hours: about its allocator, its random numbers and
        its counters too, not only about the size of a tensor.
How     python benchmarks/long_run.py [--tokens 100000] [--rival-tokens 20000] [--model text] [--quick]
        Ten minutes on one core. Times are CPU time, which other programs disturb little; the clock's stand beside it.
Out     A table, two verdicts, and all numbers as JSON in benchmarks/results/ (<date>-<machine>-long-run.json).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from linattn.bench.machine import environment, resident_memory
from linattn.bench.measure import lower_quartile
from linattn.bench.report import Verdict, heading, save_json
from linattn.generate import Stream, stream
from linattn.models import build, preset

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
MARKS = 10  # of a run
WARM_UP = 200  # tokens
BLOCK = 50  # tokens that are timed together; a mark is the lower quartile of its blocks, as other programs disturb
FLAT = 1.15  # the largest CPU time of a token over that of the first tenth
STEADY = 4e6  # bytes: more than that is growth, less is what an allocator keeps or gives back
HEAD = f"{'tokens':>9}{'CPU ms a token':>16}{'ms a token':>12}{'state MB':>11}{'process MB':>12}"


@dataclass(frozen=True)
class Mark:
    """What the tokens since the last mark cost, each; and what is held by now."""

    tokens: int
    cpu_seconds: float
    clock_seconds: float
    state_bytes: int
    resident_bytes: int | None


@app.command()
def main(
    tokens: Annotated[int, typer.Option(help="Of the linear model.", min=MARKS)] = 100_000,
    rival_tokens: Annotated[int, typer.Option(help="Of the same model with cached softmax.", min=MARKS)] = 20_000,
    model: Annotated[str, typer.Option(help="A preset of a language model.")] = "text",
    quick: Annotated[bool, typer.Option("--quick", help="A hundredth of the tokens.")] = False,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Stream tokens from a linear model, and from its rival; say whether time and memory stay."""
    torch.set_num_threads(threads)
    about, runs = environment(), {}
    print(heading(about))
    for attention, count in (("linear", tokens), ("softmax", rival_tokens)):
        print(f"\n{attention}, {model}\n{HEAD}")
        runs[attention] = []
        for mark in measure(model, attention, max(count // 100, MARKS) if quick else count):
            print(line(mark), flush=True)
            runs[attention].append(mark)
    verdicts = judge(runs["linear"])
    print()
    for verdict in verdicts:
        print(f"{verdict.outcome}  {verdict.claim}: {verdict.seen}")
    print(growth(runs["softmax"]))
    data = {
        "what": "long-run",
        "environment": about,
        "model": model,
        "verdicts": [dataclasses.asdict(v) for v in verdicts],
    }
    data["runs"] = {name: [dataclasses.asdict(mark) for mark in marks] for name, marks in runs.items()}
    print(f"\nwritten: {save_json(data, 'long-run-quick' if quick else 'long-run', out)}")


def measure(name: str, attention: str, tokens: int) -> Iterator[Mark]:
    """Marks at equal distances of a stream from a freshly initialised model."""
    torch.manual_seed(0)
    run = stream(build(preset(name, attention=attention)).eval(), seed=0, graph=False)
    for _ in range(min(WARM_UP, tokens)):
        next(run)
    every = tokens // MARKS
    for mark in range(1, MARKS + 1):
        begin = time.perf_counter()
        blocks = [_cpu_seconds(run, min(BLOCK, every - done)) for done in range(0, every, BLOCK)]
        clock = (time.perf_counter() - begin) / every
        yield Mark(mark * every, lower_quartile(blocks), clock, run.stands().state.nbytes, resident_memory())


def _cpu_seconds(run: Stream, tokens: int) -> float:
    """CPU time of a token, over some."""
    begin = time.process_time()
    for _ in range(tokens):
        next(run)
    return (time.process_time() - begin) / tokens


def judge(marks: list[Mark]) -> list[Verdict]:
    """Whether time and memory of a linear model's token stay what they are at the first mark."""
    times = [mark.cpu_seconds for mark in marks]
    slower = max(times) / times[0]
    held = [mark.resident_bytes for mark in marks if mark.resident_bytes is not None]
    grown = max(held) - held[0] if held else 0
    same_state = len({mark.state_bytes for mark in marks}) == 1
    till = f"up to token {marks[-1].tokens:,}"
    state = f"the state {'is' if same_state else 'is not'} of one size, {marks[-1].state_bytes / 1e6:.2f} MB"
    return [
        Verdict(
            f"time per token at most {FLAT:g}× that of the first tenth {till}",
            "PASS" if slower <= FLAT else "MISS",
            f"at most {slower:.2f}×",
        ),
        Verdict(
            f"memory of the process flat within {STEADY / 1e6:.0f} MB {till}",
            "MISS" if not same_state or grown > STEADY else "PASS" if held else "OPEN",
            f"it grew by {grown / 1e6:.1f} MB; {state}" if held else f"this system does not tell; {state}",
        ),
    ]


def growth(marks: list[Mark]) -> str:
    first, last = marks[0], marks[-1]
    slower = last.cpu_seconds / first.cpu_seconds
    return (
        f"cached softmax: from token {first.tokens:,} to {last.tokens:,} {slower:.2g}× the time of a token, "
        f"and a cache of {first.state_bytes / 1e6:.0f} MB became one of {last.state_bytes / 1e6:.0f} MB"
    )


def line(mark: Mark) -> str:
    held = "-" if mark.resident_bytes is None else f"{mark.resident_bytes / 1e6:.1f}"
    times = f"{1e3 * mark.cpu_seconds:>16.2f}{1e3 * mark.clock_seconds:>12.2f}"
    return f"{mark.tokens:>9,}{times}{mark.state_bytes / 1e6:>11.2f}{held:>12}"


if __name__ == "__main__":
    app()
