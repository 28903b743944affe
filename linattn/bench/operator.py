"""The operator's benchmark: linear attention, each implementation, beside softmax and beside the quadratic form.

Softmax is `torch.nn.functional.scaled_dot_product_attention`, causal, given its own layout (B, H, T, D): it pays for no
transpose. All rivals of a row are measured in one race. A rival that would take too long or too much memory is
extrapolated from the row before (time × 4 for twice the tokens, where it grows with T²), and marked so.

Axes:  B batch   T time   H heads   D width of queries, keys and values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from linattn import backends, linear_attention
from linattn._typing import Float, Tensor
from linattn.bench.machine import available_memory
from linattn.bench.measure import Cell, Effort, Run, race
from linattn.bench.report import SOFTMAX, Row

OURS = "chunked"  # torch alone: what runs everywhere, and what the verdicts are about
MODES = ("forward", "forward+backward")
MEMORY_SHARE = 0.8  # of the available memory, for what is measured


@dataclass(frozen=True)
class Settings:
    """What to measure, and for how long."""

    tokens: tuple[int, ...] = tuple(2**n for n in range(5, 17))
    widths: tuple[int, ...] = (32, 64, 128)
    long_tokens: tuple[int, ...] = tuple(2**n for n in range(10, 21, 2))
    long_widths: tuple[int, ...] = (32, 64)
    batch: int = 1
    heads: int = 8
    effort: Effort = field(default_factory=Effort)
    long_effort: Effort = field(default_factory=lambda: Effort(budget=1.0, once=60.0))
    longest: float = 20.0  # seconds: a call that would take longer is extrapolated


QUICK = Settings(
    tokens=(32, 128, 512, 2048),
    long_tokens=(2**10, 2**14, 2**16),
    effort=Effort(budget=0.1, least=1, once=0.3),
    long_effort=Effort(budget=0.3, least=1),
    longest=2.0,
)


@dataclass(frozen=True)
class Rival:
    """One way to compute attention from q, k, v.

    Its time grows with T^power. `tables` tells how many T × T tables are alive at once, forward and with gradients.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    power: int = 1
    tables: tuple[int, int] = (0, 0)
    most_tokens: int | None = None
    heads_first: bool = False


@dataclass(frozen=True)
class Size:
    """One problem: everything but who solves it."""

    device: str
    dtype: torch.dtype
    batch: int
    heads: int
    width: int
    mode: str
    tokens: int

    def row(self, cells: dict[str, Cell]) -> Row:
        dtype = str(self.dtype).removeprefix("torch.")
        return Row(self.device, dtype, self.batch, self.heads, self.width, self.mode, self.tokens, cells)


def rivals(device: str = "cpu") -> list[Rival]:
    """All that can run on that device: ours first, softmax last."""
    here = {name: can_run for name, (can_run, _) in backends().items()}
    here["triton"] &= device == "cuda"  # its interpreter runs on the CPU, for tests
    available = [name for name, can_run in here.items() if can_run]
    ours = [implementation(name) for name in sorted(available, key=lambda name: name != OURS)]
    return [*ours, Rival(SOFTMAX, _softmax, power=2, heads_first=True)]


def implementation(name: str) -> Rival:
    """Linear attention in one of its ways."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, impl=name)  # type: ignore[arg-type,return-value]

    quadratic = {"power": 2, "tables": (3, 4)} if name == "quadratic" else {}
    # One token after the other in Python: the numbers of longer sequences are known from those of short ones.
    return Rival(name, run, **quadratic, most_tokens=1024 if name == "recurrent" else None)


def measure_table(settings: Settings, device: str, dtype: torch.dtype) -> Iterator[Row]:
    """The table row by row, as it is measured."""
    for width in settings.widths[:1]:
        _warm_up(Size(device, dtype, settings.batch, settings.heads, width, MODES[1], tokens=32))
    for width in settings.widths:
        for mode in MODES:
            before = None
            for tokens in settings.tokens:
                size = Size(device, dtype, settings.batch, settings.heads, width, mode, tokens)
                before = measure_row(size, before, settings)
                yield before


def measure_row(size: Size, before: Row | None, settings: Settings) -> Row:
    """One size: a race among those for whom it is not too much, and the others extrapolated from the row before."""
    entered = [rival for rival in rivals(size.device) if rival.most_tokens is None or size.tokens <= rival.most_tokens]
    room = MEMORY_SHARE * available_memory(size.device)
    guesses = {rival.name: extrapolate(rival, before, size.tokens) for rival in entered}

    def too_much(rival: Rival) -> bool:
        guess = guesses[rival.name]
        return (guess is not None and guess.seconds > settings.longest) or bytes_needed(rival, size) > room

    running = [rival for rival in entered if not too_much(rival)]
    operands = {first: make_operands(size, first) for first in {rival.heads_first for rival in running}}
    runs = {rival.name: prepare(rival, operands[rival.heads_first], size.mode) for rival in running}
    cells = {**guesses, **race(runs, settings.effort, size.device)}
    return size.row({name: cell for name, cell in cells.items() if cell is not None})


def measure_long(settings: Settings, device: str, dtype: torch.dtype) -> Iterator[Row | str]:
    """Linear attention alone on long sequences; and why a length was left out."""
    for width in settings.long_widths:
        for mode in MODES:
            sizes = [Size(device, dtype, settings.batch, settings.heads, width, mode, t) for t in settings.long_tokens]
            room = MEMORY_SHARE * available_memory(device)
            needed = {size: bytes_needed(implementation(OURS), size) for size in sizes}
            for size in sizes:
                if needed[size] > room:
                    yield (
                        f"{mode}, D = {width}, T = {size.tokens:,} was left out: it needs {needed[size] / 1e9:.1f} GB, "
                        f"and {room / 1e9:.1f} GB can be used"
                    )
            yield from measure_series([size for size in sizes if needed[size] <= room], settings)


def measure_series(sizes: list[Size], settings: Settings) -> list[Row]:
    """Linear attention at sizes that differ in their length only, all in one race."""
    if not sizes:
        return []
    rival, longest = implementation(OURS), max(sizes, key=lambda size: size.tokens)
    operands = make_operands(longest)  # shorter sequences are the beginning of the longest: they take no more memory
    runs = {str(size.tokens): prepare(rival, first_tokens(operands, size.tokens), size.mode) for size in sizes}
    cells = race(runs, settings.long_effort, longest.device)
    return [size.row({rival.name: cells[str(size.tokens)]}) for size in sizes]


def prepare(rival: Rival, operands: tuple[Tensor, Tensor, Tensor], mode: str) -> Run:
    """The call to be measured. The gradient of the output is v: random and dense, and it costs no further memory."""
    if mode == "forward":
        return lambda: rival.run(*operands)
    q, k, v = (x.detach().requires_grad_() for x in operands)
    return lambda: torch.autograd.grad(rival.run(q, k, v), (q, k, v), v.detach())


def make_operands(size: Size, heads_first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, contiguous, (B, T, H, D) or (B, H, T, D)."""
    generator = torch.Generator(size.device).manual_seed(size.tokens)
    axes = (size.heads, size.tokens) if heads_first else (size.tokens, size.heads)
    shape, options = (size.batch, *axes, size.width), {"device": size.device, "dtype": size.dtype}
    q, k, v = (torch.randn(shape, generator=generator, **options) for _ in range(3))
    return q, k, v


def first_tokens(
    operands: tuple[Float[Tensor, "B T H D"], Float[Tensor, "B T H D"], Float[Tensor, "B T H D"]], tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x[:, :tokens] for x in operands)
    return q, k, v


def extrapolate(rival: Rival, before: Row | None, tokens: int) -> Cell | None:
    """The time at `tokens` from that of a shorter row; memory is not guessed."""
    known = None if before is None else before.cells.get(rival.name)
    if before is None or known is None:
        return None
    return Cell(known.seconds * (tokens / before.tokens) ** rival.power, samples=0, extrapolated=True)


def bytes_needed(rival: Rival, size: Size) -> int:
    """A bound on the memory of one call with its operands."""
    backward = size.mode != "forward"
    operand = size.batch * size.tokens * size.heads * size.width * size.dtype.itemsize
    table = size.batch * size.heads * size.tokens**2 * max(4, size.dtype.itemsize)
    # q, k, v and the output, with their gradients but that of the output, and a tenth more for the sums
    return round(1.1 * operand * (7 if backward else 4)) + table * rival.tables[backward]


def _warm_up(size: Size) -> None:
    """Threads and libraries are started before anything is measured: they would count as memory of the first rival."""
    for rival in rivals(size.device):
        prepare(rival, make_operands(size, rival.heads_first), size.mode)()


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)
