"""Layers: y, state = layer(x, state)."""

from linattn.nn.attention import Attention, AttentionState
from linattn.nn.layer import Layer
from linattn.nn.transformer import Block, BlockState, Stack, StackState

__all__ = ["Attention", "AttentionState", "Block", "BlockState", "Layer", "Stack", "StackState"]
