"""Random features: a kernel as an expectation over w ~ N(0, I), estimated with m = `num_samples` draws of w.

    exp(q·k)         = E[ exp(w·q - |q|²/2) exp(w·k - |k|²/2) ]             `Favor`,   C = m
    exp(-|q - k|²/2) = E[ cos(w·q) cos(w·k) + sin(w·q) sin(w·k) ]           `Fourier`, C = 2m

Axes:  D key width   C features   *S whatever stands before
"""

import math

import torch

from linattn._typing import Float, Tensor
from linattn.features.base import LARGEST, FeatureMap, bounded_exp, check_count, check_width, widen, without_autocast


class RandomMap(FeatureMap):
    """A draw of m directions, the buffer `projection` (m, D): it is saved, loaded and copied with the module.

    One draw serves all heads. `generator` makes it repeatable; without one, torch's global CPU generator is used.
    Inputs beyond ±1e15 count as ±1e15.
    """

    projection: Tensor
    samples_per_dim: int  # m / D, unless told otherwise

    def __init__(
        self,
        dim: int,
        num_samples: int | None = None,
        *,
        generator: torch.Generator | None = None,
        orthogonal: bool = True,
    ) -> None:
        super().__init__()
        self.dim = check_count("dim", dim)
        self.num_samples = check_count(
            "num_samples", self.samples_per_dim * dim if num_samples is None else num_samples
        )
        self.orthogonal = orthogonal
        self.register_buffer("projection", torch.empty(self.num_samples, self.dim))
        self.redraw(generator)

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draws new directions in place. States made with the old ones are then of no use."""
        draw = draw_orthogonal if self.orthogonal else draw_independent
        self.projection.copy_(draw(self.num_samples, self.dim, generator))

    def project(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S m"]:
        check_width(self, self.dim, x.shape[-1])
        with without_autocast(x):
            return x @ self.projection.to(x.dtype).mT

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_samples={self.num_samples}, orthogonal={self.orthogonal}"


class Favor(RandomMap):
    """φ(x)_i = exp(w_i·x - |x|²/2) / √m, so that E[φ(q)·φ(k)] = exp(q·k): the kernel of softmax attention.

    Positive features; the exponent is held between that of the smallest normal number and 20, with gradient 0
    outside (an exponent of 20 takes an x near a w_i of length above 6). Scale D^-½, as in softmax attention. The
    error grows with exp(|q + k|²): large queries and keys need many samples. m = 2D unless told otherwise.

    FAVOR+: Choromanski et al. 2021 (arXiv 2009.14794). Directions orthogonal in blocks of D, with the lengths of
    Gaussian vectors, have the same expectation and a smaller variance than independent ones.
    """

    name = "favor"
    kind = "positive_features"
    samples_per_dim = 2

    def num_features(self, dim: int) -> int:
        check_width(self, self.dim, dim)
        return self.num_samples

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        x = widen(x).clamp(-LARGEST, LARGEST)
        # 1/√m stands inside the exponent, where the lower bound sees it
        offset = (x.square().sum(-1, keepdim=True) + math.log(self.num_samples)) / 2
        return bounded_exp(self.project(x) - offset)


class Fourier(RandomMap):
    """φ(x) = [cos(w_i·x), sin(w_i·x)] / √m, so that E[φ(q)·φ(k)] = exp(-|q - k|²/2): the Gaussian kernel.

    Signed: an estimate may fall below zero, so normalising by it needs an eps. Scale D^-½: where queries and keys
    are of equal lengths the kernel is then proportional to softmax attention's. m = D unless told otherwise.

    Rahimi, Recht 2007; in attention Peng et al. 2021 (arXiv 2103.02143); orthogonal directions Yu et al. 2016
    (arXiv 1610.09072).
    """

    name = "fourier"
    kind = "signed"
    samples_per_dim = 1

    def num_features(self, dim: int) -> int:
        check_width(self, self.dim, dim)
        return 2 * self.num_samples

    def forward(self, x: Float[Tensor, "*S D"]) -> Float[Tensor, "*S C"]:
        angle = self.project(widen(x).clamp(-LARGEST, LARGEST))
        return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(self.num_samples)


def draw_independent(num_samples: int, dim: int, generator: torch.Generator | None) -> Float[Tensor, "m D"]:
    """Rows w ~ N(0, I), in float64, drawn where the generator lives."""
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randn(num_samples, dim, generator=generator, device=device, dtype=torch.float64)


def draw_orthogonal(num_samples: int, dim: int, generator: torch.Generator | None) -> Float[Tensor, "m D"]:
    """Rows w ~ N(0, I) one by one, and orthogonal to each other within blocks of D rows."""
    lengths = draw_independent(num_samples, dim, generator).norm(dim=1, keepdim=True)
    num_blocks = math.ceil(num_samples / dim)
    blocks = draw_independent(num_blocks * dim, dim, generator).unflatten(0, (num_blocks, dim))
    q, r = torch.linalg.qr(blocks)
    # QR fixes q only up to signs; with those of r's diagonal q is uniform, without them it favours some directions
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return q.flatten(0, 1)[:num_samples] * lengths
