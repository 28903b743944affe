"""Images as sequences of bytes in raster order: row by row, pixel by pixel, channel by channel.

The defaults are the paper's: byte embeddings and sine/cosine positions side by side, post-norm blocks with ReLU,
elu + 1, a mixture of ten logistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.features.base import check_count
from linattn.models.base import SequenceModel
from linattn.nn.heads import Categorical, MixtureOfLogistics, bits_per_dim
from linattn.nn.layer import Layer
from linattn.nn.positions import make_position
from linattn.nn.transformer import Stack


@dataclass(frozen=True)
class ImageConfig:
    """An image model: `shape` is (height, width, channels); `head` "logistics" (`mixtures` of them) or "categorical";
    `position` a name of POSITIONS, "row_column_channel" among them."""

    shape: tuple[int, int, int]
    layer: Layer
    depth: int
    head: str = "logistics"
    mixtures: int = 10
    position: str = "sine_concat"
    position_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape must be (height, width, channels), all positive, got {self.shape}")
        if self.head not in ("logistics", "categorical"):
            raise ValueError(f"head must be 'logistics' or 'categorical', got {self.head!r}")
        check_count("depth", self.depth)
        if not self.layer.causal:
            raise ValueError("an image model generates: its layer must be causal")

    @property
    def length(self) -> int:
        """L, the bytes of an image."""
        height, width, channels = self.shape
        return height * width * channels


class ImageModel(SequenceModel):
    """An autoregressive model of images of one size."""

    config: ImageConfig

    def __init__(self, config: ImageConfig, *, generator: torch.Generator | None = None):
        options = dict(config.position_options)
        if config.position == "row_column_channel":
            options = dict(zip(("rows", "columns", "channels"), config.shape, strict=True)) | options
        position = make_position(config.position, config.layer.width, **options)
        width = config.layer.width
        head = MixtureOfLogistics(width, config.mixtures) if config.head == "logistics" else Categorical(width)
        stack = Stack(config.layer, config.depth, generator=generator)
        super().__init__(config, nn.Embedding(256, position.value_width), position, stack, head)

    @torch.no_grad()
    def bits_per_dim(self, images: Shaped[Tensor, "B *shape"]) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Of each image: the paper's mean over values 2 … L given the first, and the mean over all L."""
        values = self.sequences(images)
        nats, _ = self.nats(values)
        return bits_per_dim(nats), bits_per_dim(nats, first=-self.first.log_prob(values[:, 0]))

    def sequences(self, data: Shaped[Tensor, "B *shape"]) -> Int[Tensor, "B L"]:
        """Images (batch, height, width, channels) as sequences of bytes; sequences stay. One channel needs no axis.

        >>> image = ImageConfig((2, 2, 3), Layer(width=8, num_heads=1), depth=1)
        >>> ImageModel(image).sequences(torch.arange(12).reshape(1, 2, 2, 3))
        tensor([[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11]])
        """
        shape, length = self.config.shape, self.config.length
        known = [shape, (length,)] + ([shape[:2]] if shape[2] == 1 else [])
        if tuple(data.shape[1:]) not in known or data.dtype.is_floating_point or data.dtype == torch.bool:
            raise ValueError(
                f"images must be bytes (batch, height, width, channels) = (batch, {', '.join(map(str, shape))}) "
                f"or sequences (batch, {length}) of them, got {data.dtype} {tuple(data.shape)}"
            )
        return data.flatten(1).long()

    def to_images(self, values: Shaped[Tensor, "B L"]) -> Shaped[Tensor, "B height width channels"]:
        """Sequences of L bytes as uint8 images."""
        return values.to(torch.uint8).unflatten(1, self.config.shape)
