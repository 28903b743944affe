"""Angular locality-sensitive hashing (Kitaev, Kaiser, Levskaya 2020, section 2; Andoni et al. 2015).

    h(x) = argmax [xR; -xR]                                  R: random Gaussian (D, C), for each round and head

Vectors that point the same way likely share a bucket. C columns make 2C buckets; where more are needed, two factors
with columns of their own make a bucket of two: h = h₁ + 2C₁ · h₂. So a rotation stays small, and costs little.

Axes:  B batch   H heads   S tokens   D width   R rounds   C columns
"""

from __future__ import annotations

import math

import torch

from linattn._typing import Float, Int, Tensor
from linattn.ops.form import sum_dtype

COLUMNS = 32  # of each of the two factors of a rotation: up to 64 · 64 buckets
NOWHERE = 2**40  # the bucket of padding: sorted behind everything


def draw_rotations(
    num_heads: int,
    width: int,
    *,
    rounds: int = 4,
    columns: int = COLUMNS,
    generator: torch.Generator | None = None,
    device: str | torch.device | None = None,
) -> Float[Tensor, "R 2 H D C"]:
    """Random rotations for sequences of any length: a hash with few buckets uses the first columns of the same draw.

    Up to 2C buckets come from the first of the two factors alone, up to 4C² are pairs of one bucket of each.
    """
    drawn_on = device if generator is None else generator.device
    return torch.randn(rounds, 2, num_heads, width, columns, generator=generator, device=drawn_on).to(device)


def choose_rotations(
    qk: Float[Tensor, "B T H D"],
    rounds: int,
    rotations: Tensor | None,
    generator: torch.Generator | None,
    kept: Tensor | None,
) -> Float[Tensor, "B_or_1 R 2 H D C"]:
    """The draw of one call, for each row of the batch (`kept`, by a state) or for all (given, or drawn now)."""
    if sum(x is not None for x in (rotations, generator, kept)) > 1:
        raise ValueError(
            "rotations=, generator= and state= each say which draw to use (a state keeps its own): pass one"
        )
    heads, width = qk.shape[2:]
    if kept is None and rotations is None:
        return draw_rotations(heads, width, rounds=rounds, generator=generator, device=qk.device)[None]
    name, draw = ("rotations", rotations) if kept is None else ("state.rotations", kept)
    if not isinstance(draw, torch.Tensor) or not draw.is_floating_point():
        seen = draw.dtype if isinstance(draw, torch.Tensor) else type(draw).__name__
        raise ValueError(f"{name} must be a floating tensor, see draw_rotations; got {seen}")
    axes, want = "rounds, 2, heads, width, columns", (rounds, 2, heads, width)
    if kept is not None:
        axes, want = f"batch, {axes}", (qk.shape[0], *want)
    if draw.dim() != len(want) + 1 or tuple(draw.shape[:-1]) != want or draw.shape[-1] == 0:
        raise ValueError(
            f"{name} must be ({axes}) = ({', '.join(map(str, want))}, at least 1) for these operands and "
            f"rounds={rounds}, got {tuple(draw.shape)}"
        )
    if draw.device != qk.device:
        raise ValueError(f"{name} are on {draw.device} and qk on {qk.device}: move them to one device")
    return draw if kept is not None else draw[None]


@torch.no_grad()
def hash_tokens(
    x: Float[Tensor, "B H S D"],
    rotations: Float[Tensor, "B_or_1 2 H D C"],
    lengths: Int[Tensor, " B"] | None,
    chunk_length: int,
) -> Int[Tensor, "B H S"]:
    """The bucket of each token in one round; how many there are follows from the length of each row."""
    x, columns = x.to(sum_dtype(x.dtype)), rotations.shape[-1]
    most = -(-x.shape[2] // chunk_length)
    first, second = _halves(most, columns)
    widest = first if lengths is None else min(most, columns)
    both = torch.cat([rotations[:, 0, ..., :widest], rotations[:, 1, ..., :second]], -1)
    low, high = (x @ both.to(x.dtype)).split([widest, second], -1)
    if lengths is None:
        return _sharpest(low) + 2 * first * _sharpest(high)
    # Each row has its own number of buckets, by a table, so that no host needs to know the lengths.
    table = torch.tensor([_halves(chunks, columns) for chunks in range(most + 1)], device=x.device)
    halves = table[(lengths + chunk_length - 1) // chunk_length]
    buckets = _sharpest(low, halves[:, 0]) + 2 * halves[:, :1, None] * _sharpest(high, halves[:, 1])
    live = torch.arange(x.shape[2], device=x.device) < lengths[:, None, None]
    return torch.where(live, buckets, NOWHERE)


def _halves(chunks: int, columns: int) -> tuple[int, int]:
    """Half the number of buckets of each factor: two buckets a chunk, as products of two where the first is too few."""
    if chunks <= columns:
        return (0, 0) if chunks <= 1 else (chunks, 0)
    half = min(columns, math.ceil(math.sqrt(chunks / 2)))
    return half, half


def _sharpest(side: Float[Tensor, "B H S C"], half: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B H S"]:
    """argmax [xR; -xR] from xR, of each row by its first `half` columns only; 0 where there are none."""
    columns = side.shape[-1]
    if columns == 0:
        return torch.zeros(side.shape[:3], dtype=torch.int64, device=side.device)
    if half is not None:
        side = side.masked_fill(torch.arange(columns, device=side.device) >= half[:, None, None, None], 0)
    column = side.abs().argmax(-1, keepdim=True)
    size = columns if half is None else half[:, None, None]
    return column.squeeze(-1) + size * (side.gather(-1, column).squeeze(-1) < 0)
