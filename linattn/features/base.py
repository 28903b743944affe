"""The two base classes of feature maps, and the bounds that keep features positive and finite.

Axes:  H heads   D key width   C features   *S whatever stands before
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, get_args

import torch
from torch import nn

from linattn._typing import Float, Tensor

Kind = Literal["positive_features", "nonnegative_kernel", "signed"]
KINDS: tuple[str, ...] = get_args(Kind)

MAX_EXPONENT = 20.0  # exp(20) = 4.9e8: a million such keys still sum to a small part of fp32's range
LARGEST = 1e15  # inputs of a matmul are held within ±LARGEST, so that squares and sums of them stay finite in fp32


class FeatureMap(nn.Module):
    """φ: D numbers to C features, and what the operator must know of them.

    name          what it is called in FEATURE_MAPS, by which a kernel knows it; a subclass of your own is called by
                  its class, and never inherits the name of a map that a kernel would put in its place.
    kind          "positive_features": every feature > 0 for every finite input;
                  "nonnegative_kernel": φ(q)·φ(k) ≥ 0, features may be zero or negative;
                  "signed": φ(q)·φ(k) may be negative, so normalising by it needs an eps.
    elementwise   φ acts on each number alone, and the kernels may fuse it.

    A subclass sets `kind` and writes `num_features` and `forward`; it must act on each row by itself, since a map
    that looks at other positions sees the future.
    """

    name: str
    kind: Kind
    elementwise: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    def num_features(self, dim: int) -> int:
        """C, for keys of width `dim`."""
        raise NotImplementedError(f"{type(self).__name__} must define num_features(dim)")

    def default_scale(self, dim: int) -> float:
        """s: the operator multiplies q and k by √s before the map, unless it is told another scale."""
        return 1.0

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        """φ(x), in float32 whatever the dtype of x, under autocast too; in float64 for float64."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x)")


class ElementwiseMap(FeatureMap):
    """φ on each number alone, so C = D, with its derivative for backward passes written by hand."""

    elementwise = True

    def num_features(self, dim: int) -> int:
        return dim

    def derivative(self, x: Float[Tensor, "*S"], y: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """dφ/dx from the scaled input x and y = φ(x), both in the dtype that `forward` returns."""
        raise NotImplementedError(f"{type(self).__name__} must define derivative(x, y)")


def widen(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def lowest_exponent(dtype: torch.dtype) -> float:
    """log(finfo(dtype).tiny) rounded up: the exp of it is just above the smallest normal number."""
    return -708.396 if dtype == torch.float64 else -87.3365


def bounded_exp(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """exp(x), between the smallest normal number and exp(20); the gradient is 0 where a bound holds."""
    # exp_ writes into what clamp has just made, which autograd does not keep
    return x.clamp(lowest_exponent(x.dtype), MAX_EXPONENT).exp_()


def elu_plus_one(x: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """x + 1 for x > 0, exp(x) otherwise, never below the smallest normal number (there the gradient is 0)."""
    # relu and not clamp_min(0): at x = 0, a common input, clamp_min also counts itself and the gradient would be 2
    low = x.clamp(lowest_exponent(x.dtype), 0.0).exp_()
    return low + x.relu() if low.requires_grad else low.add_(x.relu())  # autograd keeps the exponential


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Matrix products inside run in the dtype of their inputs."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if kind in AUTOCAST else nullcontext()


# Kinds of devices that know autocast ("meta" does not). Asked once: torch 2.11 cannot compile the question.
AUTOCAST = frozenset(
    kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla") if torch.amp.is_autocast_available(kind)
)


def check_count(name: str, value: int) -> int:
    """`value` if it can count something."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def check_width(feature_map: nn.Module, made_for: int, got: int) -> None:
    """A map with weights or a draw serves one width."""
    if got != made_for:
        name = type(feature_map).__name__
        raise ValueError(f"this {name} was made for width {made_for}, got width {got}; make one with {name}({got})")
