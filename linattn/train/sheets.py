"""Sheets of samples: many images in one PNG, large enough to look at; texts one below the other.

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
FEW = 16  # pixels on a side
WANTED = 720  # pixels that the longer side of a sheet is to have, as far as whole factors allow


def write_sheet(
    path: str | os.PathLike[str], samples: Shaped[Tensor, "N H W C"] | Sequence[str], columns: int | None = None
) -> Path:
    """Images as a PNG, texts as a text file. The suffix of `path` is chosen accordingly."""
    if isinstance(samples, torch.Tensor):
        return write_png(Path(path).with_suffix(".png"), sheet(samples, columns=columns))
    rule = "\n" + "─" * 60 + "\n"
    return _write(Path(path).with_suffix(".txt"), (rule.join(samples) + "\n").encode())


def write_png(path: Path, image: Shaped[Tensor, "height width C"]) -> Path:
    """A uint8 image as a PNG file."""
    return _write(path, png(image))


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path


def sheet(
    images: Shaped[Tensor, "N H W C"],
    *,
    columns: int | None = None,
    scale: int | None = None,
    smooth: bool | None = None,
) -> Shaped[Tensor, "height width C"]:
    """uint8 images in rows, nearly square, `scale` times as large (None: as large as is easy to look at).

    Each pixel becomes a square; or with `smooth` (None: for images of few pixels, whose squares hide what they show)
    pixels blend into each other, by cubic interpolation.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise ValueError(f"a sheet is made of uint8 images (N, H, W, 1 or 3), got {images.dtype} {tuple(images.shape)}")
    num, height, width, _ = images.shape
    columns = columns or math.ceil(math.sqrt(num * height / width))
    rows = math.ceil(num / columns)
    scale = scale or max(1, WANTED // max(columns * width, rows * height))
    gap = max(1, scale // 2)
    large = enlarged(images.cpu(), scale, max(height, width) <= FEW if smooth is None else smooth)
    framed = F.pad(large, (0, 0, 0, gap, 0, gap), value=GREY)
    missing = rows * columns - num
    framed = torch.cat([framed, torch.full_like(framed[:1], GREY).expand(missing, -1, -1, -1)])
    grid = framed.unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    return F.pad(grid, (0, 0, gap, 0, gap, 0), value=GREY)


def enlarged(images: Shaped[Tensor, "N H W C"], scale: int, smooth: bool) -> Shaped[Tensor, "N height width C"]:
    if not smooth:
        return images.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    planes = images.permute(0, 3, 1, 2).float()
    large = F.interpolate(planes, scale_factor=scale, mode="bicubic", align_corners=False)
    return large.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def png(image: Shaped[Tensor, "height width C"]) -> bytes:
    """A uint8 image as the bytes of a PNG file."""
    from PIL import Image  # here, so that importing linattn does not import pillow

    pixels = image.numpy()
    made = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(made, "PNG")
    return made.getvalue()
