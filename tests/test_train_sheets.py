"""Sheets of samples: every pixel where it belongs."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.train.sheets import GREY, enlarged, png, sheet, write_sheet


def draw(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels", [1, 3])
def test_every_pixel_is_where_it_belongs(channels):
    images = draw(5, 3, 4, channels)
    made = sheet(images, columns=2, scale=6, smooth=False)
    gap = 3
    assert made.shape == (3 * (18 + gap) + gap, 2 * (24 + gap) + gap, channels)
    mine = torch.zeros(made.shape[:2], dtype=torch.bool)
    for i, image in enumerate(images):
        top, left = gap + (i // 2) * (18 + gap), gap + (i % 2) * (24 + gap)
        mine[top : top + 18, left : left + 24] = True
        for y in range(3):
            for x in range(4):
                block = made[top + 6 * y : top + 6 * y + 6, left + 6 * x : left + 6 * x + 6]
                assert (block == image[y, x]).all()
    assert (made[~mine] == GREY).all()  # gaps, and the place of the sixth image


def test_small_images_are_blended_and_others_are_not():
    for size, smooth in ((8, True), (16, True), (28, False)):
        images = draw(2, size, size, 1)
        assert sheet(images, scale=4).equal(sheet(images, scale=4, smooth=smooth))
        assert not sheet(images, scale=4).equal(sheet(images, scale=4, smooth=not smooth))


def test_blending_keeps_what_it_shows():
    """Against pillow's cubic interpolation, away from the edges; and a plain image stays plain."""
    images = draw(1, 8, 8, 1)
    ours = enlarged(images, 4, smooth=True)[0, :, :, 0].numpy().astype(int)
    plain = enlarged(torch.full((1, 8, 8, 3), 77, dtype=torch.uint8), 4, smooth=True)
    assert (plain == 77).all()
    pillow = np.asarray(Image.fromarray(images[0, :, :, 0].numpy()).resize((32, 32), Image.Resampling.BICUBIC)).astype(
        int
    )
    inner = (slice(8, 24), slice(8, 24))
    # pillow's cubic has another parameter (-0.5, torch -0.75): near, and far nearer than the squares are
    error = np.abs(ours - pillow)[inner].mean()
    squares = np.abs(enlarged(images, 4, smooth=False)[0, :, :, 0].numpy().astype(int) - pillow)[inner].mean()
    assert error < 0.25 * squares


def test_sheets_are_nearly_square_and_large_enough():
    for count, size in ((64, 8), (100, 28), (7, 32), (1, 3)):
        height, width, _ = sheet(draw(count, size, size, 1)).shape
        assert 360 <= max(height, width) <= 1000 and 0.6 <= height / width <= 1.1


@pytest.mark.parametrize("channels", [1, 3])
def test_png_files_decode(tmp_path, channels):
    image = draw(10, 20, channels)
    decoded = np.asarray(Image.open(io.BytesIO(png(image)))).reshape(10, 20, channels)
    assert (decoded == image.numpy()).all()
    path = write_sheet(tmp_path / "samples" / "step-1", draw(4, 8, 8, channels))
    assert path.name == "step-1.png" and path.read_bytes()[25] == {1: 0, 3: 2}[channels]  # IHDR: grey or RGB


def test_texts_are_written_one_below_the_other(tmp_path):
    path = write_sheet(tmp_path / "step-1", ["to be", "or not"])
    assert path.name == "step-1.txt"
    first, *_, last = path.read_text(encoding="utf-8").splitlines()
    assert (first, last) == ("to be", "or not")


@pytest.mark.parametrize("images", [draw(2, 8, 8), draw(2, 8, 8, 2), draw(0, 8, 8, 1), draw(2, 8, 8, 1).float()])
def test_what_is_no_image(images, unchecked):
    with pytest.raises(ValueError, match="a sheet is made of uint8 images"):
        sheet(images)
