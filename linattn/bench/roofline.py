"""What an image must cost on a GPU: the bytes of the state and the products, at rates measured in the same run.

    a step     2 · layers · heads · D (M + 1) · 4 bytes / bandwidth  +  2 · weights of the layers / product rate

That is plain float32 sums, read and written for each token. Deferred folding moves fewer bytes (docs/decisions.md), so
a share of this floor may pass 1; it is the same yardstick for whatever is done inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from linattn.bench.measure import time_calls
from linattn.models import ImageModel

COPIED = 2**30  # bytes
SIDE = 8192  # of the square matrices that are multiplied


class Named(Protocol):
    name: str


def floor(models: dict[Any, ImageModel]) -> dict[str, float]:
    """Seconds of an image for each linear model, by name."""
    linear = {method.name: model for method, model in models.items() if model.config.layer.attention == "linear"}
    if not linear:
        return {}
    bandwidth, rate = bandwidth_of_copy("cuda"), rate_of_products("cuda")
    return {name: floor_seconds(model, bandwidth, rate) for name, model in linear.items()}


def floor_seconds(model: ImageModel, bandwidth: float, rate: float) -> float:
    """bandwidth in bytes a second, read and written together; rate in operations a second."""
    layer, depth = model.config.layer, model.config.depth
    numbers = layer.kv_heads * layer.key_width * (layer.values + 1)
    weights = sum(matrix_sizes(model))
    return (model.config.length - 1) * (depth * 2 * 4 * numbers / bandwidth + 2 * weights / rate)


def matrix_sizes(model: ImageModel) -> Iterable[int]:
    """Numbers of each matrix that a token is multiplied by, in the stack."""
    return (p.numel() for p in model.stack.parameters() if p.dim() == 2)


def bandwidth_of_copy(device: str, size: int = COPIED) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(lambda: target.copy_(source), device)


def rate_of_products(device: str, side: int = SIDE, dtype: torch.dtype = torch.bfloat16) -> float:
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / _median(lambda: torch.mm(a, b, out=out), device)


def _median(run: Any, device: str) -> float:
    run()
    return sorted(time_calls(run, 5, device) for _ in range(7))[3]
