"""Polynomial kernels, exactly. With α over the multisets of n of the D indices (n!/α! is their multinomial number)

    (q·k)ⁿ = Σ_α (n!/α!) q^α k^α,      so      φ(x)_α = √(n!/α!) x^α,      C = binomial(D + n - 1, n)

Axes:  D key width   C features   *S whatever stands before
"""

import math

import torch

from linattn._typing import Float, Int, Tensor
from linattn.features.base import FeatureMap, check_count, widen

MAX_DEGREE = 8  # x = 1e4 to the ninth power, with its weight, leaves little of fp32's range


class Quadratic(FeatureMap):
    """φ(x) = x ⊗ x, kernel (q·k)²: D² features, half of them twins, in the order of an outer product.

    Nonnegative kernel, scale 1 (any scale cancels in the normaliser). Katharopoulos et al. 2020 (arXiv 2006.16236),
    section 3.2.1. `QuadraticSymmetric` has the same kernel with about half the features.
    """

    name = "quadratic"
    kind = "nonnegative_kernel"

    def num_features(self, dim: int) -> int:
        return dim * dim

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        x = widen(x)
        return (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


class Polynomial(FeatureMap):
    """Kernel (q·k + constant)^degree, by the multisets of the D numbers and √constant.

    C = binomial(D + degree, degree), or binomial(D + degree - 1, degree) without a constant. The kernel is
    nonnegative for an even degree, signed for an odd one; scale 1.
    """

    name = "polynomial"

    def __init__(self, degree: int = 2, constant: float = 1.0) -> None:
        super().__init__()
        if check_count("degree", degree) > MAX_DEGREE:
            raise ValueError(f"degree must be 1 to {MAX_DEGREE}, got {degree}: higher powers overflow float32")
        if not 0 <= constant < math.inf:
            raise ValueError(f"constant must be nonnegative and finite (its square root is a feature), got {constant}")
        self.degree = degree
        self.constant = float(constant)
        self.kind = "signed" if degree % 2 else "nonnegative_kernel"

    def num_features(self, dim: int) -> int:
        return math.comb(dim + self.degree - (self.constant == 0), self.degree)

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        x = widen(x)
        if self.constant:
            x = torch.cat([torch.full_like(x[..., :1], math.sqrt(self.constant)), x], -1)
        return symmetric_power(x, self.degree)

    def extra_repr(self) -> str:
        return f"degree={self.degree}, constant={self.constant}"


class QuadraticSymmetric(Polynomial):
    """φ(x) = x_i² and √2 x_i x_j for i < j, kernel (q·k)²: D (D + 1) / 2 features.

    Nonnegative kernel, scale 1. `Polynomial(degree=2, constant=0)` under a name of its own.
    """

    name = "quadratic_symmetric"

    def __init__(self) -> None:
        super().__init__(degree=2, constant=0.0)


class Taylor(FeatureMap):
    """φ(x) = [1, x, x_i² / √2, x_i x_j for i < j], kernel 1 + q·k + (q·k)²/2: exp(q·k) up to third order.

    Nonnegative kernel: it is (1 + (1 + q·k)²) / 2, never below 1/2. Scale D^-½, as in softmax attention.
    Arora et al. 2023 and 2024 ("Zoology", arXiv 2312.04927; "Based", arXiv 2402.18668), there with D² features.
    """

    name = "taylor"
    kind = "nonnegative_kernel"

    def num_features(self, dim: int) -> int:
        return 1 + dim + dim * (dim + 1) // 2

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        x = widen(x)
        return torch.cat([torch.ones_like(x[..., :1]), x, symmetric_power(x * 0.5**0.25, 2)], -1)


def symmetric_power(x: Float[Tensor, "*S D"], degree: int) -> Float[Tensor, "*S C"]:
    """√(n!/α!) x^α for the multisets α of n = `degree` indices, in lexicographic order."""
    table, power = tables(x, degree)
    for indices in table:
        power = power * x.gather(-1, indices.expand(*x.shape[:-1], -1))
    return power


TABLES: dict[tuple[int, int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}


def tables(x: Float[Tensor, "*S D"], degree: int) -> tuple[Int[Tensor, "degree C"], Float[Tensor, " C"]]:
    """The multisets for x and √(n!/α!), kept from call to call: to make them takes longer than one step's features.

    What is traced, faked or captured in a CUDA graph makes its own: a kept table would outlive its trace.
    """
    kept = type(x) is Tensor and not torch.compiler.is_compiling()
    key = (x.shape[-1], degree, x.device, x.dtype)
    if kept and key in TABLES:
        return TABLES[key]
    with torch.inference_mode(False):  # an inference tensor could not serve a backward pass later
        table = multisets(x.shape[-1], degree, x.device)
        made = table, multinomials(table, x.dtype).sqrt()
    if kept and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        TABLES[key] = made
    return made


def multisets(dim: int, degree: int, device: torch.device) -> Int[Tensor, "degree C"]:
    """Columns i_1 ≤ i_2 ≤ … ≤ i_degree, all of them, in lexicographic order. Nothing is copied to the device."""
    index = torch.arange(dim, device=device)
    table, counts, total = index[None], torch.ones_like(index), dim
    for n in range(2, degree + 1):
        # Columns of length n that begin with i: i, then one of length n - 1 that begins with i or later.
        # Those are the end of the shorter table, from where its columns that begin with i start.
        longer = counts.flip(0).cumsum(0).flip(0)
        starts = counts.cumsum(0) - counts - (longer.cumsum(0) - longer)
        total = total * (dim + n - 1) // n  # binomial(dim + n - 1, n), also for the compiler's symbolic dim
        first = torch.repeat_interleave(index, longer, output_size=total)
        tail = torch.arange(total, device=device) + starts[first]
        table, counts = torch.cat([first[None], table[:, tail]]), longer
    return table


def multinomials(table: Int[Tensor, "degree C"], dtype: torch.dtype) -> Float[Tensor, " C"]:
    """n!/α! of each column: the product over places p of p / (how often its index has been seen, p included)."""
    seen = torch.ones_like(table[0])
    number = torch.ones_like(table[0], dtype=dtype)
    for p in range(1, len(table)):
        seen = torch.where(table[p] == table[p - 1], seen + 1, 1)
        number = number * (p + 1) / seen
    return number
