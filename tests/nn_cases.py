"""Layers to test, in float64 and with no weight at its initial value; attention and a block by definition, in numpy.

Axes:  B batch   T time   U time of the memory   W width   H heads   K key/value heads   D key width   M values
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from linattn.nn import Attention, Layer

Array = np.ndarray[Any, np.dtype[np.float64]]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
WIDTH = 12

# Every kind of attention, and every option that changes what it computes.
LINEAR: dict[str, dict[str, Any]] = {
    "linear": {},
    "grouped": {"num_kv_heads": 1, "scale": 0.3},
    "values": {"head_width": 6, "value_width": 5, "num_kv_heads": 2, "bias": False},
    "relu": {"feature_map": "squared_relu", "scale": 0.5},
    "favor": {"feature_map": "favor", "map_options": {"num_samples": 8}, "num_kv_heads": 2},
    "fourier": {"feature_map": "fourier", "normalize": False},
    "hedgehog": {"feature_map": "hedgehog", "num_kv_heads": 2},
    "identity": {"feature_map": "identity", "eps": 0.5},
    "unnormalised": {"normalize": False},
    "before": {"rotary": "before", "head_width": 4},
    "after": {"rotary": "after", "num_kv_heads": 2, "head_width": 4, "value_width": 3, "scale": 2.0},
    "after favor": {"rotary": "after", "feature_map": "favor", "scale": 0.5},
    "after relu": {"rotary": "after", "feature_map": "relu"},
    "after unnormalised": {"rotary": "after", "head_width": 4, "normalize": False},
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "softmax": {"attention": "softmax"},
    "softmax grouped": {"attention": "softmax", "num_kv_heads": 2, "head_width": 6, "value_width": 5, "scale": 0.7},
    "softmax rotary": {"attention": "softmax", "rotary": "before", "head_width": 4},
}
REFORMER: dict[str, dict[str, Any]] = {
    "reformer": {"attention": "reformer", "chunk_length": 4, "rounds": 2},
    "reformer rotary": {"attention": "reformer", "chunk_length": 4, "rotary": "after", "head_width": 4},
}
RECURRENT = LINEAR | SOFTMAX
KINDS = {name: (RECURRENT | REFORMER)[name] for name in ("linear", "after favor", "softmax", "reformer")}


def layer_of(**options: Any) -> Layer:
    sizes: dict[str, Any] = {"width": WIDTH, "num_heads": 4} | ({"head_width": 4} if "rotary" in options else {})
    return Layer(**(sizes | options))


def made(cls: type[ModuleT], *args: Any, seed: int = 0, **options: Any) -> ModuleT:
    """A module in float64 whose weights, biases and norms have all left their initial values."""
    torch.manual_seed(seed)
    module = cls(*args, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


def tokens(batch: int = 2, time: int = 23, width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(batch, time, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_pieces(module: Any, x: Tensor, cuts: Sequence[int], state: Any, **options: Any) -> tuple[Tensor, Any]:
    """The outputs of a sequence cut at `cuts`, one call a piece, and the last state."""
    outputs = []
    for piece in torch.tensor_split(x, list(cuts), dim=1):
        y, state = module(piece, state, **options)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def gradients(out: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Of a loss in which every output counts, and each differently."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), leaves))


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, f"{got.shape} {got.dtype}, {want.shape} {want.dtype}"
    scale = want.abs().max().item()
    error = (got - want).abs().max().item()
    assert scale > 0, "nothing to compare: all zeros"
    assert error <= tolerance * scale, f"error {error:.1e} on a signal of {scale:.1e}"


def assert_same_bits(a: Any, b: Any) -> None:
    """Two states with the same tensors, bit for bit."""
    left, right = a.tensors(), b.tensors()
    assert left.keys() == right.keys()
    for name, x in left.items():
        assert x.dtype == right[name].dtype and torch.equal(x, right[name]), name


def array(x: Tensor) -> Array:
    return x.detach().double().numpy()


def affine(linear: Any, x: Array) -> Array:
    return x @ array(linear.weight).T + (0 if linear.bias is None else array(linear.bias))


def attention_by_loops(module: Attention, x: Array, memory: Array | None = None) -> Array:
    """(B, T, W): the weights of all that a query sees, one by one, for each row and head (elu + 1, or softmax)."""
    layer, (B, T, _) = module.layer, x.shape
    source = x if memory is None else memory
    U, H, K, D = source.shape[1], layer.num_heads, layer.kv_heads, layer.key_width
    q = affine(module.query, x).reshape(B, T, H, D)
    k = affine(module.key, source).reshape(B, U, K, D)
    v = affine(module.value, source).reshape(B, U, K, layer.values)
    out = np.zeros((B, T, H, layer.values))
    for b, i, h in np.ndindex(B, T, H):
        g = h * K // H  # the key head that serves query head h
        seen = range(i + 1) if memory is None and layer.causal else range(U)
        pairs = [_weights(module, q[b, i, h], k[b, j, g], i, j) for j in seen]
        norm = sum(own for _, own in pairs) if layer.normalize else 1.0
        for (weight, _), j in zip(pairs, seen, strict=True):
            out[b, i, h] += weight / norm * v[b, j, g]
    return affine(module.out, out.reshape(B, T, -1))


def block_by_numpy(block: Any, x: Array, memory: Array) -> Array:
    """Parts, each added to what it reads and normalised after (post-norm) or before (pre-norm)."""
    parts = [lambda y: attention_by_loops(block.attention, y), lambda y: feed_forward(block, y)]
    if block.cross is not None:
        parts.insert(1, lambda y: attention_by_loops(block.cross, y, memory))
    for part, norm in zip(parts, block.norms, strict=True):
        x = x + part(normalised(norm, x)) if block.layer.norm_first else normalised(norm, x + part(x))
    return x


def normalised(norm: Any, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True) if isinstance(norm, nn.LayerNorm) else x
    y = centred / ((centred**2).mean(-1, keepdims=True) + 1e-5) ** 0.5 * array(norm.weight)
    return y + array(norm.bias) if isinstance(norm, nn.LayerNorm) else y


def feed_forward(block: Any, x: Array) -> Array:
    h = affine(block.ff.enter, x)
    if block.layer.activation == "relu":
        return affine(block.ff.leave, h.clip(0))
    if block.layer.activation == "gelu":
        return affine(block.ff.leave, h * array(torch.special.ndtr(torch.from_numpy(h))))
    gate, value = h[..., :20], h[..., 20:]
    return affine(block.ff.leave, gate / (1 + np.exp(-gate)) * value)


def _weights(module: Attention, q: Array, k: Array, i: int, j: int) -> tuple[float, float]:
    """Of a key in the sum of the values, and in the normaliser."""
    if module.kind == "softmax":
        if module.rotary != "none":
            q, k = _turned(q, i), _turned(k, j)
        weight = float(np.exp(q @ k * (len(q) ** -0.5 if module.layer.scale is None else module.layer.scale)))
        return weight, weight
    if module.rotary == "before":
        q, k = _turned(q, i), _turned(k, j)
    root = 1.0 if module.layer.scale is None else module.layer.scale**0.5
    phi_q, phi_k = _elu(root * q), _elu(root * k)
    own = float(phi_q @ phi_k)
    return (float(_turned(phi_q, i) @ _turned(phi_k, j)), own) if module.rotary == "after" else (own, own)


def _elu(x: Array) -> Array:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _turned(x: Array, position: int) -> Array:
    """The pairs (x_n, x_{n + D/2}) as complex numbers, each turned by its angle."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10000.0 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])
