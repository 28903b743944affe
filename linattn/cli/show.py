"""What a person sees: messages, sheets of images as PNG, and a preview of them in the terminal.

Axes:  N images   H height   W width   C channels
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from linattn._typing import Shaped, Tensor
from linattn.train.run_folder import writing
from linattn.train.sheets import sheet, write_sheet

LARGER = (4, 3, 2)  # times, what fits: half a character is a small pixel
console = Console()
errors = Console(stderr=True)


def say(message: str) -> None:
    console.print(message, highlight=False, soft_wrap=True)


def warn(message: str) -> None:
    errors.print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


def complain(message: str) -> None:
    errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def preview(images: Shaped[Tensor, "N H W C"]) -> None:
    """Draw in the terminal, two pixels a character, as many images as a page of it holds, as large as they fit.

    Nothing where the output is no terminal.
    """
    if not sys.stdout.isatty():
        return
    drawn = page(images, *shutil.get_terminal_size()).expand(-1, -1, 3)
    if drawn.shape[0] % 2:
        drawn = torch.cat([drawn, torch.zeros_like(drawn[:1])])
    for top, bottom in zip(drawn[::2].tolist(), drawn[1::2].tolist(), strict=True):
        line = Text(no_wrap=True, overflow="crop")
        for above, below in zip(top, bottom, strict=True):
            line.append("▀", style=f"{_colour(above)} on {_colour(below)}")
        console.print(line)


def page(images: Shaped[Tensor, "N H W C"], columns: int, lines: int) -> Shaped[Tensor, "height width C"]:
    """A sheet of at most `columns` pixels by twice `lines`; of one image at least, however large."""
    for scale in LARGER:
        made = sheet(images, scale=scale)
        if made.shape[0] <= 2 * lines and made.shape[1] <= columns:
            return made
    height, width = (size + 1 for size in images.shape[1:3])
    across, down = max(1, (columns - 1) // width), max(1, (2 * lines - 1) // height)
    return sheet(images[: across * down], columns=min(across, len(images)), scale=1, smooth=False)


def _colour(rgb: list[int]) -> str:
    return f"rgb({rgb[0]},{rgb[1]},{rgb[2]})"


def show_sheet(images: Shaped[Tensor, "N H W C"], path: Path, columns: int | None = None) -> None:
    """Write the sheet as a PNG, preview it, and say where it is."""
    with writing(path):
        made = write_sheet(path, images, columns=columns)
    preview(images)
    say(f"wrote {made}")
