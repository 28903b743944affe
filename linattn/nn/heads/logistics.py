"""A discretised mixture of logistics: each of the values 0 … V-1 has the mass of its bin (Salimans et al. 2017).

    x_v = 2v/(V-1) - 1,  h = 1/(V-1)        p(v) = Σ_k π_k [ σ((x_v + h - μ_k)/s_k) - σ((x_v - h - μ_k)/s_k) ]

where the first bin is open to -∞ and the last to +∞. With the two arguments b and a, and Δ = b - a = 2h/s, the mass is

    σ(b) - σ(a) = σ(b) σ(-a) (1 - exp(-Δ))

so its logarithm is a sum of three terms below zero: nothing cancels, in the far tails neither, and no approximation by
the density at the middle of the bin is needed (PixelCNN++, arXiv 1701.05517, takes one below 10⁻⁵).

Axes:  K components   V values   *S whatever stands before
"""

import math

import torch
from torch.nn import functional as F

from linattn._typing import Float, Tensor
from linattn.features.base import check_count, widen
from linattn.nn.heads.base import Head, check_params
from linattn.nn.heads.sampling import pick

MIN_LOG_SCALE = -7.0  # PixelCNN++'s: s is then an eighth of one of 256 bins, and a narrower one would say little more
MAX_LOG_SCALE = 30.0  # all mass is in the two open bins long before; far beyond, 1 - exp(-Δ) would be 0
FARTHEST = 1e15  # products with means within ±FARTHEST stay finite in float32


class MixtureOfLogistics(Head):
    """K logistics over V ordered values. Parameters, K of each: logits of π, means μ, log-scales log s.

    The values span [-1, 1]. log s is held within MIN_LOG_SCALE … MAX_LOG_SCALE and μ within ±FARTHEST, with gradient 0
    outside; so for all finite parameters the probabilities sum to 1 and the gradients are finite.
    """

    def __init__(self, width: int, mixtures: int = 10, values: int = 256) -> None:
        if check_count("values", values) < 2:
            raise ValueError(f"a mixture of logistics is over at least 2 values, got values={values}")
        super().__init__(width, values, 3 * check_count("mixtures", mixtures))
        self.mixtures = mixtures

    def log_prob_of(self, params: Tensor, values: Tensor) -> Tensor:
        """log Σ_k π_k p_k(v); params (*S, 3K) and values (*S) broadcast."""
        log_weights, centers, log_scales = self.components(params)
        precision = (-log_scales).exp()
        v = values.to(centers.dtype).unsqueeze(-1)
        first, last = v == 0, v == self.num_values - 1
        # Counted in bins from the middle value, edges are exact, and so are their distances to a center nearby.
        edge = v - (self.num_values - 1) / 2
        below = F.logsigmoid((edge + 0.5 - centers) * precision).masked_fill(last, 0)
        above = F.logsigmoid((centers - edge + 0.5) * precision).masked_fill(first, 0)
        inside = (-torch.expm1(-precision)).log().masked_fill(first | last, 0)
        return (log_weights + below + above + inside).logsumexp(-1)

    def log_probs_all(self, params: Float[Tensor, "*S P"]) -> Float[Tensor, "*S V"]:
        check_params(self, params)
        values = torch.arange(self.num_values, device=params.device)
        return self.log_prob_of(params.unsqueeze(-2), values)

    def draw(self, params: Tensor, uniforms: Tensor) -> Tensor:
        """A component, a point of its logistic, and the bin that the point lies in.

        Exactly p: the point lies in bin v with probability σ(b) - σ(a). The uniform picks the component, and what that
        leaves of it the point: O(K) work a value instead of the K V of a table.
        """
        log_weights, centers, log_scales = self.components(params.double())
        k, rest = pick(log_weights.exp(), uniforms)
        center, log_scale = (x.gather(-1, k.unsqueeze(-1)).squeeze(-1) for x in (centers, log_scales))
        point = center + log_scale.exp() * rest.logit(eps=2.0**-53)
        bin_ = (point + self.num_values / 2).floor()  # from the middle value to the first, and half a bin to its edge
        return bin_.clamp(0, self.num_values - 1).long()

    def components(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log π, then centers from the middle value and log-scales, both in bins."""
        half = (self.num_values - 1) / 2
        logits, means, log_scales = widen(params).chunk(3, -1)
        centers = means.clamp(-FARTHEST, FARTHEST) * half
        log_scales = log_scales.clamp(MIN_LOG_SCALE, MAX_LOG_SCALE) + math.log(half)
        return logits.log_softmax(-1), centers, log_scales

    def extra_repr(self) -> str:
        return f"mixtures={self.mixtures}, num_values={self.num_values}"
