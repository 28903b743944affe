"""An attention layer: project, attend, project back. The kind of attention is one word of its Layer.

    y, state = attention(x, state)

The same call trains (many tokens, no state), reads a prompt (many tokens, from `empty_state`) and makes one token.
A state is given, a state is returned; without one, none is made.

Axes:  B batch   T time   U time of the memory   W width of the tokens   H heads   K key/value heads   D key width
       C features   M values
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.features import FeatureMap, make
from linattn.nn.layer import Layer
from linattn.nn.nested import Nested
from linattn.nn.positions import rotary
from linattn.nn.random_maps import DrawnMap, draw_of
from linattn.ops import linear_attention
from linattn.ops.autograd import autocast_is_on
from linattn.ops.checks import Lengths, read_batch
from linattn.ops.form import Form, live_tokens
from linattn.ops.hashing import draw_rotations
from linattn.ops.reformer import LSHState, reformer_attention
from linattn.ops.softmax import KVCache, softmax_attention
from linattn.state import State, Value, value


@value
class AttentionState(Nested):
    """What an attention layer remembers.

    memory    the sums, the keys and values, or the hashed tokens of what it attends to; None: a memory not yet read
    weights   with rotary positions after the map: the sums of the normaliser, whose features are not turned
    seen      (B,) tokens so far, where positions are turned by them
    draw      each row's draw of the random map, which may be another than the layer's by now
    """

    memory: Value | None
    weights: State | None
    seen: Tensor | None
    draw: tuple[Tensor, ...]


class Attention(nn.Module):
    """Self-attention, or with `cross=True` attention to a memory that is read once."""

    rotations: Tensor

    def __init__(self, layer: Layer, *, cross: bool = False, generator: torch.Generator | None = None):
        super().__init__()
        self.layer, self.cross = layer, cross
        self.causal = layer.causal and not cross
        self.kind = layer.attention
        self.rotary = "none" if cross else layer.rotary
        source = (layer.memory_width or layer.width) if cross else layer.width
        self.query = nn.Linear(layer.width, layer.num_heads * layer.key_width, bias=layer.bias)
        if self.kind != "reformer":  # which takes the queries for keys
            self.key = nn.Linear(source, layer.kv_heads * layer.key_width, bias=layer.bias)
        self.value = nn.Linear(source, layer.kv_heads * layer.values, bias=layer.bias)
        self.out = nn.Linear(layer.num_heads * layer.values, layer.width, bias=layer.bias)
        if self.kind == "linear":
            options = dict(layer.map_options)
            self.feature_map = make(layer.feature_map, layer.key_width, layer.kv_heads, generator, **options)
            self._check_map(self.feature_map)
        if self.kind == "reformer":
            draw = draw_rotations(layer.num_heads, layer.key_width, rounds=layer.rounds, generator=generator)
            self.register_buffer("rotations", draw)

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        state: AttentionState | None = None,
        *,
        memory: Float[Tensor, "B U E"] | None = None,
        lengths: Lengths = None,
        memory_lengths: Lengths = None,
        donate: bool = False,
    ) -> tuple[Float[Tensor, "B T W"], AttentionState | None]:
        """Attend. `lengths` are the real tokens of each row of x, `memory_lengths` those of the memory.

        A state that has read a memory answers from that one: `memory` need not be given again.
        """
        x = read_tokens(x, lengths, self.layer.width)
        q = self.query(x).unflatten(-1, (-1, self.layer.key_width))
        if self.cross:
            out, state = self._read_memory(q, state, memory, lengths, memory_lengths)
        else:
            if memory is not None:
                raise ValueError("memory was given to self-attention: make the layer with cross=True")
            out, state = self._attend(q, x, state, lengths, donate)
        return self.out(out.flatten(2)), state

    def empty_state(self, batch: int, *, capacity: int = 64, static: bool = False) -> AttentionState:
        """The state before any token, on the layer's device. `capacity` and `static` are for caches that grow."""
        layer, weight = self.layer, self.query.weight
        seen = None if self.rotary == "none" else torch.zeros(batch, dtype=torch.int64, device=weight.device)
        if self.cross:
            return AttentionState(None, None, seen, ())
        like = {"dtype": _working_dtype(weight), "device": weight.device}
        if self.kind == "softmax":
            sizes = (batch, layer.kv_heads, layer.key_width, layer.values)
            return AttentionState(KVCache.empty(*sizes, capacity=capacity, static=static, **like), None, seen, ())
        if self.kind == "reformer":
            made = LSHState.empty(batch, layer.values, self.rotations, capacity=capacity, **like)
            return AttentionState(made, None, seen, ())
        like["dtype"] = torch.float64 if weight.dtype == torch.float64 else torch.float32
        features = self.feature_map.num_features(layer.key_width)
        split = self.rotary == "after" and layer.normalize
        sums = State.empty(
            batch, layer.kv_heads, features, layer.values, normalize=layer.normalize and not split, **like
        )
        weights = State.empty(batch, layer.kv_heads, features, 1, normalize=False, **like) if split else None
        return AttentionState(sums, weights, seen, draw_of(self.feature_map, batch))

    def _attend(
        self, q: Tensor, x: Tensor, state: AttentionState | None, lengths: Lengths, donate: bool
    ) -> tuple[Tensor, AttentionState | None]:
        layer, before = self.layer, state
        v = self.value(x).unflatten(-1, (-1, layer.values))
        k = q if self.kind == "reformer" else self.key(x).unflatten(-1, (-1, layer.key_width))
        places = self._positions(x, before)
        if self.rotary == "before" or (self.rotary == "after" and self.kind != "linear"):
            q, k = rotary(q, places), rotary(k, places)
        options = {"return_state": before is not None, "lengths": lengths, "donate": donate and before is not None}
        memory = None if before is None else before.memory
        weights = None if before is None else before.weights
        if self.kind == "softmax":
            shared = self._shared(options)
            made = softmax_attention(q, k, v, causal=self.causal, scale=layer.scale, state=memory, **shared)
        elif self.kind == "reformer":
            sizes = {"rounds": layer.rounds, "chunk_length": layer.chunk_length}
            draw = self.rotations if before is None else None
            made = reformer_attention(q, v, causal=self.causal, state=memory, rotations=draw, **sizes, **options)
        elif self.rotary == "after":
            made, weights = self._turned(q, k, v, places, before, self._shared(options))
        else:
            made = self._linear(q, k, v, self._map(before), memory, causal=self.causal, **self._shared(options))
        out, memory = _pair(made)
        if before is None:
            return out, None
        return out, AttentionState(memory, weights, self._seen(before, x, lengths), before.draw)

    def _linear(self, q: Tensor, k: Tensor | None, v: Tensor | None, feature_map: FeatureMap, state, **options):
        layer = self.layer
        form = {"normalize": layer.normalize, "eps": layer.eps, "scale": layer.scale} | options
        return linear_attention(q, k, v, feature_map=feature_map, state=state, **form)

    def _turned(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, before: AttentionState | None, options: dict):
        """Rotary positions after the map: turned features weigh the values, unturned ones make the normaliser."""
        layer, feature_map = self.layer, self._map(before)
        form = Form(feature_map, feature_map.default_scale(layer.key_width) if layer.scale is None else layer.scale)
        phi_q, phi_k = form.features(q), form.features(k)
        options |= {"causal": self.causal, "normalize": False, "eps": None, "scale": None}
        sums, weights = (None, None) if before is None else (before.memory, before.weights)
        made = self._linear(rotary(phi_q, places), rotary(phi_k, places), v.to(phi_k.dtype), IDENTITY, sums, **options)
        if not layer.normalize:
            return made, None
        ones = torch.ones_like(phi_k[..., :1])
        num, sums = _pair(made)
        den, weights = _pair(self._linear(phi_q, phi_k, ones, IDENTITY, weights, **options))
        return ((num / den.masked_fill(den == 0, torch.inf)).to(v.dtype), sums), weights

    def _read_memory(
        self, q: Tensor, state: AttentionState | None, memory: Tensor | None, lengths: Lengths, memory_lengths: Lengths
    ) -> tuple[Tensor, AttentionState | None]:
        """Cross-attention. The memory's keys and values are computed when it is first read, and kept in the state."""
        known = None if state is None else state.memory
        if known is None and memory is None:
            raise ValueError("cross-attention has no memory to read: pass memory=, or a state that has read one")
        k = v = None
        if known is None and memory is not None:
            memory = read_tokens(memory, memory_lengths, self.key.in_features, "memory")
            k = self.key(memory).unflatten(-1, (-1, self.layer.key_width))
            v = self.value(memory).unflatten(-1, (-1, self.layer.values))
        options = {"causal": False, "q_lengths": lengths, "lengths": memory_lengths if known is None else None}
        options["return_state"] = state is not None and known is None
        if self.kind == "softmax":
            made = softmax_attention(q, k, v, scale=self.layer.scale, state=known, **options)
        else:
            made = self._linear(q, k, v, self._map(state), known, **options)
        out, read = _pair(made)
        if state is None:
            return out, None
        draw = state.draw or draw_of(getattr(self, "feature_map", None), q.shape[0])
        return out, AttentionState(known if read is None else read, None, None, draw)

    def _map(self, state: AttentionState | None) -> FeatureMap:
        """The layer's map; with the draw of the state, where it has one."""
        return DrawnMap(self.feature_map, state.draw) if state is not None and state.draw else self.feature_map

    def _positions(self, x: Tensor, state: AttentionState | None) -> Int[Tensor, "*P T"]:
        places = torch.arange(x.shape[1], device=x.device)
        return places if state is None or state.seen is None else state.seen[:, None] + places

    def _seen(self, before: AttentionState, x: Tensor, lengths: Lengths) -> Tensor | None:
        if before.seen is None:
            return None
        return before.seen + (x.shape[1] if lengths is None else torch.as_tensor(lengths, device=x.device))

    def _shared(self, options: dict) -> dict:
        """Without causality, queries have lengths of their own: in self-attention the same."""
        return options if self.causal else options | {"q_lengths": options["lengths"]}

    def _check_map(self, feature_map: FeatureMap) -> None:
        layer = self.layer
        if layer.normalize and layer.eps is None and feature_map.kind == "signed":
            raise ValueError(
                f"the feature map {layer.feature_map!r} is signed, so its layer needs eps= (for example 1e-3) "
                f"or normalize=False"
            )
        if self.rotary == "after" and layer.eps is not None:
            raise ValueError(f"rotary='after' divides by unturned weights and takes no eps, got eps={layer.eps}")
        if self.rotary == "after" and feature_map.num_features(layer.key_width) % 2:
            raise ValueError(
                f"rotary='after' turns pairs of features, and {layer.feature_map!r} makes an odd number of them, "
                f"{feature_map.num_features(layer.key_width)}: use rotary='before'"
            )

    def extra_repr(self) -> str:
        return f"{self.kind}, heads={self.layer.num_heads}, causal={self.causal}, cross={self.cross}"


IDENTITY = make("identity", 1)


def read_tokens(x: Float[Tensor, "B T W"], lengths: Lengths, width: int, name: str = "x") -> Float[Tensor, "B T W"]:
    """x with zeros for padding: NaN there would reach the gradients of every weight it meets, as 0 · NaN."""
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"{name} must be (batch, time, width) with width {width}, got {tuple(x.shape)}")
    if lengths is None:
        return x
    real = live_tokens(read_batch(x, x, True, lengths, None, None, None).lengths, x.shape[1])
    return x if real is None else torch.where(real[..., None], x, 0)


def _pair(made: Any) -> tuple[Tensor, Any]:
    """The output, and the state where one was made."""
    return made if isinstance(made, tuple) else (made, None)


def _working_dtype(weight: Tensor) -> torch.dtype:
    """That of what a linear layer makes: what a cache keeps."""
    kind = weight.device.type
    narrows = weight.dtype != torch.float64 and autocast_is_on(kind)
    return torch.get_autocast_dtype(kind) if narrows else weight.dtype
