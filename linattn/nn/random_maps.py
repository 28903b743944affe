"""Random feature maps in a recurrent layer: a state goes on with the draw it began with, whatever the layer's is now.

Axes:  B batch rows, each with a draw of its own   T time   H heads   D key width   C features
"""

from __future__ import annotations

import torch
from torch import nn

from linattn._typing import Float, Tensor
from linattn.features import FeatureMap


def draw_of(feature_map: nn.Module | None, batch: int) -> tuple[Tensor, ...]:
    """A copy of a map's random draw, its buffers, for each row of a batch. Maps without randomness have none."""
    if feature_map is None:
        return ()
    return tuple(buffer.detach().expand(batch, *buffer.shape).clone() for buffer in feature_map.buffers())


class DrawnMap(FeatureMap):
    """A map with the draws of a state in place of its own; its parameters stay its own, and are trained."""

    kind = "signed"  # each instance says what its map is

    def __init__(self, feature_map: FeatureMap, draw: tuple[Tensor, ...]):
        super().__init__()
        self.kind, self.name = feature_map.kind, feature_map.name
        self._map = (feature_map,)  # in a tuple: a view on the layer's map, not a module with it inside
        names = [name for name, _ in feature_map.named_buffers()]
        # (B, 1, …): the draw of a row serves all its tokens, by broadcasting
        self._draw = {name: x.unsqueeze(1) for name, x in zip(names, draw, strict=True)}

    def num_features(self, dim: int) -> int:
        return self._map[0].num_features(dim)

    def default_scale(self, dim: int) -> float:
        return self._map[0].default_scale(dim)

    def forward(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H C"]:
        return torch.func.functional_call(self._map[0], self._draw, (x,))
