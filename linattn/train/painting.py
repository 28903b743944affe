"""Images on their way: what is not painted yet is grey. A strip shows stages side by side, a GIF one after the other.

Axes:  N images   H height   W width   C channels
"""

from __future__ import annotations

import io

import numpy as np
import torch

from linattn._typing import Shaped, Tensor
from linattn.train.sheets import GREY, sheet

FRAMES, SECONDS, HOLD = 48, 4.0, 2.0  # of a GIF: frames, how long painting takes, how long the result stays
STAGES = 8  # of a strip


def painted(images: Shaped[Tensor, "N H W C"], values: int) -> Shaped[Tensor, "N H W C"]:
    """The images when their first `values` bytes are there."""
    made = images.clone()
    made.flatten(1)[:, values:] = GREY
    return made


def stages(images: Shaped[Tensor, "N H W C"], count: int, begin: int = 0) -> list[Tensor]:
    """The images at `count` times, evenly from when `begin` bytes are there to the end."""
    length = images[0].numel()
    places = [begin + round((length - begin) * i / (count - 1)) for i in range(count)]
    return [painted(images, place) for place in places]


def strip(images: Shaped[Tensor, "N H W C"], begin: int = 0) -> Shaped[Tensor, "height width C"]:
    """A row for each image, from its beginning to its end."""
    made = torch.stack(stages(images, STAGES, begin), 1)
    return sheet(made.flatten(0, 1), columns=STAGES)


def gif(images: Shaped[Tensor, "N H W C"], begin: int = 0) -> bytes:
    """The sheet while it is painted, again and again."""
    from PIL import Image

    arrays = [sheet(some).numpy() for some in stages(images, FRAMES, begin)]
    # Few greys, since a GIF is small where neighbours are alike: a sheet of digits has an eighth of the bytes with 32.
    frames = [Image.fromarray(a if a.shape[-1] == 3 else few_greys(a[..., 0])) for a in arrays]
    if images.shape[-1] == 3:
        # Each with a palette of its own; the default way to one takes ten times as long.
        frames = [frame.quantize(256, Image.Quantize.FASTOCTREE) for frame in frames]
    times = [round(1000 * SECONDS / FRAMES)] * (FRAMES - 1) + [round(1000 * HOLD)]
    made = io.BytesIO()
    frames[0].save(made, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)
    return made.getvalue()


def few_greys(image: np.ndarray, greys: int = 32) -> np.ndarray:
    """The nearest of so many shades, black and white among them."""
    return ((image.astype(np.float32) * (greys - 1) / 255).round() * (255 / (greys - 1))).round().astype(np.uint8)
