"""The plots of the study's page. Small PNGs, readable in grey, no colour without a shape or a label."""

from __future__ import annotations

import io
import statistics
from pathlib import Path

import matplotlib as mpl
from PIL import Image

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from linattn.study import conclude
from linattn.study.arms import LINEAR, REFORMER, SOFTMAX, label
from linattn.study.conclude import TASKS, entries, ranked
from linattn.study.jobs import Study

BLUE, ORANGE, GREEN, GREY, PURPLE, RED = "#1f5fa8", "#d9742b", "#3a8f5c", "#555555", "#8e5aa8", "#b0413e"
COLOURS = {LINEAR: BLUE, SOFTMAX: ORANGE, REFORMER: GREEN}
FAMILIES = {
    GREEN: ("quadratic", "quadratic_symmetric", "polynomial", "taylor"),
    PURPLE: ("hedgehog", "t2r", "learned_elu"),
    RED: ("favor", "fourier"),
}
MARKERS = ("v", "o", "s", "D")
DPI = 110


def draw_all(study: Study, folder: Path) -> dict[str, Path]:
    """Every plot that there is something for."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Figure | None] = {"recall": recall(study)}
    made |= {f"task-{task}": task_plot(study, task) for task in TASKS}
    made |= {"copy": copy(study), "short": short(study), "lengths": lengths(study), "scaling": scaling(study)}
    paths = {}
    for name, figure in made.items():
        if figure is not None:
            paths[name] = folder / f"{name}.png"
            save(figure, paths[name])
    return paths


def save(figure: Figure, path: Path) -> None:
    """A PNG of few colours: a third of the bytes, and nothing that one would see."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(256).save(path, optimize=True)


def bare(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    return axes


def recall(study: Study) -> Figure | None:
    """Accuracy over bytes of state: every map at every head width, softmax attention's cache as the ceiling."""
    found = [entry for entry in entries(study, "recall", "screen") if entry.state_bytes]
    if not found:
        return None
    final = {(entry.arm, entry.head_width): entry for entry in entries(study, "recall", "final")}
    widths = sorted({entry.head_width for entry in found})
    figure, axes = plt.subplots(figsize=(8.6, 4.8), layout="constrained")
    bare(axes)
    ends = []
    for arm in dict.fromkeys(entry.arm for entry in found):
        mine = sorted((entry for entry in found if entry.arm == arm), key=lambda entry: entry.head_width)
        best = [final.get((entry.arm, entry.head_width), entry).score for entry in mine]
        sizes, colour = [entry.state_bytes or 1 for entry in mine], family(arm)
        axes.plot(sizes, [score.mean for score in best], "-", color=colour, linewidth=1, alpha=0.5)
        for entry, x, score in zip(mine, sizes, best, strict=True):
            fill, marker = "full" if score.known else "none", MARKERS[widths.index(entry.head_width) % len(MARKERS)]
            axes.plot(x, score.mean, marker, color=colour, markersize=5, fillstyle=fill)
            if score.ends is not None:
                axes.plot([x, x], score.ends, color=colour, linewidth=1.2)
        ends.append((best[-1].mean, sizes[-1], arm))
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.08)
    name_ends(axes, ends)
    for width, marker in zip(widths, MARKERS, strict=False):
        axes.plot([], [], marker, color=GREY, markersize=5, fillstyle="none", label=f"heads of {width}")
    axes.legend(fontsize=7, frameon=False, loc="lower center", ncols=len(widths))
    axes.set_xlabel("bytes of state (softmax attention: keys and values of the sequence)")
    axes.set_ylabel("accuracy")
    axes.set_title("Recall over memory: filled, mean and interval of three seeds; hollow, one seed", fontsize=10)
    return figure


def family(arm: str) -> str:
    """A colour for maps of a kind."""
    return COLOURS.get(arm) or next((colour for colour, arms in FAMILIES.items() if arm in arms), GREY)


def name_ends(axes: Axes, ends: list[tuple[float, int, str]]) -> None:
    """Names in a column on the right, in the order of the points, a thin line from each to its point."""
    step = 1.02 / max(len(ends), 1)
    right = axes.get_xlim()[1] * 1.15
    heights: list[float] = []
    for y, _, _ in sorted(ends, reverse=True):  # from above, none closer than a step to the one before
        heights.append(min(y, heights[-1] - step) if heights else min(y, 1.0))
    lift = max(0.0, 0.0 - heights[-1])
    for height, (y, x, arm) in zip(heights, sorted(ends, reverse=True), strict=True):
        axes.annotate(
            label(arm),
            (x, y),
            (right, height + lift),
            fontsize=7,
            color=family(arm),
            va="center",
            arrowprops={"arrowstyle": "-", "color": "#cccccc", "linewidth": 0.5, "shrinkB": 3},
        ).set_in_layout(False)
    axes.set_xlim(right=right * 2.2)


def task_plot(study: Study, task: str) -> Figure | None:
    """Every arm's score: one seed hollow, the finals with their intervals."""
    width = next(iter(entry.head_width for entry in entries(study, task, "screen")), None)
    screen = [e for e in ranked(entries(study, task, "screen"), task) if e.head_width == width]
    if not screen:
        return None
    final = {entry.arm: entry for entry in entries(study, task, "final") if entry.head_width == width}
    sign = -1 if TASKS[task].higher else 1  # finals above, the best of them on top
    screen.sort(key=lambda e: (e.arm in final, -sign * final.get(e.arm, e).score.mean))
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.23 * len(screen)), layout="constrained")
    bare(axes)
    edge = far_off([entry.score.mean for entry in screen], TASKS[task].higher)
    for y, entry in enumerate(screen):
        colour, mean = family(entry.arm), entry.score.mean
        if edge is not None and (mean - edge) * (-1 if TASKS[task].higher else 1) > 0:
            axes.annotate(f"{mean:.2f} →", (edge, y), fontsize=7, ha="right", va="center", color=colour)
            continue
        axes.plot(mean, y, "o", color=colour, fillstyle="none", markersize=5)
        if entry.arm in final:
            score = final[entry.arm].score
            axes.plot(score.mean, y, "o", color=colour, markersize=5)
            if score.ends is not None:
                axes.plot(score.ends, [y, y], color=colour, linewidth=2, alpha=0.6)
    axes.set_ylim(-0.7, len(screen) - 0.3)
    if edge is not None:
        axes.set_xlim(right=edge)
    axes.set_yticks(range(len(screen)), [label(entry.arm) for entry in screen], fontsize=8)
    axes.set_xlabel(f"{TASKS[task].unit} ({'higher' if TASKS[task].higher else 'lower'} is better)")
    axes.set_title(
        f"{TASKS[task].title}, heads of {width}: hollow, one seed (dev); filled, three seeds (test)", fontsize=10
    )
    return figure


def far_off(scores: list[float], higher: bool) -> float | None:
    """Beyond which a score is named and not drawn, so that one bad map does not press the others together."""
    if higher or len(scores) < 4:
        return None
    middle, best = statistics.median(scores), min(scores)
    near = [score for score in scores if score <= middle + 4 * (middle - best)]
    return None if len(near) == len(scores) else max(near) + 0.12 * (max(near) - best)


def copy(study: Study) -> Figure | None:
    """Loss over updates at each length."""
    results = [result for result in study.of("copy") if "curve" in result["found"]]
    if not results:
        return None
    lengths = sorted({result["settings"]["length"] for result in results})
    figure, grid = plt.subplots(
        1, len(lengths), figsize=(min(10, 4 * len(lengths)), 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, length in zip(grid[0], lengths, strict=True):
        bare(axes)
        named = set()
        for result in results:
            arm = result["settings"]["arm"]
            if result["settings"]["length"] == length:
                steps, bits = zip(*result["found"]["curve"], strict=True)
                name = None if arm in named else "linear (elu)" if arm == LINEAR else label(arm)
                axes.plot(steps, bits, color=COLOURS[arm], linewidth=1.2, alpha=0.8, label=name)
                named.add(arm)
        axes.set_title(f"length {length}", fontsize=10)
        axes.set_xlabel("updates")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    grid[0][0].set_ylabel("bits a symbol, training")
    return figure


def short(study: Study) -> Figure | None:
    """Ratios of time by length: a panel for the operator and one for a layer."""
    races = conclude.races(study)
    if not races:
        return None
    figure, grid = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    styles = {"forward": "-", "training": "--"}
    ways = list(dict.fromkeys((race.device, race.form, race.load) for race in races))
    shades = [BLUE, ORANGE, GREEN, GREY, PURPLE, RED, "#2b8c9e", "#a88b2b"]
    for axes, level in zip(grid, ("operator", "layer"), strict=True):
        bare(axes)
        for race in races:
            if race.level == level:
                way = (race.device, race.form, race.load)
                name = f"{', '.join(way[:2])}, {'B = 1' if race.load == 'one' else 'full batch'}, {race.mode}"
                colour = shades[ways.index(way) % len(shades)]
                axes.plot(
                    race.tokens, race.ratios, styles[race.mode], color=colour, marker="o", markersize=3, label=name
                )
        axes.axhline(1, color="#333333", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title("the operator alone" if level == "operator" else "a whole layer", fontsize=10)
        axes.set_xlabel("tokens")
        plain(axes)
    grid[0].set_ylabel("time, linear / softmax (below 1: linear is faster)")
    grid[0].legend(fontsize=6.5, frameon=False)
    return figure


def plain(axes: Axes) -> None:
    """Numbers as people write them on a logarithmic ratio."""
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    low, high = axes.get_ylim()
    axes.set_yticks([t for t in ticks if low <= t <= high], [f"{t:g}" for t in ticks if low <= t <= high])
    axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())  # pyright: ignore[reportAttributeAccessIssue]


def lengths(study: Study) -> Figure | None:
    """Bits by place, the state carried, and the same bytes in windows."""
    found = conclude.far(study)
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    bare(axes)
    styles = {"before": "-", "none": "--", "after": ":"}
    shades = {**COLOURS}
    for one in found:
        colour = shades.setdefault(one.arm, GREEN)
        ends = one.edges[1:]
        axes.plot(
            ends, one.carried, styles[one.rotary], color=colour, marker="o", markersize=4,
            label=f"{label(one.arm)}, rotary {one.rotary}: carried",
        )  # fmt: skip
        known = [(end, bits) for end, bits in zip(ends, one.known, strict=True) if bits is not None]
        if known:
            axes.plot(*zip(*known, strict=True), styles[one.rotary], color=colour, linewidth=0.7, alpha=0.6, marker="x")
    axes.set_xscale("log", base=2)
    axes.set_xticks(found[0].edges[1:], [f"{edge:,}" for edge in found[0].edges[1:]])
    axes.set_xlabel("bytes read (the end of each range of places); crosses: the same bytes in windows")
    axes.set_ylabel("bits a byte")
    axes.legend(fontsize=7, frameon=False)
    return figure


def scaling(study: Study) -> Figure | None:
    """Seconds and megabytes of a sequence by its length, both logarithmic."""
    found = conclude.scalings(study)
    if not found:
        return None
    figure, (times, memory) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for one in found:
        name = ("linear (elu)" if one.arm == LINEAR else label(one.arm)) + f", {one.device}"
        style = {"color": COLOURS[one.arm], "marker": "o", "markersize": 3}
        style |= {"linestyle": "-" if one.device == "cpu" else "--"}
        slope = "" if one.time_exponent is None else f": N^{one.time_exponent.mean:.2f}"
        times.plot(one.tokens, one.seconds, label=name + slope, **style)
        if one.memory:
            slope = "" if one.memory_exponent is None else f": N^{one.memory_exponent.mean:.2f}"
            sizes, held = zip(*one.memory, strict=True)
            memory.plot(sizes, [x / 1e6 for x in held], label=name + slope, **style)
    for axes, words in ((times, "seconds a sequence"), (memory, "peak megabytes a sequence")):
        bare(axes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("N, tokens of a sequence")
        axes.set_title(f"{words}, forward and backward", fontsize=10)
        if axes.lines:
            axes.legend(fontsize=7, frameon=False)
    return figure
