"""One block, and a stack of them: encoder, decoder and encoder-decoder are flags of the same block.

    short convolution, where the layer has one: first of all, in the form of the other parts
    post-norm (the paper's)    x ← norm(x + attention(x));   x ← norm(x + cross(x, memory));   x ← norm(x + ff(x))
    pre-norm                   x ← x + attention(norm(x));   …                                 x ← x + ff(norm(x))

Axes:  B batch   T time   U time of the memory   W width of the tokens   E width of the memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from linattn._typing import Float, Tensor
from linattn.nn.attention import Attention, AttentionState, read_tokens
from linattn.nn.layer import Layer
from linattn.nn.nested import Nested
from linattn.nn.short_conv import ShortConv
from linattn.ops.checks import Lengths
from linattn.state import value


@value
class BlockState(Nested):
    """What a block remembers: its own tokens, the memory it has read, and the last tokens for its convolution."""

    own: AttentionState
    cross: AttentionState | None
    # default_factory: a plain default would live on in the class and answer for a consumed state
    conv: Tensor | None = dataclasses.field(default_factory=lambda: None)


@value
class StackState(Nested):
    """What a stack remembers: its blocks' states, and the tokens seen of each row (B,)."""

    blocks: tuple[BlockState, ...]
    seen: Tensor


class FeedForward(nn.Module):
    """out(activation(in(x))); with SwiGLU, out(silu(gate(x)) · in(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.activation = layer.activation
        gates = 2 if layer.activation == "swiglu" else 1
        self.enter = nn.Linear(layer.width, gates * layer.hidden, bias=layer.bias)
        self.leave = nn.Linear(layer.hidden, layer.width, bias=layer.bias)

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        return self.leave(ACTIVATIONS[self.activation](self.enter(x)))


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swiglu": _swiglu}


def make_norm(layer: Layer) -> nn.LayerNorm | nn.RMSNorm:
    made = nn.LayerNorm if layer.norm == "layer" else nn.RMSNorm
    return made(layer.width, eps=layer.norm_eps)


class Block(nn.Module):
    """Attention, cross-attention where the layer has it, feed-forward; each added to what it reads, and normalised."""

    def __init__(self, layer: Layer, *, generator: torch.Generator | None = None):
        super().__init__()
        self.layer = layer
        self.attention = Attention(layer, generator=generator)
        self.cross = Attention(layer, cross=True, generator=generator) if layer.cross else None
        self.ff = FeedForward(layer)
        self.norms = nn.ModuleList(make_norm(layer) for _ in range(3 if layer.cross else 2))
        self.dropout = nn.Dropout(layer.dropout)
        if layer.conv:
            self.conv = ShortConv(layer.width, layer.conv, causal=layer.causal)
            self.norms.append(make_norm(layer))

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        state: BlockState | None = None,
        *,
        memory: Float[Tensor, "B U E"] | None = None,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T W"], BlockState | None]:
        x = read_tokens(x, lengths, self.layer.width)
        kept = None
        if self.layer.conv:
            normed = read_tokens(self._before(x, -1), lengths, self.layer.width)  # a norm's bias is no zero
            made, kept = self.conv(normed, None if state is None else state.conv, lengths=lengths)
            x = self._after(x, made, -1)
        own = None if state is None else state.own
        made, own = self.attention(self._before(x, 0), own, lengths=lengths, donate=donate)
        x = self._after(x, made, 0)
        read = None if state is None else state.cross
        if self.cross is not None:
            made, read = self.cross(
                self._before(x, 1), read, memory=memory, lengths=lengths, memory_lengths=memory_lengths
            )
            x = self._after(x, made, 1)
        elif memory is not None:
            raise ValueError("memory was given to a block without cross-attention: make it with Layer(cross=True)")
        last = 1 if self.cross is None else 2
        x = self._after(x, self.ff(self._before(x, last)), last)
        return x, None if own is None else BlockState(own, read, kept)

    def empty_state(self, batch: int, *, capacity: int = 64, static: bool = False) -> BlockState:
        own = self.attention.empty_state(batch, capacity=capacity, static=static)
        cross = None if self.cross is None else self.cross.empty_state(batch)
        return BlockState(own, cross, self.conv.empty_state(batch) if self.layer.conv else None)

    def _before(self, x: Tensor, part: int) -> Tensor:
        return self.norms[part](x) if self.layer.norm_first else x

    def _after(self, x: Tensor, made: Tensor, part: int) -> Tensor:
        x = x + self.dropout(made)
        return x if self.layer.norm_first else self.norms[part](x)


class Stack(nn.Module):
    """Blocks one after the other, and a last norm.

    >>> stack = Stack(Layer(width=32, num_heads=4), depth=2)
    >>> x = torch.randn(1, 10, 32)
    >>> whole, _ = stack(x)  # in parallel, as in training
    >>> prompt, state = stack(x[:, :9], stack.empty_state(1))  # read a prompt
    >>> last, state = stack(x[:, 9:], state)  # one token
    >>> torch.allclose(last, whole[:, 9:], atol=1e-5)
    True
    """

    def __init__(
        self, layer: Layer | Sequence[Layer], depth: int | None = None, *, generator: torch.Generator | None = None
    ):
        """One layer, `depth` times; or a list of layers, each its own (a hybrid)."""
        super().__init__()
        layers = self._layers(layer, depth)
        self.blocks = nn.ModuleList(Block(one, generator=generator) for one in layers)
        self.norm = make_norm(layers[0])

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        state: StackState | None = None,
        *,
        memory: Float[Tensor, "B U E"] | None = None,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T W"], StackState | None]:
        """y, state = stack(x, state). `lengths`: the real tokens of each row; padding reaches nothing.

        donate: let the call reuse the state's memory, which is then gone: for generation, without gradients.
        """
        self._check(state, memory)
        left = []
        for i, block in enumerate(self.blocks):
            before = None if state is None else state.blocks[i]
            reads = {"memory": memory, "memory_lengths": memory_lengths} if block.cross is not None else {}
            x, after = block(x, before, lengths=lengths, donate=donate, **reads)
            left.append(after)
        x = self.norm(x)
        if state is None:
            return x, None
        seen = state.seen + (x.shape[1] if lengths is None else torch.as_tensor(lengths, device=x.device))
        return x, StackState(tuple(left), seen)

    def empty_state(self, batch: int, *, capacity: int = 64, static: bool = False) -> StackState:
        """The state before any token. `capacity` (tokens) and `static` are for attention with a cache."""
        options = {"capacity": capacity, "static": static}
        blocks = tuple(block.empty_state(batch, **options) for block in self.blocks)  # type: ignore[operator]
        return StackState(blocks, torch.zeros(batch, dtype=torch.int64, device=self.norm.weight.device))

    def _check(self, state: StackState | None, memory: Tensor | None) -> None:
        if state is not None and len(state.blocks) != len(self.blocks):
            raise ValueError(f"the state of {len(state.blocks)} blocks was given to a stack of {len(self.blocks)}")
        if memory is not None and all(block.cross is None for block in self.blocks):
            raise ValueError("memory was given to a stack without cross-attention: make it with Layer(cross=True)")

    @staticmethod
    def _layers(layer: Layer | Sequence[Layer], depth: int | None) -> list[Layer]:
        layers = [layer] * (1 if depth is None else depth) if isinstance(layer, Layer) else list(layer)
        if not layers or (not isinstance(layer, Layer) and depth not in (None, len(layers))):
            raise ValueError(
                f"a stack needs at least one layer, and depth (if given) as many as there are; got {depth=}"
            )
        if len({one.width for one in layers}) > 1:
            raise ValueError(f"all layers of a stack have one width, got {[one.width for one in layers]}")
        return layers
