"""Bits per dimension of a sequence of values v_1 … v_L, and the first value, which the model is given.

    headline    Σ_{i=2}^{L} -log₂ p(v_i | v_1 … v_{i-1}) / (L - 1)                     (the paper's)
    in full     ( -log₂ p(v_1) + Σ_{i=2}^{L} -log₂ p(v_i | v_1 … v_{i-1}) ) / L

Axes:  B batch   N values that the model predicted, v_2 … v_L   V values
"""

import math

import torch
from torch import nn

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.features.base import check_count
from linattn.nn.checks import check_range
from linattn.nn.heads.sampling import pick, uniforms_for


def bits_per_dim(nats: Float[Tensor, "B N"], first: Float[Tensor, "B"] | None = None) -> Float[Tensor, "B"]:
    """Bits per value of each row, in float64, from the nats of v_2 … v_L: a mean over those.

    With `first`, the nats of v_1 (`-FirstValue.log_prob`), a mean over all L.

    >>> bits_per_dim(torch.full((1, 3), math.log(4)), first=torch.full((1,), math.log(1024)))
    tensor([4.0000], dtype=torch.float64)
    """
    if not nats.shape[-1]:
        raise ValueError(f"no values to take the mean of: nats is {tuple(nats.shape)}; a row is the nats of v_2 … v_L")
    total, count = nats.double().sum(-1), nats.shape[-1]
    if first is not None:
        total, count = total + first.double(), count + 1
    return total / (count * math.log(2))


class FirstValue(nn.Module):
    """p(v_1), from the counts of it in the training set: what codes the first value, and what generation draws it from.

    One more observation is spread evenly over all values, so that none is impossible; before `fit` p is uniform.
    """

    counts: Tensor

    def __init__(self, num_values: int = 256) -> None:
        super().__init__()
        self.num_values = check_count("num_values", num_values)
        # Integers: a buffer of probabilities would be rounded whenever the model is cast to bfloat16.
        self.register_buffer("counts", torch.zeros(num_values, dtype=torch.int64))

    def fit(self, values: Shaped[Tensor, "N"]) -> None:
        """Count the first values of the training set, from anew."""
        check_range("values", values, 0, self.num_values - 1, "FirstValue(num_values) says how many there are")
        self.counts.copy_(torch.bincount(values.long(), minlength=self.num_values))

    @property
    def probabilities(self) -> Float[Tensor, "V"]:
        """p(v_1) in float64."""
        p = self.counts.double() + 1 / self.num_values
        return p / p.sum()

    def log_prob(self, values: Shaped[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """log p(v_1) in nats, float64."""
        check_range("values", values, 0, self.num_values - 1, "FirstValue(num_values) says how many there are")
        return self.probabilities.log()[values.long()]

    def sample(
        self, num: int, *, uniforms: Float[Tensor, "N"] | None = None, generator: torch.Generator | None = None
    ) -> Int[Tensor, "N"]:
        """`num` first values; uniforms and generator as for the heads."""
        uniforms = uniforms_for(torch.Size([num]), self.counts.device, uniforms, generator)
        return pick(self.probabilities.expand(num, -1), uniforms)[0]

    def extra_repr(self) -> str:
        return f"num_values={self.num_values}"
