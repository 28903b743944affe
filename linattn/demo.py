"""`python -m linattn.demo`: what linear attention does, in less than a minute on a CPU, without a download.

1. The models that ship with the package paint: a sheet each, a GIF of the painting, three completions of a test digit.
2. What an image costs in the paper's MNIST architecture: linear, softmax with a cache, softmax without one.
3. The operator: its two faces agree, a whole sequence in parallel and token by token; and what it costs beside softmax
   attention (torch's own) as the sequence grows, in time, and in memory kept for one more token.

Pictures go to out/, and the last part as a plot too.

Axes:  B = 1   N tokens   H heads   D width of queries, keys and values
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import scaled_dot_product_attention

from linattn import ImageModel, State, linear_attention, load
from linattn.bench import generation
from linattn.bench.machine import environment
from linattn.bench.measure import Cell, Effort, Run, race
from linattn.bench.report import counted, heading, seconds_in_words, shown_bytes, shown_time
from linattn.cli.show import preview
from linattn.generate import generate
from linattn.models import shipped
from linattn.ops import Step
from linattn.state import write_atomically
from linattn.train.data import load as load_data
from linattn.train.painting import gif, painted
from linattn.train.sheets import write_sheet

HEADS, WIDTH = 8, 64
LENGTHS = (256, 1024, 4096, 8192)
PICTURES = {"digits": 64, "mnist": 64, "cifar10": 8}  # images on the sheet of each model that may ship
SEED, DIGIT, COMPLETIONS = 1, 3, 3
TABLE = generation.Settings(
    presets=("mnist",),
    methods=("linear", "softmax, cached", "softmax"),
    places=3,
    batches=(),
    effort=Effort(budget=0.1, least=2, once=0.1),
    whole=5.0,
)
LINEAR, SOFTMAX = "#0b7285", "#d9480f"
INK, PALE, GRID = "#343a40", "#868e96", "#e9ecef"

LABEL, LABEL_ROOM = 28, 200  # points: the height of a label, and that of a panel


@dataclass(frozen=True)
class Point:
    """What N tokens cost: all of them at once, one more, and the bytes that are kept for that one."""

    tokens: int
    linear: Cell
    softmax: Cell
    next_linear: Cell
    next_softmax: Cell
    state_bytes: int
    cache_bytes: int


def main(out: Annotated[Path, typer.Option(help="The folder for the pictures.")] = Path("out")):
    """Paint with the models that ship; measure an image beside softmax; show the operator, with a plot."""
    about = environment()
    out.mkdir(parents=True, exist_ok=True)
    print(f"{heading(about)}\n")
    paint(out)
    show_images()
    show_agreement(tokens=1024)
    points = show_costs(LENGTHS)
    show_plot(points, out / "demo.png", about)


def paint(out: Path) -> None:
    """A sheet of each model that ships, and completions of a digit."""
    names = [name for name in PICTURES if name in shipped()]
    if not names:
        print("no image models ship with this version: `linattn train digits` makes one in two minutes\n")
    for name in names:
        paint_sheet(name, out)
    if "digits" in names:
        complete_digit(out)


def paint_sheet(name: str, out: Path) -> None:
    model = load(name)
    assert isinstance(model, ImageModel)
    begin = time.perf_counter()
    images = model.to_images(generate(model, count=PICTURES[name], seed=SEED).tensor)
    took = time.perf_counter() - begin
    print(f"{name}: {len(images)} images of {model.config.length:,} bytes in {seconds_in_words(took)}")
    preview(images)
    path = write_sheet(out / f"{name}.png", images)
    write_atomically(out / f"{name}.gif", gif(images))
    print(f"{path}, and on its way: {path.with_suffix('.gif')}\n")


def complete_digit(out: Path) -> None:
    """The upper half of a test image, what may follow, and what did."""
    model = load("digits")
    assert isinstance(model, ImageModel)
    whole = load_data("digits", split="test").data[DIGIT : DIGIT + 1]
    given = model.config.length // 2
    made = generate(model, model.sequences(whole)[:, :given], count=COMPLETIONS, seed=SEED)
    images = torch.cat([painted(whole, given), model.to_images(made.tensor), whole])
    print(f"the upper half of a test image, {COMPLETIONS} completions, and the image itself")
    preview(images)
    print(f"{write_sheet(out / 'completed.png', images, columns=len(images))}\n")


def show_images(settings: generation.Settings = TABLE) -> list[generation.Line]:
    """What one image costs, by three ways of attention in one architecture."""
    print("one image of the paper's MNIST model (8 layers, 784 bytes), by attention; ≈ is extrapolated\n")
    print(f"{'':18}{'one image':>12}{'images/s':>12}{'slower':>10}{'kept':>12}")
    lines: list[generation.Line] = []
    for line, _ in generation.measure(settings, "cpu"):
        lines.append(line)
        about = "≈ " if line.extrapolated else ""
        print(
            f"{line.method:18}{about + seconds_in_words(line.seconds):>12}{about + f'{line.images_per_second:.3g}':>12}"
            f"{f'{line.seconds / lines[0].seconds:.3g}×':>10}{bytes_in_words(line.state_bytes):>12}",
            flush=True,
        )
    print()
    return lines


def show_agreement(tokens: int) -> float:
    """Prints, and returns, the largest difference between the parallel and the recurrent form."""
    q, k, v = random_operands(tokens)
    parallel = linear_attention(q, k, v)
    assert isinstance(parallel, torch.Tensor)
    step = Step(State.empty(1, HEADS, WIDTH, WIDTH))
    recurrent = torch.cat([step(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1]) for t in range(tokens)], 1)
    difference = (parallel - recurrent).abs().max().item()
    print(
        f"{tokens:,} tokens, in parallel and one after the other: the outputs differ by at most {difference:.1e}\n"
        f"(the largest is {parallel.abs().max():.1f}, and float32 resolves {torch.finfo(torch.float32).eps:.1e} at 1)\n"
    )
    return difference


def show_costs(lengths: Sequence[int], effort: Effort | None = None) -> list[Point]:
    """The table, a line for each length as it is measured."""
    print(f"B = 1, H = {HEADS}, D = {WIDTH}, float32, causal; MB of a whole sequence: the peak above its inputs\n")
    print(f"{'':8}{'a whole sequence':^54}{'one more token':^26}{'kept for it':^22}")
    print(
        f"{'N':>8}{'linear':>11}{'softmax':>11}{'faster':>9}{'linear MB':>11}{'softmax MB':>12}"
        f"{'linear':>13}{'softmax':>11}{'state MB':>12}{'cache MB':>10}"
    )
    points = []
    for tokens in lengths:
        points.append(point := measure(tokens, effort or Effort(budget=0.15, least=2)))
        print(
            f"{point.tokens:>8,}{shown_time(point.linear):>11}{shown_time(point.softmax):>11}"
            f"{f'{point.softmax.seconds / point.linear.seconds:.2g}×':>9}"
            f"{shown_bytes(point.linear):>11}{shown_bytes(point.softmax):>12}"
            f"{shown_time(point.next_linear):>13}{shown_time(point.next_softmax):>11}"
            f"{point.state_bytes / 1e6:>12.2f}{point.cache_bytes / 1e6:>10.2f}",
            flush=True,
        )
    return points


@torch.no_grad()
def measure(tokens: int, effort: Effort) -> Point:
    """Both rivals on the same numbers, each in its own layout, in one race."""
    q, k, v = random_operands(tokens)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    _, state = linear_attention(q, k, v, return_state=True)
    step = Step(state)
    now = [x[:, -1:] for x in (q, k, v)]
    q_past, k_past, v_past = heads_first
    q_now = q_past[:, :, -1:]
    runs: dict[str, Run] = {
        "linear": lambda: linear_attention(q, k, v),
        "softmax": lambda: scaled_dot_product_attention(q_past, k_past, v_past, is_causal=True),
        "next_linear": lambda: step(*now),
        "next_softmax": lambda: scaled_dot_product_attention(q_now, k_past, v_past),  # adding to the cache is free
    }
    cache_bytes = sum(x.numel() * x.element_size() for x in (k_past, v_past))
    return Point(tokens, **race(runs, effort), state_bytes=step.nbytes, cache_bytes=cache_bytes)


def random_operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of shape (1, N, H, D)."""
    q, k, v = torch.randn(3, 1, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(tokens))
    return q, k, v


def show_plot(points: list[Point], path: Path, about: dict[str, Any]) -> None:
    """Writes the PNG, or says what it lacks."""
    try:
        figure = draw(points, about)
    except ImportError:
        print("\nno plot: matplotlib is not installed (pip install 'linattn[plots]')")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    print(f"\nplotted: {path}")


def draw(points: list[Point], about: dict[str, Any]):
    """Three panels over N, log-log: time of a whole sequence, time of one more token, memory kept for it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), facecolor="white")
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.06, right=0.965, bottom=0.13, top=0.74, wspace=0.3)
    n = [point.tokens for point in points]
    curves = {
        "A whole sequence": ([(p.linear.seconds, p.softmax.seconds) for p in points], seconds_in_words),
        "One more token": ([(p.next_linear.seconds, p.next_softmax.seconds) for p in points], seconds_in_words),
        "Memory kept for it": ([(p.state_bytes, p.cache_bytes) for p in points], bytes_in_words),
    }
    for axes, (title, (pairs, words)) in zip(panels, curves.items(), strict=True):
        draw_panel(axes, n, [linear for linear, _ in pairs], [softmax for _, softmax in pairs], words)
        axes.set_title(title, loc="left", fontsize=12, color=INK, pad=10)
    machine, versions = about["machine"], about["versions"]
    shape = f"B = 1, H = {HEADS}, D = {WIDTH}, float32, causal"
    where = f"{machine['cpu']}, {counted(machine['threads'], 'thread')}, torch {versions['torch']}"
    figure.text(0.06, 0.92, "Linear attention beside softmax attention", fontsize=15, color=INK, weight="bold")
    figure.text(0.06, 0.86, f"{shape}. {where}, linattn {versions['linattn']}.", fontsize=9, color=PALE)
    return figure


def draw_panel(axes, n: list[int], linear: list, softmax: list, words: Callable[..., str]) -> None:
    """Two curves, each with its name and its last value at its end."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(n[0] / 1.2, n[-1] * 3.2)
    low, high = min(*linear, *softmax) / 2, max(*linear, *softmax) * 2
    axes.set_ylim(low, high)
    apart = LABEL_ROOM * math.log(softmax[-1] / linear[-1]) / math.log(high / low)
    nudge = math.copysign(max(0.0, LABEL - abs(apart)) / 2, apart)  # labels must not lie on each other
    for values, colour, name, shift in ((linear, LINEAR, "linear", -nudge), (softmax, SOFTMAX, "softmax", nudge)):
        axes.plot(n, values, color=colour, linewidth=2.2, marker="o", markersize=4)
        axes.annotate(
            f"{name}\n{words(values[-1])}",
            (n[-1], values[-1]),
            xytext=(8, shift),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=9.5,
        )
    axes.set_xticks(n[::2], [f"{tokens:,}" for tokens in n[::2]])
    axes.set_xlabel("N tokens", color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: words(value).replace(".00", "").replace(".0", ""))
    axes.grid(True, which="major", color=GRID)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9, length=0)


def bytes_in_words(size: int | float) -> str:
    """Three digits and a unit: 4.00 kB, 67.1 MB."""
    for unit, unit_size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= unit_size:
            return f"{size / unit_size:.3g} {unit}"
    return f"{size:.3g} B"


if __name__ == "__main__":
    typer.run(main)
