"""A head of one value a token: features to parameters by a linear layer, parameters to a distribution of V values.

    params = features A + b        p(v) = exp log_probs_all(params)_v        loss = -log p(target)

Axes:  B batch   T time   W width of the features   P parameters of a distribution   V values
       *S whatever stands before
"""

import torch
from torch import nn
from torch.nn import functional as F

from linattn._typing import Float, Int, Shaped, Tensor
from linattn.features.base import check_count, widen, without_autocast
from linattn.nn.checks import check_range
from linattn.nn.heads.sampling import check_finite, check_options, pick, reshaped, uniforms_for


class Head(nn.Module):
    """What the heads share. A subclass defines `log_prob_of` and `log_probs_all`.

    Parameters and probabilities are float32 whatever the features are, under autocast too; float64 for float64.
    Values are integers of any kind, bytes (uint8) as well; sampled ones are int64.
    """

    def __init__(self, width: int, num_values: int, num_params: int, *, bias: bool = True) -> None:
        super().__init__()
        self.width = check_count("width", width)
        self.num_values = check_count("num_values", num_values)
        self.num_params = num_params
        self.linear = nn.Linear(width, num_params, bias=bias)

    def forward(self, features: Float[Tensor, "*S W"]) -> Float[Tensor, "*S P"]:
        """The parameters that `log_prob`, `log_probs_all` and `sample` take."""
        check_width(self, self.width, features)
        x = widen(features)
        bias = None if self.linear.bias is None else self.linear.bias.to(x.dtype)
        with without_autocast(x):
            return F.linear(x, self.linear.weight.to(x.dtype), bias)

    def loss(self, features: Float[Tensor, "*S W"], targets: Shaped[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """Nats of each target: -log p(target). At padding give any target, and leave its nats out with `where`."""
        return -self.log_prob(self(features), targets)

    def log_prob(self, params: Float[Tensor, "*S P"], values: Shaped[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """log p(value), in nats."""
        check_params(self, params)
        check_range("values", values, 0, self.num_values - 1, "padding is marked by a mask, not by a value")
        return self.log_prob_of(params, values)

    def log_prob_of(self, params: Tensor, values: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define log_prob_of(params, values)")

    def log_probs_all(self, params: Float[Tensor, "*S P"]) -> Float[Tensor, "*S V"]:
        """log p(v) for every value v."""
        raise NotImplementedError(f"{type(self).__name__} must define log_probs_all(params)")

    @torch.no_grad()
    def sample(
        self,
        params: Float[Tensor, "*S P"],
        *,
        uniforms: Float[Tensor, "*S"] | None = None,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> Int[Tensor, "*S"]:
        """Values drawn from p^(1/temperature), of its top_k most probable values, of these from the top_p mass.

        With none of the three it is p itself, the distribution of `log_prob`. temperature=0 is the most probable
        value. Each value uses one of `uniforms`, numbers in [0, 1), best in float64; without them they are drawn from
        the generator, or from torch's own.
        """
        check_params(self, params)
        check_options(temperature, top_k, top_p)
        check_finite(params)
        if temperature == 0:
            return self.log_probs_all(params).argmax(-1)
        uniforms = uniforms_for(params.shape[:-1], params.device, uniforms, generator)
        if temperature == 1 and top_k is None and top_p is None:
            return self.draw(params, uniforms)
        return pick(reshaped(self.log_probs_all(params), temperature, top_k, top_p), uniforms)[0]

    def draw(self, params: Tensor, uniforms: Tensor) -> Tensor:
        """One value from each distribution as it is."""
        return pick(reshaped(self.log_probs_all(params)), uniforms)[0]

    def extra_repr(self) -> str:
        return f"num_values={self.num_values}"


def check_width(head: nn.Module, width: int, features: Tensor) -> None:
    if features.shape[-1] != width:
        raise ValueError(f"this {type(head).__name__} reads features of width {width}, got {tuple(features.shape)}")


def check_params(head: Head, params: Tensor) -> None:
    if params.shape[-1] != head.num_params:
        name = type(head).__name__
        raise ValueError(
            f"expected {head.num_params} parameters a value on the last axis, the output of this {name}, "
            f"got {tuple(params.shape)}: pass head(features), not the features"
        )
