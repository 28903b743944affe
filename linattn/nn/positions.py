"""Where a token stands: sines and cosines, learned tables, rotations. All take integer positions, and keep no buffer.

    θ_i = base^(-2i/W),   i = 0 … W/2 - 1
    sinusoids   p_t = [sin tθ_0, cos tθ_0, sin tθ_1, cos tθ_1, …]             (Vaswani et al. 2017, arXiv 1706.03762)
    rotary      (x_i, x_{i+R/2}) turned by the angle tθ_i, for R of D numbers (Su et al. 2021, arXiv 2104.09864)

Angles are float64: in float32 position 10⁷ times θ is only known to half a radian. What comes of them is rounded once,
to the dtype of the tokens, so a step at token t adds what the parallel form adds at t, in bfloat16 as well.

Axes:  B batch   T time   H heads   D width of a head   R its rotated part   E width of value embeddings   W width
       *P T positions, (T,) for all rows or (B, T) for each
"""

import inspect

import torch
from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.features.base import check_count, widen
from linattn.nn.checks import check_integers, check_range


class Position(nn.Module):
    """Value embeddings and their positions to what the first block reads.

    name          what it is called in POSITIONS
    width         W, of the result
    value_width   E, the width that value embeddings must have
    """

    name: str

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = check_count("width", width)
        self.value_width = self.width

    def forward(self, x: Float[Tensor, "B T E"], positions: Int[Tensor, "*P T"]) -> Float[Tensor, "B T W"]:
        check_positions(x, positions)
        if x.shape[-1] != self.value_width:
            raise ValueError(
                f"position {self.name!r} of width {self.width} needs value embeddings of width {self.value_width}, "
                f"got {tuple(x.shape)}: make the embedding {self.value_width} wide (`value_width`)"
            )
        return self.place(x, positions.long())

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define place(x, positions)")

    def extra_repr(self) -> str:
        return f"width={self.width}"


class NoPosition(Position):
    """x as it is: causal attention alone tells early from late, weakly; or rotary does, in the attention layer."""

    name = "none"

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class SinusoidalConcat(Position):
    """[x, p_t], half the width each: the paper's."""

    name = "sine_concat"

    def __init__(self, width: int, *, base: float = 10000.0) -> None:
        super().__init__(width)
        if self.width % 4:
            raise ValueError(
                f"position {self.name!r} gives half the width to pairs of sine and cosine: "
                f"width must be a multiple of 4, got {width}"
            )
        self.value_width = self.width // 2
        self.base = check_base(base)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        p = sinusoids(positions, self.width - self.value_width, base=self.base, dtype=x.dtype)
        return torch.cat([x, p.expand_as(x)], -1)


class SinusoidalAdd(Position):
    """x + p_t (Vaswani et al. 2017)."""

    name = "sine_add"

    def __init__(self, width: int, *, base: float = 10000.0) -> None:
        super().__init__(width)
        check_even("width", self.width)
        self.base = check_base(base)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + sinusoids(positions, self.width, base=self.base, dtype=x.dtype)


class LearnedPosition(Position):
    """x + a learned vector for each of `max_length` positions, at first N(0, 0.02²)."""

    name = "learned"

    def __init__(self, width: int, *, max_length: int) -> None:
        super().__init__(width)
        self.max_length = check_count("max_length", max_length)
        self.table = learned_table(self.max_length, self.width, std=0.02)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        way_out = f"make it with a max_length of more than {self.max_length}, or take 'sine_add', which has no end"
        check_range(f"positions of {self.name!r}", positions, 0, self.max_length - 1, way_out)
        return x + self.table(positions).to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, max_length={self.max_length}"


class RowColumnChannel(Position):
    """x + row[r] + column[c] + channel[h] for an image in raster order: position = (r · columns + c) · channels + h.

    Three learned tables, at first N(0, 0.5²): nearly as loud as value embeddings are, which are N(0, 1). With 0.02 it
    takes hundreds of steps until places are heard (digits after 400: 2.19 bits/dim, with 0.5 2.04).
    """

    name = "row_column_channel"

    def __init__(self, width: int, *, rows: int, columns: int, channels: int = 1) -> None:
        super().__init__(width)
        self.rows = check_count("rows", rows)
        self.columns = check_count("columns", columns)
        self.channels = check_count("channels", channels)
        sizes = (self.rows, self.columns, self.channels)
        self.row, self.column, self.channel = (learned_table(size, self.width, std=0.5) for size in sizes)

    def place(self, x: Tensor, positions: Tensor) -> Tensor:
        size = self.rows * self.columns * self.channels
        way_out = f"it is made for images of {self.rows} rows, {self.columns} columns and {self.channels} channels"
        check_range(f"positions of {self.name!r}", positions, 0, size - 1, way_out)
        pixel, channel = positions // self.channels, positions % self.channels
        row, column = pixel // self.columns, pixel % self.columns
        return x + (self.row(row) + self.column(column) + self.channel(channel)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, rows={self.rows}, columns={self.columns}, channels={self.channels}"


POSITIONS: dict[str, type[Position]] = {
    cls.name: cls for cls in (NoPosition, SinusoidalConcat, SinusoidalAdd, LearnedPosition, RowColumnChannel)
}


def make_position(name: str, width: int, **options: object) -> Position:
    """A new position module of that name and width.

    >>> make_position("sine_concat", 256).value_width
    128
    >>> make_position("learned", 256, max_length=784)
    LearnedPosition(
      width=256, max_length=784
      (table): Embedding(784, 256)
    )
    """
    if name not in POSITIONS:
        raise ValueError(f"unknown position {name!r}; the names are {', '.join(POSITIONS)}")
    known = inspect.signature(POSITIONS[name]).parameters.values()
    allowed = {p.name: p.default is p.empty for p in known if p.kind is p.KEYWORD_ONLY}
    wrong = [option for option in options if option not in allowed]
    missing = [option for option, required in allowed.items() if required and option not in options]
    if wrong or missing:
        complaint = f"has no option {wrong[0]!r}" if wrong else f"needs {', '.join(f'{m}=' for m in missing)}"
        choices = "its options are " + ", ".join(allowed) if allowed else "it has no options"
        raise ValueError(f"position {name!r} {complaint}; {choices}")
    return POSITIONS[name](width, **options)  # type: ignore[arg-type]


def sinusoids(
    positions: Int[Tensor, "*P"], width: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*P W"]:
    """[sin tθ_0, cos tθ_0, sin tθ_1, …] for each position t, negative ones too."""
    a = angles(positions, width, base)
    return torch.stack([a.sin(), a.cos()], -1).flatten(-2).to(dtype)


def rotary(
    x: Float[Tensor, "B T H D"], positions: Int[Tensor, "*P T"], *, base: float = 10000.0, width: int | None = None
) -> Float[Tensor, "B T H D"]:
    """x with the pairs (x_i, x_{i+R/2}) of its first R = `width` numbers turned by tθ_i; all D of them unless told.

    The product of two rotated vectors depends on how far apart they stand, not on where:
    R_m q · R_n k = q · R_{n-m} k. The pairs lie half of R apart, as in the weights of most released models.
    """
    check_positions(x, positions)
    width = check_even("the rotated width", x.shape[-1] if width is None else check_count("width", width))
    if width > x.shape[-1]:
        raise ValueError(f"width={width} is more than the heads have: x is {tuple(x.shape)}")
    a = angles(positions, width, check_base(base)).unsqueeze(-2)  # one angle for all heads
    left, right = widen(x[..., :width]).chunk(2, -1)
    cos, sin = a.cos().to(left.dtype), a.sin().to(left.dtype)
    turned = torch.cat([left * cos - right * sin, left * sin + right * cos], -1)
    return torch.cat([turned.to(x.dtype), x[..., width:]], -1)


def angles(positions: Int[Tensor, "*P"], width: int, base: float) -> Float[Tensor, "*P I"]:
    """tθ_i in float64."""
    check_even("width", width)
    i = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    return positions.double().unsqueeze(-1) * base ** (-i / width)


def learned_table(length: int, width: int, *, std: float) -> nn.Embedding:
    table = nn.Embedding(length, width)
    nn.init.normal_(table.weight, std=std)
    return table


def check_positions(x: Tensor, positions: Tensor) -> None:
    """Integers, one for each token: a float would have lost its last digits."""
    check_integers("positions", positions)
    B, T = x.shape[:2]
    if positions.shape not in ((T,), (1, T), (B, T)):
        raise ValueError(
            f"positions must be (T,) = ({T},) or (B, T) = ({B}, {T}) for x {tuple(x.shape)}, "
            f"got {tuple(positions.shape)}"
        )


def check_even(name: str, width: int) -> int:
    if width % 2:
        raise ValueError(f"{name} must be even, as sine and cosine come in pairs, got {width}")
    return width


def check_base(base: float) -> float:
    if not base > 1:
        raise ValueError(f"base must be more than 1, got {base}: 10000 is usual")
    return float(base)
