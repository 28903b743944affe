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

console = Console()
errors = Console(stderr=True)


def say(message: str) -> None:
    console.print(message, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


def grid(images: Shaped[Tensor, "N H W C"], columns: int | None = None, gap: int = 1) -> Shaped[Tensor, "Y X C"]:
    """N images as one, row by row, with a light line between them."""
    count, height, width, channels = images.shape
    columns = columns or max(1, min(count, round(count**0.5 + 0.49)))
    rows = -(-count // columns)
    sheet = torch.full((rows * (height + gap) + gap, columns * (width + gap) + gap, channels), 160, dtype=torch.uint8)
    for i, image in enumerate(images):
        y, x = gap + (i // columns) * (height + gap), gap + (i % columns) * (width + gap)
        sheet[y : y + height, x : x + width] = image.to(torch.uint8)
    return sheet


def write_png(sheet: Shaped[Tensor, "Y X C"], path: Path, *, least: int = 480) -> Path:
    """Write a sheet, enlarged without smoothing until its shorter side is about `least` pixels."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    array = sheet.expand(-1, -1, 3).contiguous().numpy()
    factor = max(1, least // min(array.shape[:2]))
    picture = Image.fromarray(array).resize(
        (array.shape[1] * factor, array.shape[0] * factor), Image.Resampling.NEAREST
    )
    picture.save(path)
    return path


def preview(sheet: Shaped[Tensor, "Y X C"]) -> None:
    """Draw a sheet in the terminal, two pixels a character; nothing where the output is no terminal."""
    if not sys.stdout.isatty():
        return
    room = shutil.get_terminal_size().columns
    rgb = sheet.expand(-1, -1, 3)[:, :room]
    if rgb.shape[0] % 2:
        rgb = torch.cat([rgb, torch.zeros_like(rgb[:1])])
    for top, bottom in zip(rgb[::2].tolist(), rgb[1::2].tolist(), strict=True):
        line = Text(no_wrap=True, overflow="crop")
        for above, below in zip(top, bottom, strict=True):
            line.append("▀", style=f"{_colour(above)} on {_colour(below)}")
        console.print(line)


def _colour(rgb: list[int]) -> str:
    return f"rgb({rgb[0]},{rgb[1]},{rgb[2]})"


def show_sheet(images: Shaped[Tensor, "N H W C"], path: Path, columns: int | None = None) -> None:
    """Write the sheet, preview it, and say where it is."""
    sheet = grid(images.cpu(), columns)
    write_png(sheet, path)
    preview(sheet)
    say(f"wrote {path}")
