"""Feature maps by name: the dict, `resolve` for the operator, `make` for layers."""

import difflib
import inspect

import torch

from linattn.features.base import KINDS, FeatureMap
from linattn.features.elementwise import Elu, Exp, Identity, Relu, Softplus, SquaredRelu
from linattn.features.learned import T2R, Hedgehog, LearnedElu
from linattn.features.polynomial import Polynomial, Quadratic, QuadraticSymmetric, Taylor
from linattn.features.projections import Favor, Fourier
from linattn.features.simplex import DPFP, Softmax

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    cls.name: cls
    for cls in (
        *(Elu, Relu, SquaredRelu, Softplus, Exp, Identity),
        *(Softmax, DPFP),
        *(Quadratic, QuadraticSymmetric, Polynomial, Taylor),
        *(Favor, Fourier),
        *(Hedgehog, T2R, LearnedElu),
    )
}


def resolve(feature_map: str | FeatureMap) -> FeatureMap:
    """The map that a name stands for, one shared instance of it; a map is returned as it is.

    >>> resolve("elu") is resolve("elu")
    True
    """
    if isinstance(feature_map, FeatureMap):
        return check_kind(feature_map)
    if not isinstance(feature_map, str):
        raise ValueError(f"feature_map must be a name or a FeatureMap module, got {feature_map!r}; {choices()}")
    shared = SHARED.get(feature_map)
    if shared is None:
        made_once = find(feature_map).__name__
        raise ValueError(
            f"feature map {feature_map!r} has a draw or weights of its own, so a name does not say which: construct it "
            f"once, feature_map = linattn.features.{made_once}(dim), and pass that module at every call"
        )
    return shared


def make(
    name: str, dim: int, num_heads: int = 1, generator: torch.Generator | None = None, **options: object
) -> FeatureMap:
    """A new map of that name for heads of width `dim`.

    `num_heads` and `generator` reach the maps that have weights per head, or a draw; the others need neither.

    >>> make("favor", 64, num_samples=256).num_features(64)
    256
    """
    cls = find(name)
    parameters = parameters_of(cls)
    given = {"dim": dim, "num_heads": num_heads, "generator": generator}
    allowed = [p for p in parameters if p not in given]
    for option in options:
        if option not in allowed:
            known = "its options are " + ", ".join(allowed) if allowed else "it has no options"
            raise ValueError(f"feature map {name!r} has no option {option!r}; {known}")
    return cls(**{p: value for p, value in given.items() if p in parameters}, **options)


def find(name: str) -> type[FeatureMap]:
    """The class of that name."""
    if name not in FEATURE_MAPS:
        close = difflib.get_close_matches(name, FEATURE_MAPS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown feature map {name!r}; {hint}{choices()}")
    return FEATURE_MAPS[name]


def choices() -> str:
    return "the names are " + ", ".join(FEATURE_MAPS)


def check_kind(feature_map: FeatureMap) -> FeatureMap:
    """A map of the user's own must say which kind it is: normalising depends on it."""
    kind = getattr(feature_map, "kind", None)
    if kind not in KINDS:
        raise ValueError(f"{type(feature_map).__name__}.kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return feature_map


def parameters_of(cls: type[FeatureMap]) -> list[str]:
    """The names that its constructor takes."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(cls).parameters.values() if p.kind not in several]


# Without a state, so one instance serves everyone.
SHARED: dict[str, FeatureMap] = {name: cls() for name, cls in FEATURE_MAPS.items() if "dim" not in parameters_of(cls)}
