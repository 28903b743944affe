"""Feature maps: sim(q, k) = φ(√s q) · φ(√s k), the kernel of a linear attention written as a product of features.

The operator multiplies q and k by √s before the map (`default_scale`); a map sees only the result. Choose one by
name (`resolve`, `make`), or subclass `FeatureMap` (`ElementwiseMap` where φ acts on each number alone).
"""

from linattn.features.base import ElementwiseMap, FeatureMap
from linattn.features.elementwise import Elu, Exp, Identity, Relu, Softplus, SquaredRelu
from linattn.features.learned import T2R, Hedgehog, LearnedElu
from linattn.features.polynomial import Polynomial, Quadratic, QuadraticSymmetric, Taylor
from linattn.features.projections import Favor, Fourier
from linattn.features.registry import FEATURE_MAPS, make, resolve
from linattn.features.simplex import DPFP, Softmax

__all__ = [
    "DPFP",
    "FEATURE_MAPS",
    "T2R",
    "ElementwiseMap",
    "Elu",
    "Exp",
    "Favor",
    "FeatureMap",
    "Fourier",
    "Hedgehog",
    "Identity",
    "LearnedElu",
    "Polynomial",
    "Quadratic",
    "QuadraticSymmetric",
    "Relu",
    "Softmax",
    "Softplus",
    "SquaredRelu",
    "Taylor",
    "make",
    "resolve",
]
