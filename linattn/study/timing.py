"""What attention costs: short sequences beside SDPA, and the paper's scaling figure.

short     the operator alone and a whole layer around it, forward and with gradients, linear and softmax taking turns
scaling   forward and backward of one call of B = tokens / N sequences of N, seconds and peak bytes a sequence

Axes:  B batch   N time   H heads   D width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from linattn import linear_attention
from linattn.bench.machine import available_memory
from linattn.bench.measure import Effort, Run, race
from linattn.nn import Block, Layer
from linattn.ops.hashing import draw_rotations
from linattn.ops.reformer import reformer_attention
from linattn.study.arms import LINEAR, REFORMER, SOFTMAX
from linattn.study.sizes import ScalingSize, ShortSize

ROOM = 0.7  # of the free memory, for one call
Call = Callable[..., Any]


def dtype_on(device: str) -> torch.dtype:
    """Softmax's fast kernels on a GPU take half precision only."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def short(settings: Mapping[str, Any], size: ShortSize) -> dict[str, Any]:
    """Seconds of the operator, and of a layer (projections, attention, feed-forward), at one length."""
    device, tokens = settings["device"], settings["tokens"]
    heads, width = size.shape
    batch = 1 if settings["load"] == "one" else max(1, size.full_load[device] // tokens)
    compiled = settings["form"] == "compiled"
    runs: dict[str, dict[str, Run]] = {
        "operator": operators(device, batch, tokens, heads, width, compiled),
        "layer": layers(device, batch, tokens, heads, width, compiled),
    }
    effort = Effort(budget=size.budget, least=3)
    found: dict[str, Any] = {"batch": batch, "heads": heads, "width": width, "dtype": str(dtype_on(device))[6:]}
    for name, made in runs.items():
        for run in made.values():
            run()  # compiles: a race would take its first call for a sample
        cells = race(made, effort, device)
        found[name] = {key: cell.seconds for key, cell in cells.items()}
    return found


def operators(device: str, batch: int, tokens: int, heads: int, width: int, compiled: bool) -> dict[str, Run]:
    """Each in the layout that suits it: SDPA pays for no transpose."""
    made: dict[str, Run] = {}
    calls: dict[str, tuple[Call, bool]] = {LINEAR: (_linear, False), SOFTMAX: (_softmax, True)}
    for name, (call, heads_first) in calls.items():
        call = torch.compile(call, dynamic=False) if compiled else call
        q, k, v = operands(device, batch, tokens, heads, width, heads_first)
        made[f"{name} forward"] = lambda call=call, q=q, k=k, v=v: call(q, k, v)
        made[f"{name} training"] = gradient(call, q, k, v)
    return made


def layers(device: str, batch: int, tokens: int, heads: int, width: int, compiled: bool) -> dict[str, Run]:
    made: dict[str, Run] = {}
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(batch, tokens, heads * width, generator=generator).to(device, dtype_on(device))
    for name, attention in ((LINEAR, "linear"), (SOFTMAX, "softmax")):
        layer = Layer(width=heads * width, num_heads=heads, attention=attention, norm_first=True, activation="gelu")
        block = Block(layer).to(device, dtype_on(device))
        call = torch.compile(block, dynamic=False) if compiled else block
        made[f"{name} forward"] = without_gradient(call, x)
        made[f"{name} training"] = training(call, block, x)
    return made


def without_gradient(call: Call, x: torch.Tensor) -> Run:
    def run() -> Any:
        with torch.no_grad():
            return call(x)

    return run


def training(call: Call, block: nn.Module, x: torch.Tensor) -> Run:
    x = x.clone().requires_grad_()
    weights = [x, *block.parameters()]
    return lambda: torch.autograd.grad(call(x)[0], weights, x.detach())


def gradient(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Forward and backward; the output's gradient is v, random and dense."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    return lambda: torch.autograd.grad(call(q, k, v), [x for x in (q, k, v) if x is not None], v.detach())


def operands(device: str, batch: int, tokens: int, heads: int, width: int, heads_first: bool = False):
    axes = (heads, tokens) if heads_first else (tokens, heads)
    generator = torch.Generator().manual_seed(tokens)
    made = (torch.randn(batch, *axes, width, generator=generator) for _ in range(3))
    q, k, v = (x.to(device, dtype_on(device)) for x in made)
    return q, k, v


def scaling(settings: Mapping[str, Any], size: ScalingSize) -> dict[str, Any]:
    """One point of the figure. What does not fit is a finding: {"too_large": why}."""
    device, tokens, arm = settings["device"], settings["tokens"], settings["arm"]
    batch = max(1, size.tokens // tokens)
    found: dict[str, Any] = {"batch": batch, "heads": size.heads, "width": size.width}
    found["dtype"] = str(dtype_on(device))[6:]
    needed = 60 * batch * tokens * size.heads * size.width * dtype_on(device).itemsize
    free = available_memory(device)
    if needed > ROOM * free:
        return found | {"too_large": f"about {needed / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free"}
    q, k, v = operands(device, batch, tokens, size.heads, size.width, arm == SOFTMAX)
    run = _shared(q, v) if arm == REFORMER else gradient(_softmax if arm == SOFTMAX else _linear, q, k, v)
    effort = Effort(budget=size.budget, least=3, once=max(1.0, size.longest / 4))
    try:
        cell = race({arm: run}, effort, device)[arm]
    except torch.OutOfMemoryError as error:
        return found | {"too_large": str(error).splitlines()[0]}
    found |= {"call_seconds": cell.seconds, "samples": cell.samples, "seconds": cell.seconds / batch}
    return found | {"bytes": None if cell.peak_bytes is None else cell.peak_bytes / batch}


def _shared(qk: torch.Tensor, v: torch.Tensor) -> Run:
    """Reformer: queries are keys."""
    qk, v = (x.detach().clone().requires_grad_() for x in (qk, v))
    draw = draw_rotations(qk.shape[2], qk.shape[3], rounds=4, generator=torch.Generator().manual_seed(0))
    rotations = draw.to(qk.device)
    return lambda: torch.autograd.grad(reformer_attention(qk, v, rotations=rotations), (qk, v), v.detach())


def _linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return linear_attention(q, k, v)  # type: ignore[return-value]


def _softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)
