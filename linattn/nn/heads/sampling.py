"""Drawing values by the inverse of their cumulative distribution: value i for u in [Σ_{j<i} p_j, Σ_{j≤i} p_j).

One uniform number makes one value, so whoever passes the same uniforms (a compiled step, a CUDA graph) gets the same
values. All is float64: in float32 the cumulative sum of a vocabulary is off by more than its rare tokens weigh.

Axes:  V values   *S whatever stands before
"""

import math

import torch

from linattn._typing import Float, Int, Tensor
from linattn.nn.checks import readable


def pick(
    weights: Float[Tensor, "*S V"], uniforms: Float[Tensor, "*S"]
) -> tuple[Int[Tensor, "*S"], Float[Tensor, "*S"]]:
    """Index i with probability weights_i / Σ weights; and what i leaves of u, again uniform in [0, 1]."""
    weights = weights.double()
    ends = weights.cumsum(-1)
    total = ends[..., -1:]
    # Rounding may carry u · total up to total itself, which lies beyond the last value that has any weight.
    u = torch.minimum(uniforms.double().unsqueeze(-1) * total, total.nextafter(torch.zeros_like(total)))
    index = (ends <= u).sum(-1, keepdim=True)
    end, weight = ends.gather(-1, index), weights.gather(-1, index)
    rest = 1 - (end - u) / weight
    return index.squeeze(-1), rest.clamp(0, 1).squeeze(-1)


def reshaped(
    log_probs: Float[Tensor, "*S V"], temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Float[Tensor, "*S V"]:
    """The distribution that is drawn from: p^(1/temperature), then its top_k values, then of these the top_p mass.

    top_k    the k most probable values; of equals, the lower ones
    top_p    the fewest most probable values that together have at least this probability
    """
    p = (log_probs.double() / temperature).softmax(-1)
    if (top_k is None or top_k >= p.shape[-1]) and (top_p is None or top_p == 1):
        return p
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[..., top_k:] = 0
    if top_p is not None:
        mass_before = ranked.cumsum(-1) - ranked
        ranked = ranked.where(mass_before < top_p * ranked.sum(-1, keepdim=True), 0)
    kept = torch.zeros_like(p).scatter(-1, order, ranked)
    return kept / kept.sum(-1, keepdim=True)


def uniforms_for(
    shape: torch.Size, device: torch.device, uniforms: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """The uniforms given, or float64 ones drawn where the generator lives."""
    if uniforms is None:
        where = device if generator is None else generator.device
        return torch.rand(shape, generator=generator, dtype=torch.float64, device=where).to(device)
    if generator is not None:
        raise ValueError("uniforms and a generator were both given: the uniforms leave nothing to draw; pass one")
    if uniforms.shape != shape or not uniforms.dtype.is_floating_point:
        raise ValueError(
            f"uniforms must be one float in [0, 1) for each value, {tuple(shape)}, "
            f"got {tuple(uniforms.shape)} {uniforms.dtype}"
        )
    return uniforms


def check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (the most probable value) or positive and finite, got {temperature}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a positive integer, or None for all values, got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], or be None for all values, got {top_p}")


def check_finite(params: Tensor) -> None:
    """NaN would be drawn as value 0 for ever. Read where that costs no synchronisation."""
    if readable(params) and not params.isfinite().all():
        bad = int((~params.isfinite()).sum())
        raise ValueError(f"cannot sample: {bad} of {params.numel()} parameters of the distribution are not finite")
