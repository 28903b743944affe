"""A softmax over V values: p(v) = exp(l_v) / Σ_u exp(l_u), where the parameters are the logits l.

Axes:  W width of the features   P = V values   *S whatever stands before
"""

import torch
from torch import nn
from torch.nn import functional as F

from linattn._typing import Float, Tensor
from linattn.features.base import widen
from linattn.nn.heads.base import Head, check_params, check_width


class Categorical(Head):
    """A softmax, which knows no order among its values."""

    def __init__(self, width: int, num_values: int = 256, *, bias: bool = True) -> None:
        super().__init__(width, num_values, num_values, bias=bias)

    def log_prob_of(self, params: Tensor, values: Tensor) -> Tensor:
        logits = widen(params).reshape(-1, self.num_values)
        return -F.cross_entropy(logits, values.reshape(-1).long(), reduction="none").view(values.shape)

    def log_probs_all(self, params: Float[Tensor, "*S P"]) -> Float[Tensor, "*S V"]:
        check_params(self, params)
        return widen(params).log_softmax(-1)


class TokenHead(Categorical):
    """A softmax over a vocabulary, whose weight may be that of the token embedding (Press, Wolf 2017).

    The product runs in the dtype of the features, or autocast's, since it is the largest of many models; the logits
    are then float32. A tied weight belongs to the embedding alone: it is saved once, and moves with it.
    """

    def __init__(
        self, width: int, vocabulary: int, *, embedding: nn.Embedding | None = None, bias: bool = False
    ) -> None:
        if embedding is not None and embedding.weight.shape != (vocabulary, width):
            raise ValueError(
                f"a tied embedding must be (vocabulary, width) = ({vocabulary}, {width}), "
                f"got {tuple(embedding.weight.shape)}: project the features to its width, or do not tie"
            )
        super().__init__(width, vocabulary, bias=bias)
        self.tied = () if embedding is None else (embedding,)  # a tuple, so that it is not registered a second time
        if embedding is not None:
            self.linear.register_parameter("weight", None)

    @property
    def weight(self) -> Tensor:
        return self.tied[0].weight if self.tied else self.linear.weight

    def forward(self, features: Float[Tensor, "*S W"]) -> Float[Tensor, "*S P"]:
        check_width(self, self.width, features)
        bias: torch.Tensor | None = self.linear.bias
        bias = None if bias is None else bias.to(features.dtype)
        return widen(F.linear(features, self.weight.to(features.dtype), bias))
