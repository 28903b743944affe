"""What the tests of the benchmark share: tiny sizes, and rows made by hand."""

from __future__ import annotations

from linattn.bench.measure import Cell, Effort
from linattn.bench.operator import Settings
from linattn.bench.report import Row

BRIEF = Effort(budget=0.001, least=1)
TINY = Settings(
    tokens=(8, 16, 1025),
    widths=(4, 8),
    long_tokens=(64, 128, 256),
    long_widths=(4,),
    heads=1,
    effort=BRIEF,
    long_effort=BRIEF,
    longest=1e9,
)


def row(tokens: int, width: int = 32, mode: str = "forward", device: str = "cpu", **seconds: float | Cell) -> Row:
    cells = {name: x if isinstance(x, Cell) else Cell(x, 5, 1000 * tokens) for name, x in seconds.items()}
    return Row(device, "float32", 1, 8, width, mode, tokens, cells)
