"""Bits/dim of images a second time, by other code: one value after the other, from the weights' names and the paper.

    S ← S + φ(k) vᵀ,   z ← z + φ(k),   y = φ(q) S / (φ(q) · z)          in float32, as the sums are written there
    bits = Σ_{i=2}^{L} -log₂ p(v_i | v_1 … v_{i-1}) / (L - 1)                       p from the edges of v_i's bin

Nothing of layers, operator, positions, heads or evaluation is shared with what it checks: only the tensors by their
names and the config. It knows linear (elu + 1) and softmax attention, the positions and heads of images, and says so of
anything else.

Axes:  N images   L values of an image   W width   H heads   D width of a head   K components
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.models import ImageModel
from linattn.nn.layer import Layer

LN_2 = math.log(2)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def recount(model: ImageModel, images: Shaped[Tensor, "N height width channels"]) -> Float[Tensor, " N"]:
    """The bits/dim of each image, over its values 2 … L given the first; float64."""
    check(model)
    weights = {name: x.float() for name, x in model.state_dict().items() if x.is_floating_point()}
    values = images.flatten(1).long().to(model.device)
    layer, depth = model.config.layer, model.config.depth
    attends = [attention(layer) for _ in range(depth)]
    bits = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    for t in range(values.shape[1] - 1):
        x = embedded(model, weights, values[:, t], t)
        for i, attend in enumerate(attends):
            x = block(x, dict(within(weights, f"stack.blocks.{i}.")), layer, attend)
        x = norm(x, dict(within(weights, "stack.norm.")), layer)
        params = x @ weights["head.linear.weight"].T + weights["head.linear.bias"]
        bits -= log2_mass(params.double(), values[:, t + 1], model.config.head)
    return bits / (values.shape[1] - 1)


def check(model: ImageModel) -> None:
    """Whether this knows the model."""
    layer, position = model.config.layer, model.config.position
    known = {
        "attention": layer.attention in ("linear", "softmax"),
        "feature_map": layer.attention == "softmax" or layer.feature_map == "elu",
        "position": position in ("sine_concat", "sine_add", "row_column_channel", "none"),
        "rotary": layer.rotary == "none",
        "conv": layer.conv == 0,
        "num_kv_heads": layer.kv_heads == layer.num_heads,
        "normalize": layer.normalize and layer.eps is None and layer.scale is None,
    }
    for name, is_known in known.items():
        if not is_known:
            found = getattr(layer, name, position)
            raise ValueError(
                f"the second count knows linear attention with map elu, and softmax, in plain layers; here {name} is "
                f"{found!r}. `linattn eval` without --check knows it"
            )


def within(tensors: dict[str, Tensor], prefix: str):
    """Those whose names begin with `prefix`, without it."""
    return ((name[len(prefix) :], x) for name, x in tensors.items() if name.startswith(prefix))


def embedded(model: ImageModel, weights: dict[str, Tensor], value: Int[Tensor, " N"], t: int) -> Float[Tensor, "N W"]:
    """What the first block reads at place t."""
    x, width = weights["embedding.weight"][value], model.config.layer.width
    _, columns, channels = model.config.shape
    position = model.config.position
    if position == "row_column_channel":
        pixel, channel = divmod(t, channels)
        row, column = divmod(pixel, columns)
        tables = (("row", row), ("column", column), ("channel", channel))
        return x + sum(weights[f"position.{name}.weight"][i] for name, i in tables)
    if position == "none":
        return x
    size = width - x.shape[1] if position == "sine_concat" else width
    base = model.config.position_options.get("base", 10000.0)
    waves = [f(t * base ** (-2 * i / size)) for i in range(size // 2) for f in (math.sin, math.cos)]
    place = torch.tensor(waves, device=x.device, dtype=x.dtype).expand(len(x), -1)
    return torch.cat([x, place], 1) if position == "sine_concat" else x + place


def block(x: Float[Tensor, "N W"], w: dict[str, Tensor], layer: Layer, attend: Attend) -> Float[Tensor, "N W"]:
    """Attention and feed-forward of one layer, at one place."""
    for part, name in enumerate(("attention", "ff")):
        before = norm(x, dict(within(w, f"norms.{part}.")), layer) if layer.norm_first else x
        own = dict(within(w, f"{name}."))
        made = attended(before, own, layer, attend) if name == "attention" else fed(before, own, layer)
        x = x + made if layer.norm_first else norm(x + made, dict(within(w, f"norms.{part}.")), layer)
    return x


def attended(x: Tensor, w: dict[str, Tensor], layer: Layer, attend: Attend) -> Tensor:
    q, k, v = (linear(x, w, name).unflatten(1, (layer.num_heads, -1)) for name in ("query", "key", "value"))
    return linear(attend(q, k, v).flatten(1), w, "out")


def fed(x: Tensor, w: dict[str, Tensor], layer: Layer) -> Tensor:
    made = linear(x, w, "enter")
    if layer.activation == "swiglu":
        gate, value = made.chunk(2, 1)
        return linear(gate * gate.sigmoid() * value, w, "leave")
    if layer.activation == "gelu":
        return linear(made * (1 + torch.erf(made / math.sqrt(2))) / 2, w, "leave")
    return linear(made.clamp_min(0), w, "leave")


def linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def norm(x: Tensor, w: dict[str, Tensor], layer: Layer) -> Tensor:
    centred = x - x.mean(1, keepdim=True) if layer.norm == "layer" else x
    return centred / (centred.square().mean(1, keepdim=True) + layer.norm_eps).sqrt() * w["weight"] + w.get("bias", 0)


def attention(layer: Layer) -> Attend:
    """One layer's attention with what it remembers: q, k, v (N, H, D) of one place to (N, H, D)."""
    past: list[Tensor] = []

    def from_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (torch.where(x > 0, x + 1, x.clamp_max(0).exp()) for x in (q, k))
        added = [k.unsqueeze(-1) * v.unsqueeze(-2), k]
        past[:] = [old + new for old, new in zip(past, added, strict=True)] if past else added
        kv, z = past
        return (q.unsqueeze(-2) @ kv).squeeze(-2) / (q * z).sum(-1, keepdim=True)

    def from_all_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past.extend((k, v))
        keys, values = torch.stack(past[::2], 2), torch.stack(past[1::2], 2)
        p = ((q.unsqueeze(2) * keys).sum(-1) / math.sqrt(q.shape[-1])).softmax(-1)
        return (p.unsqueeze(-1) * values).sum(2)

    return from_sums if layer.attention == "linear" else from_all_keys


def log2_mass(params: Float[Tensor, "N P"], value: Int[Tensor, " N"], head: str) -> Float[Tensor, " N"]:
    """log₂ p(value), float64."""
    if head == "categorical":
        return params.log_softmax(1).gather(1, value[:, None])[:, 0] / LN_2
    weight, mean, log_scale = params.chunk(3, 1)
    scale = log_scale.clamp(-7, 30).exp()
    x = 2 * value.double()[:, None] / 255 - 1
    upper = ((x + 1 / 255 - mean) / scale).masked_fill(value[:, None] == 255, math.inf)
    lower = ((x - 1 / 255 - mean) / scale).masked_fill(value[:, None] == 0, -math.inf)
    # On the side where both are small, so that the difference keeps its digits.
    flip = lower + upper > 0
    upper, lower = torch.where(flip, -lower, upper), torch.where(flip, -upper, lower)
    mass = torch.sigmoid(upper) - torch.sigmoid(lower)
    return (F.softmax(weight, 1) * mass).sum(1).log2()
