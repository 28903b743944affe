"""Text as a sequence of bytes, or of the ids of any vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from linattn.features.base import check_count
from linattn.models.base import SequenceModel
from linattn.nn.heads import TokenHead
from linattn.nn.layer import Layer
from linattn.nn.positions import make_position
from linattn.nn.transformer import Stack


@dataclass(frozen=True)
class LanguageConfig:
    """A language model. vocabulary=256 reads bytes. `tied`: the head's weight is that of the embedding."""

    layer: Layer
    depth: int
    vocabulary: int = 256
    tied: bool = True
    position: str = "sine_add"
    position_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layer.causal:
            raise ValueError("a language model generates: its layer must be causal")
        check_count("depth", self.depth)
        if self.vocabulary < 2:
            raise ValueError(f"vocabulary must be at least 2, got {self.vocabulary}")


class LanguageModel(SequenceModel):
    """An autoregressive model of tokens."""

    config: LanguageConfig

    def __init__(self, config: LanguageConfig, *, generator: torch.Generator | None = None):
        width = config.layer.width
        position = make_position(config.position, width, **config.position_options)
        embedding = nn.Embedding(config.vocabulary, position.value_width)
        if config.tied and position.value_width != width:
            raise ValueError(
                f"tied=True needs embeddings as wide as the model, {width}, and position {config.position!r} leaves "
                f"them {position.value_width}: use tied=False, or position='sine_add'"
            )
        if config.tied:
            nn.init.normal_(embedding.weight, std=position.value_width**-0.5)  # as a head its rows must not be long
        head = TokenHead(width, config.vocabulary, embedding=embedding if config.tied else None)
        super().__init__(config, embedding, position, Stack(config.layer, config.depth, generator=generator), head)
