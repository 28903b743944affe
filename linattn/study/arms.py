"""What is compared: every feature map, softmax attention and Reformer, in models of equally many parameters.

A name of FEATURE_MAPS is linear attention with that map; "softmax-attention" and "reformer-attention" are the rivals
(there is a map that is called softmax as well).

Maps with weights of their own pay for them: the feed-forward part of their layers is narrower by as many weights, to
the nearest column. What is not equal, and is reported beside the result, is the state: more features have more of it.

Signed maps need to be told how to divide. `identity` is not normalised, as it is used elsewhere. `fourier` estimates a
kernel that is positive, with noise that may make a sum of it negative: its divisor is held away from zero.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from linattn.features import FEATURE_MAPS, make

SOFTMAX, REFORMER, LINEAR = "softmax-attention", "reformer-attention", "elu"
EXTRA: dict[str, dict[str, Any]] = {"identity": {"normalize": False}, "fourier": {"eps": 0.1}}
# The same kernel in another form, at a higher price: what lies between the two is what rounding alone does.
TWINS = {"quadratic": "quadratic_symmetric"}


def screened() -> list[str]:
    """Everybody: softmax attention and the default map first."""
    return [SOFTMAX, LINEAR, *(name for name in FEATURE_MAPS if name != LINEAR)]


def layer_of(arm: str) -> dict[str, Any]:
    """What an arm changes in a layer."""
    if arm in (SOFTMAX, REFORMER):
        return {"attention": arm.removesuffix("-attention")}
    return {"attention": "linear", "feature_map": arm, **EXTRA.get(arm, {})}


def changes(
    arm: str, *, width: int, head_width: int, ff_width: int, bias: bool = True, **others: Any
) -> dict[str, Any]:
    """The changes of a preset that make it the model of an arm, with as many parameters as that of any other."""
    heads = width // head_width
    ff_width -= round(own_weights(arm, head_width, heads) / (2 * width + bias))
    return {"width": width, "num_heads": heads, "ff_width": ff_width, "bias": bias, **layer_of(arm), **others}


def own_weights(arm: str, head_width: int, heads: int) -> int:
    """Of a layer's map."""
    if arm not in FEATURE_MAPS:
        return 0
    return sum(weight.numel() for weight in make(arm, head_width, heads).parameters())


@functools.cache
def num_features(arm: str, head_width: int) -> int | None:
    """C of a head; None where there is no map."""
    if arm not in FEATURE_MAPS:
        return None
    with torch.random.fork_rng(devices=()):  # random numbers that a run draws must not depend on what was asked before
        return make(arm, head_width).num_features(head_width)


def label(arm: str) -> str:
    """As a reader is shown it."""
    if arm == "softmax":
        return "softmax (the map)"
    return {SOFTMAX: "softmax attention", REFORMER: "Reformer"}.get(arm, arm)


def kin(arm: str) -> str:
    """The map whose kernel this is."""
    return TWINS.get(arm, arm)
