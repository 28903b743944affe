"""A stack of linear layers, one token at a time on a GPU, with few launches: for generation.

    x, features = fused(x)          the same as stack(x, state), with the state in a `Memory` and no gradients

Few rows ("thin") take two launches a layer, in which everything between two products is fused; with many rows ("wide")
products are cuBLAS's, and between them stand one kernel for the memory and one for residual and norm. docs/decisions.md
counts the launches and bytes of both.

Axes:  B rows   W width of a token   D key width   M values   H heads   K key/value heads
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.nn.attention import Attention, AttentionState
from linattn.nn.positions import rotary
from linattn.nn.transformer import ACTIVATIONS, Block, BlockState, Stack, StackState
from linattn.ops import gpu
from linattn.ops.attention import is_fused
from linattn.ops.autograd import autocast_is_on
from linattn.state import State

THIN_ROWS = 8  # more rows read each weight too often: a program of a thin kernel has one row
THIN_HEAD, TILE_BYTES = 64, 32768  # a program holds the weights of a head, or of a block of hidden numbers: four tiles
NORM_NUMBERS = 1024  # of a program that normalises


def why_not(stack: Stack) -> str | None:
    """What keeps this stack from being stepped by the kernels; None where nothing does."""
    first = stack.blocks[0]
    assert isinstance(first, Block)
    layer, weight = first.layer, first.attention.query.weight
    can_run, reason = gpu.status()
    if not can_run:
        return reason
    if weight.device.type != ("cpu" if gpu.interpreted() else "cuda"):
        return f"its kernels run on CUDA devices, and the weights are on {weight.device}"
    if autocast_is_on(weight.device.type):
        return "autocast is on: convert the model instead, model.bfloat16()"
    if any(dataclasses.replace(b.layer, dropout=0.0) != dataclasses.replace(layer, dropout=0.0) for b in stack.blocks):  # type: ignore[arg-type]
        return "its layers differ from each other"
    if {p.dtype for p in stack.parameters()} - {weight.dtype} or weight.dtype == torch.float64:
        return f"weights must be of one dtype, float32 or narrower, and are {weight.dtype} or several"
    if layer.attention != "linear" or layer.cross or not layer.causal or layer.rotary == "after":
        return "it is for causal linear self-attention without rotary positions after the map"
    if layer.conv:
        return "it knows no short convolution"
    if not is_fused(first.attention.feature_map):
        return f"the feature map {layer.feature_map!r} is not one that the kernels know"
    if layer.width % 8 or layer.key_width % 8 or layer.values % 8 or max(layer.key_width, layer.values) > gpu.WIDEST:
        return f"widths must be multiples of 8, of heads at most {gpu.WIDEST}"
    return None


@dataclass(frozen=True, eq=False)
class Weights:
    """One layer's, side by side as the kernels read them; zeros for a bias that is not there."""

    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    enter: tuple[Tensor, Tensor]
    leave: tuple[Tensor, Tensor]
    norms: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    out_rows: Tensor  # transposed: for thin steps
    leave_rows: Tensor


class FusedStack:
    """Takes the state over, as a donated call does: what `state` is then changes with each step."""

    def __init__(self, stack: Stack, state: StackState, *, narrow: bool = False):
        from linattn.ops.triton.memory import Memory

        reason = why_not(stack)
        if reason is not None:
            raise ValueError(f"this stack cannot be fused: {reason}")
        first = stack.blocks[0]
        assert isinstance(first, Block)
        self.layer, self.stack = first.layer, stack
        self.layers = [_weights(block) for block in stack.blocks]  # type: ignore[arg-type]
        self.last = _affine(stack.norm)
        layer, dtype = self.layer, first.attention.query.weight.dtype
        feature_map = first.attention.feature_map
        scale = feature_map.default_scale(layer.key_width) if layer.scale is None else layer.scale
        states = [block.own.memory for block in state.blocks]
        self.seen = state.seen
        form = {"feature_map": feature_map, "scale": scale, "eps": layer.eps, "narrow": narrow}
        self.memory = Memory(states, layer.num_heads, dtype, **form)  # type: ignore[arg-type]
        own = self.seen if layer.rotary == "before" else None
        views = self.memory.views()
        self.state = StackState(tuple(_block_state(view, own) for view in views), self.seen)
        self.thin = self._is_thin(len(self.seen))

    def __call__(
        self, x: Float[Tensor, "B W"], places: Int[Tensor, " B"], live: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B W"]:
        """What the head reads, from embedded tokens at these places. Rows are counted already (`embed`)."""
        self.memory.enter(live)
        made = self._thin(x) if self.thin else self._wide(x, places)
        self.memory.end()
        return made

    def fold(self) -> None:
        """Let `state` say all that was seen: recent tokens enter its sums."""
        self.memory.states()

    def _is_thin(self, rows: int) -> bool:
        layer = self.layer
        head = max(layer.key_width, layer.values)
        fits = head <= THIN_HEAD and head * layer.width * self.last[0].element_size() <= TILE_BYTES
        return fits and rows <= THIN_ROWS and layer.kv_heads == layer.num_heads and layer.rotary == "none"

    def _hidden_block(self) -> int:
        """Hidden numbers of a program: a power of two."""
        most = TILE_BYTES // (self.layer.width * self.last[0].element_size())
        return max(16, 1 << (most.bit_length() - 1))

    def _wide(self, x: Tensor, places: Tensor) -> Tensor:
        layer = self.layer
        widths = [layer.num_heads * layer.key_width, layer.kv_heads * layer.key_width, layer.kv_heads * layer.values]
        n = self.stack.blocks[0].norms[0](x) if layer.norm_first else x  # type: ignore[index, operator]
        for i, weights in enumerate(self.layers):
            q, k, v = _product(n, weights.qkv).split(widths, -1)
            if layer.rotary == "before":
                q, k = (self._turned(of, places) for of in (q, k))
            y = _product(self.memory.step(i, q, k, v), weights.out)
            x, n = self._add_norm(x, y, weights.norms[1 if layer.norm_first else 0])
            y = _product(_activated(n, weights.enter, layer.activation), weights.leave)
            x, n = self._add_norm(x, y, self._next_norm(i))
        return n if layer.norm_first else self.stack.norm(n)

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        wide = x.unflatten(-1, (1, -1, self.layer.key_width))
        return rotary(wide, places.unsqueeze(1)).flatten(1)

    def _next_norm(self, i: int) -> tuple[Tensor, Tensor]:
        """The norm that follows layer i: its second, or with norms first that of the next layer, or the stack's."""
        if not self.layer.norm_first:
            return self.layers[i].norms[1]
        return self.layers[i + 1].norms[0] if i + 1 < len(self.layers) else self.last

    def _add_norm(self, x: Tensor, y: Tensor, norm: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x + y (only where norms come first) and its norm."""
        from linattn.ops.triton.block import add_norm
        from linattn.ops.triton.launch import block, launch

        layer, (rows, W) = self.layer, x.shape
        total = torch.empty_like(x) if layer.norm_first else x
        out = torch.empty_like(x)
        BW = block(W)
        ROWS = max(1, NORM_NUMBERS // BW)
        constants = (W, BW, ROWS, layer.norm == "rms", layer.norm == "layer", layer.norm_first)
        launch(add_norm, -(-rows // ROWS), (x, y, total, out, *norm, rows, layer.norm_eps), constants, 4)
        return total if layer.norm_first else out, out

    def _thin(self, x: Tensor) -> Tensor:
        from linattn.ops.triton.block import finish
        from linattn.ops.triton.launch import block, launch

        layer, (rows, W) = self.layer, x.shape
        like = {"dtype": torch.float32, "device": x.device}
        residual = [torch.empty(rows, W, **like) for _ in range(2)]
        heads = torch.empty(rows, layer.num_heads, W, **like)
        hidden = torch.empty(rows, -(-layer.hidden // self._hidden_block()), W, **like)
        flags = (layer.norm == "rms", not layer.norm_first)
        source, parts, bias, after = x, 0, self.last[1], self.last
        for i, weights in enumerate(self.layers):
            before = weights.norms[0]
            self._attend(i, (source, bias, hidden, residual[0], *after, *before), parts, heads, weights)
            self._feed((residual[0], weights.out[1], heads, residual[1], *weights.norms[0]), hidden, weights)
            source, parts, bias, after = residual[1], hidden.shape[1], weights.leave[1], weights.norms[1]
        out = torch.empty(rows, W, dtype=self.last[0].dtype, device=x.device)
        arguments = (source, bias, hidden, *after, *self.last, out, layer.norm_eps)
        launch(finish, rows, arguments, (W, block(W), parts, block(parts), *flags), 4)
        return out

    def _attend(self, i: int, token: tuple[Tensor, ...], parts: int, made: Tensor, weights: Weights) -> None:
        from linattn.ops.triton.block import attend
        from linattn.ops.triton.launch import block, launch
        from linattn.ops.triton.memory import tile

        layer, memory, (rows, heads, W) = self.layer, self.memory, made.shape
        live = memory.live if memory.live is not None else memory.counts
        arguments = (*token, *weights.qkv, weights.out_rows, made, *memory.read(i), memory.counts, live)
        arguments += (heads, memory.root, 0.0 if layer.eps is None else layer.eps)
        D, M = layer.key_width, layer.values
        constants = (W, D, M, block(W), tile(D), tile(M), parts, block(parts), memory.fold_after)
        constants += (layer.norm == "rms", not layer.norm_first and parts > 0, layer.norm_first)
        constants += (layer.feature_map, layer.normalize, layer.eps is not None)
        constants += (memory.live is not None, layer.norm_eps)
        launch(attend, rows * heads, arguments, constants, 8)

    def _feed(self, token: tuple[Tensor, ...], made: Tensor, weights: Weights) -> None:
        from linattn.ops.triton.block import feed
        from linattn.ops.triton.launch import block, launch

        layer, (rows, blocks, W) = self.layer, made.shape
        arguments = (*token, *weights.norms[1], *weights.enter, weights.leave_rows, made, layer.norm_eps)
        constants = (W, layer.hidden, block(W), self._hidden_block(), layer.num_heads, block(layer.num_heads))
        constants += (layer.norm == "rms", not layer.norm_first, layer.norm_first, layer.activation)
        launch(feed, rows * blocks, arguments, constants, 8)


def _product(x: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    return torch.addmm(weights[1], x, weights[0].t())


def _activated(x: Tensor, weights: tuple[Tensor, Tensor], activation: str) -> Tensor:
    if activation == "relu" and x.device.type == "cuda":  # in the product's own launch
        return torch.ops.aten._addmm_activation(weights[1], x, weights[0].t())
    return ACTIVATIONS[activation](_product(x, weights))


def _weights(block: Block) -> Weights:
    attention: Attention = block.attention
    qkv = [_affine(linear) for linear in (attention.query, attention.key, attention.value)]
    out, enter, leave = (_affine(linear) for linear in (attention.out, block.ff.enter, block.ff.leave))
    weight, bias = (torch.cat(parts) for parts in zip(*qkv, strict=True))
    first, second = (_affine(norm) for norm in block.norms)
    rows = (out[0].t().contiguous(), leave[0].t().contiguous())
    return Weights((weight, bias), out, enter, leave, (first, second), *rows)


def _affine(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a product or a norm; zeros for a bias that is not there."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, torch.Tensor)
    size = weight.shape[0]
    return weight.detach().contiguous(), weight.new_zeros(size) if bias is None else bias.detach().contiguous()


def _block_state(sums: State, seen: Tensor | None) -> BlockState:
    return BlockState(AttentionState(sums, None, seen, ()), None)
