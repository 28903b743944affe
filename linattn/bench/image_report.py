"""`linattn report images`: docs/results.md, the paper's tables beside ours, from recorded measurements alone.

A cell that nothing was recorded for says "not measured". Curves need matplotlib; pictures are painted by the models
that ship with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.bench.generation_table import PAPER
from linattn.bench.image_pictures import draw_curves, paint
from linattn.bench.image_record import ImageRun, measurements, record, recorded
from linattn.bench.machine import checkout, results_folder
from linattn.bench.report import seconds_in_words
from linattn.state import write_atomically
from linattn.train.metrics import clock, short_count

NOTHING = "not measured"
TITLES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
# Bits/dim in tables 1 and 2 of Katharopoulos et al. 2020 (arXiv 2006.16236).
BITS = {
    "mnist": {"softmax": 0.621, "softmax, cached": 0.621, "LSH-1": 0.745, "LSH-4": 0.676, "linear": 0.644},
    "cifar10": {"softmax": 3.47, "softmax, cached": 3.47, "LSH-1": 3.39, "LSH-4": 3.51, "linear": 3.40},
}
EQUAL = {"mnist": 5.0, "cifar10": 10.0}  # minutes of training that each rival has
TARGETS = {  # (data, recipe's run): bits/dim that it is to reach, and within how many minutes of one H200
    ("mnist", "mnist"): (0.644, 20),
    ("mnist", "mnist-best"): (0.60, 120),
    ("cifar10", "cifar10"): (3.40, 60),
    ("cifar10", "cifar10-best"): (3.20, 120),
}
INTRODUCTION = f"""\
Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.2, on machines of 2020; ours on those named below. Bits/dim is
the paper's: the mean over values 2 … L given the first, exactly, over all 10,000 test images. Images/s are those of the
best batch. The honest rival in generation is softmax *with* a cache. "≈" is extrapolated from steps measured at several
places; "{NOTHING}" is what it says."""
Lines = dict[tuple[str, str, str], list[dict[str, Any]]]  # (data, device, method): one image, and the best batch


def images(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, to be recorded before the page is written.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Where measurements are kept.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page. Default: docs/results.md of the checkout.")] = None,
    pictures: Annotated[bool, typer.Option(help="Paint with the models that ship; else as they were.")] = True,
) -> None:
    """The paper's image tables beside ours, curves and pictures, as docs/results.md."""
    results = results or results_folder()
    root = checkout()
    if out is None and root is None:
        raise typer.BadParameter("this is no checkout: say where the page goes, --out results.md")
    out = out or Path(root or ".", "docs", "results.md")
    if runs:
        print(f"recorded: {record(runs, results)}")
    trained, measured = recorded(results), generated(results)
    folder = out.parent / "pictures"
    shown = [*draw_curves(trained, folder), *(paint(folder) if pictures else sorted_pictures(folder))]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page(trained, measured, shown).encode())
    print(f"written: {out}")


def generated(results: Path) -> Lines:
    """The newest lines of the generation benchmark."""
    made: Lines = {}
    for data in measurements(results, "generation"):
        fresh: Lines = {}
        for line in data["lines"]:
            key = (line["preset"], line["device"], line["method"])
            fresh.setdefault(key, []).append(line | {"where": where(data["environment"], line["device"])})
        made |= fresh
    return made


def where(environment: dict[str, Any], device: str) -> str:
    """The machine of a measurement, its torch, and the day."""
    machine = environment.get("machine", {})
    name = machine.get("gpu") if device == "cuda" else f"{machine.get('cpu')}, {machine.get('threads')} threads"
    return f"{name}, torch {environment.get('versions', {}).get('torch')}, {environment['date'][:10]}"


def page(trained: Sequence[ImageRun], measured: Lines, shown: Sequence[tuple[str, Path]]) -> str:
    """The whole document."""
    parts = [
        "# Image generation: the paper's tables, and ours",
        "<!-- Written by `linattn report images` from benchmarks/results; what is changed here is lost. -->",
        INTRODUCTION,
    ]
    for data, title in TITLES.items():
        parts += [f"## {title}", quality_table(data, trained, measured), latency_table(data, measured)]
        parts += [long_table(data, trained)]
    parts += [f"## {heading}\n\n![{heading}](pictures/{path.name})" for heading, path in shown]
    parts += ["## Where the figures come from", sources(trained, measured)]
    return "\n\n".join(parts) + "\n"


def quality_table(data: str, trained: Sequence[ImageRun], measured: Lines) -> str:
    minutes = EQUAL[data]
    head = ["method", "bits/dim: paper", f"ours, {minutes:g} minutes each", "images/s: paper", "ours, GPU", "ours, CPU"]
    rows = []
    for method, published in BITS[data].items():
        mine = equal_run(data, method, trained)
        speeds = [best_of(measured.get((data, device, method), [])) for device in ("cuda", "cpu")]
        bits = NOTHING if mine is None or mine.bits is None else digits_of(mine.bits)
        rows.append([method, digits_of(published), bits, f"{PAPER[data][method].images_per_second:g}", *speeds])
    return table(head, rows)


def equal_run(data: str, method: str, trained: Sequence[ImageRun]) -> ImageRun | None:
    """The run of this method within the minutes that all have. With and without a cache is one model."""
    name = method.removesuffix(", cached")
    found = [run for run in trained if (run.data, run.method, run.name) == (data, name, data)]
    return next((run for run in reversed(found) if run.minutes == EQUAL[data]), None)


def best_of(lines: Sequence[dict[str, Any]]) -> str:
    if not lines:
        return NOTHING
    line = max(lines, key=lambda line: line["images_per_second"])
    return f"{'≈ ' if line['extrapolated'] else ''}{plain(line['images_per_second'])}"


def latency_table(data: str, measured: Lines) -> str:
    head = ["one image, batch 1", "CPU: paper", "CPU: ours", "GPU: paper", "GPU: ours"]
    rows = []
    for method in BITS[data]:
        published = PAPER[data][method]
        mine = [one_of(measured.get((data, device, method), [])) for device in ("cpu", "cuda")]
        rows.append([method, f"{published.cpu_seconds:g} s", mine[0], f"{published.gpu_seconds:g} s", mine[1]])
    return table(head, rows)


def one_of(lines: Sequence[dict[str, Any]]) -> str:
    ones = [line for line in lines if line["batch"] == 1]
    return f"{'≈ ' if ones[0]['extrapolated'] else ''}{seconds_in_words(ones[0]['seconds'])}" if ones else NOTHING


def long_table(data: str, trained: Sequence[ImageRun]) -> str:
    """The longer runs of the linear model, and what they were to reach."""
    head = ["long run, linear", "minutes", "epochs", "tokens/s", "bits/dim, 2 … L", "all L", "aim", ""]
    rows = []
    for (of, name), (aim, within) in TARGETS.items():
        if of != data:
            continue
        goal = f"≤ {digits_of(aim)} within {within} minutes"
        found = [run for run in trained if (run.data, run.name, run.method) == (data, name, "linear")]
        found = [run for run in found if run.minutes is None or run.minutes > EQUAL[data]]
        rows += [long_row(run, goal, aim, within) for run in found] or [[name, *[NOTHING] * 5, goal, ""]]
    return table(head, rows)


def long_row(run: ImageRun, goal: str, aim: float, within: int | float) -> list[str]:
    figures = [NOTHING, NOTHING] if run.test is None else [f"{run.test['bits']:.4f}", f"{run.test['bits_all']:.4f}"]
    met = run.bits is not None and run.bits <= aim and run.seconds <= 60 * within * 1.02
    verdict = "" if run.bits is None else "reached" if met else "missed"
    trained = [clock(run.seconds), f"{run.epochs:.1f}", short_count(run.tokens_per_second)]
    return [run.name, *trained, *figures, goal, verdict]


def sources(trained: Sequence[ImageRun], measured: Lines) -> str:
    """Machines and commands."""
    commands = ("`linattn bench generate`", "`python -m benchmarks.image_runs`", "`linattn eval`")
    lines = ["Generation: {}; training: {}; test sets: {}.".format(*commands)]
    for data in TITLES:
        places = sorted({line["where"] for key, some in measured.items() if key[0] == data for line in some})
        lines += [f"Generation, {TITLES[data]}: {place}." for place in places]
    machines = sorted({run.machine for run in trained})
    lines.append(f"Trainings recorded: {len(trained)}" + (f", on {', '.join(machines)}." if machines else "."))
    return "\n".join(f"- {line}" for line in lines)


def sorted_pictures(folder: Path) -> list[tuple[str, Path]]:
    return [(path.stem.replace("-", ", "), path) for path in sorted(folder.glob("*.png")) if "curve" not in path.stem]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digits_of(bits: float) -> str:
    """As the paper writes them."""
    return f"{bits:.2f}" if bits >= 1 else f"{bits:.3f}"


def plain(x: int | float) -> str:
    """Three digits, never an exponent."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" if x >= 1e-4 else f"{x:.7f}".rstrip("0")
