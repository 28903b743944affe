"""The generation benchmark in print: a table for each preset, with the paper's numbers beside ours.

The paper's are those of its tables: images a second at the best batch of its GPU, and seconds of one image on its CPU
or GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from linattn.bench.generation import Line
from linattn.bench.report import seconds_in_words


@dataclass(frozen=True)
class Published:
    """What the paper measured (Katharopoulos et al. 2020, arXiv 2006.16236), on machines of 2020."""

    cpu_seconds: float
    gpu_seconds: float
    images_per_second: float


PAPER = {
    "mnist": {
        "linear": Published(5.5, 7.3, 142.8),
        "softmax, cached": Published(7.4, 10.4, 7.56),
        "softmax": Published(72.6, 10.2, 0.45),
        "LSH-1": Published(46.0, 19.2, 0.68),
        "LSH-4": Published(112.0, 55.8, 0.27),
    },
    "cifar10": {
        "linear": Published(45.1, 61.3, 17.85),
        "softmax, cached": Published(71.9, 70.4, 0.32),
        "softmax": Published(8651.0, 300.0, 0.004),
        "LSH-1": Published(2319.0, 222.0, 0.015),
        "LSH-4": Published(5264.0, 684.0, 0.005),
    },
}
WIDTHS = (16, 12, 12, 8, 12, 12, 12, 12)


def head(line: Line) -> str:
    """What stands above the lines of one preset and device."""
    dtype = "bfloat16" if line.device == "cuda" else "float32"
    title = f"{line.preset}: {line.depth} layers, {line.length:,} values an image ({line.device}, {dtype})"
    above = f"{'':{WIDTHS[0]}}{'one image':>{WIDTHS[1]}}{'its state':>{WIDTHS[2]}}{'best batch':>{sum(WIDTHS[3:6])}}"
    above += f"{'the paper':>{sum(WIDTHS[6:])}}"
    names = ("", "seconds", "MB", "batch", "images/s", "× slower", "seconds", "images/s")
    return f"{title}\n{above}\n{_columns(names)}"


def table_line(one: Line, best: Line, linear: Line | None) -> str:
    """One method: an image alone, the best batch, and how many times slower than linear attention it is."""
    slower = "-" if linear is None else _number(linear.images_per_second / best.images_per_second)
    published = PAPER.get(one.preset, {}).get(one.method)
    seconds = (
        "-" if published is None else _number(published.gpu_seconds if one.device == "cuda" else published.cpu_seconds)
    )
    images = "-" if published is None else _number(published.images_per_second)
    share = "" if best.floor is None else f"   {best.floor * best.images_per_second:.0%} of its floor"
    columns = _columns(
        (
            one.method,
            _about(one) + seconds_in_words(one.seconds),
            f"{one.state_bytes / 1e6:,.2f}",
            str(best.batch),
            _about(best) + _number(best.images_per_second),
            slower,
            seconds,
            images,
        )
    )
    return columns + share


NOTE = (
    "≈ is extrapolated: steps are measured at several places, and integrated.\n"
    "The paper's machines are those of 2020: seconds of one image on a CPU (on a GPU where ours is one), "
    "and images/s at the best batch of a GPU."
)


def _about(line: Line) -> str:
    return "≈ " if line.extrapolated else ""


def _number(x: float) -> str:
    """Three digits, without an exponent: 1,234, 17.9, 0.000134."""
    digits = max(0, 2 - math.floor(math.log10(x)))
    text = f"{x:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _columns(cells: Iterable[str]) -> str:
    first, *rest = (f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))
    return first.strip().ljust(WIDTHS[0]) + "".join(rest)
