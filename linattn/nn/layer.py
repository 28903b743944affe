"""What a transformer layer is made of, as plain values: complete, printable, saved with the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from linattn.features import FEATURE_MAPS
from linattn.ops.checks import check_scale

Kind = Literal["linear", "softmax", "reformer"]
CHOICES = {
    "attention": ("linear", "softmax", "reformer"),
    "rotary": ("none", "before", "after"),
    "norm": ("layer", "rms"),
    "activation": ("relu", "gelu", "swiglu"),
    "feature_map": tuple(FEATURE_MAPS),
}
COUNTS = ("num_heads", "num_kv_heads", "rounds", "chunk_length")
COUNTS += ("width", "head_width", "value_width", "memory_width", "ff_width")


@dataclass(frozen=True)
class Layer:
    """One transformer layer. `attention` is the one word that puts linear, softmax or Reformer attention in it.

    width             of the tokens between layers
    num_heads         heads of the queries; num_kv_heads of keys and values (a divisor; None: as many)
    head_width        of queries and keys (None: width / num_heads); value_width of values (None: head_width)
    causal            a decoder layer; False: an encoder layer
    cross             a second attention, to a memory of width memory_width (None: width): encoder-decoder
    feature_map       of linear attention, by name, with map_options; normalize, eps and scale as in linear_attention
    rotary            turns queries and keys by their positions: "before" the map keeps positive features, "after" it
                      keeps weights that depend on distances alone and leaves the normaliser unturned; softmax and
                      Reformer have no map, so there both mean the same
    rounds, chunk_length    of Reformer attention
    norm, norm_first, norm_eps    LayerNorm or RMSNorm, after each part (the paper's) or before it
    activation, ff_width    of the feed-forward part (None: 4 · width)
    conv              taps of a depthwise convolution along time before attention; 0: none
    dropout           of what convolution, attention and feed-forward add
    """

    width: int
    num_heads: int
    num_kv_heads: int | None = None
    head_width: int | None = None
    value_width: int | None = None
    attention: str = "linear"
    causal: bool = True
    cross: bool = False
    memory_width: int | None = None
    bias: bool = True
    feature_map: str = "elu"
    map_options: Mapping[str, Any] = field(default_factory=dict)
    normalize: bool = True
    eps: float | None = None
    scale: float | None = None
    rotary: str = "none"
    rounds: int = 4
    chunk_length: int = 32
    norm: str = "layer"
    norm_first: bool = False
    norm_eps: float = 1e-5
    activation: str = "relu"
    ff_width: int | None = None
    conv: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in COUNTS:
            given = getattr(self, name)
            if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
                raise ValueError(f"{name} must be a positive integer, got {given!r}")
        if self.head_width is None and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} does not divide into {self.num_heads} heads: choose another, or give head_width"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if isinstance(self.conv, bool) or not isinstance(self.conv, int) or self.conv < 0 or self.conv == 1:
            raise ValueError(f"conv must be 0, or at least 2 taps, got {self.conv!r}")
        check_scale(self.scale, self.eps)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.attention == "reformer" and (self.cross or self.kv_heads != self.num_heads):
            raise ValueError(
                f"Reformer attention shares queries and keys: it has no cross-attention and no fewer key/value heads, "
                f"got cross={self.cross}, num_kv_heads={self.num_kv_heads}"
            )
        if self.attention == "reformer" and self.scale is not None:
            raise ValueError(f"Reformer attention normalises its keys and has its own scale, got scale={self.scale}")
        if self.rotary != "none" and self.key_width % 2:
            raise ValueError(f"rotary positions turn pairs: head_width must be even, got {self.key_width}")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_width(self) -> int:
        return self.width // self.num_heads if self.head_width is None else self.head_width

    @property
    def values(self) -> int:
        return self.key_width if self.value_width is None else self.value_width

    @property
    def hidden(self) -> int:
        return 4 * self.width if self.ff_width is None else self.ff_width
