"""Sheets of samples: many images in one PNG, scaled up without blur; texts one below the other.

Axes:  N images   H height   W width   C channels, 1 or 3
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from linattn._typing import Shaped, Tensor
from linattn.state import write_atomically

GREY = 96  # the grey between images: neither black nor white, which digits begin and end with
WANTED = 720  # pixels that the longer side of a sheet is to have, as far as whole factors allow


def write_sheet(path: str | os.PathLike[str], samples: Shaped[Tensor, "N H W C"] | Sequence[str]) -> Path:
    """Images as a PNG, texts as a text file. The suffix of `path` is chosen accordingly."""
    if isinstance(samples, torch.Tensor):
        path, data = Path(path).with_suffix(".png"), png(sheet(samples))
    else:
        rule = "\n" + "─" * 60 + "\n"
        path, data = Path(path).with_suffix(".txt"), (rule.join(samples) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def sheet(
    images: Shaped[Tensor, "N H W C"], *, columns: int | None = None, scale: int | None = None
) -> Shaped[Tensor, "height width C"]:
    """uint8 images in rows, nearly square, each pixel `scale` × `scale` (None: as large as is easy to look at)."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise ValueError(f"a sheet is made of uint8 images (N, H, W, 1 or 3), got {images.dtype} {tuple(images.shape)}")
    num, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(num * height / width))
    rows = math.ceil(num / columns)
    scale = scale or max(1, WANTED // max(columns * width, rows * height))
    gap = max(1, scale // 2)
    large = images.cpu().repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    framed = F.pad(large, (0, 0, 0, gap, 0, gap), value=GREY)
    missing = rows * columns - num
    framed = torch.cat([framed, torch.full_like(framed[:1], GREY).expand(missing, -1, -1, -1)])
    grid = framed.unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return F.pad(grid, (0, 0, gap, 0, gap, 0), value=GREY)


def png(image: Shaped[Tensor, "height width C"]) -> bytes:
    """A uint8 image as the bytes of a PNG file."""
    from PIL import Image  # here, so that importing linattn does not import pillow

    pixels = image.numpy()
    made = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(made, "PNG")
    return made.getvalue()
