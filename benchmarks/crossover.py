"""Where linear attention in plain torch should change its way of working.

What    Two constants of linattn/ops/tiles.py decide its speed. Up to SINGLE_CHUNK tokens a sequence is one chunk, which
        is the quadratic order: fewer calls, more arithmetic. Longer ones are cut into chunks, and BLOCK_ELEMENTS says
        how many chunks are worked on at once: more of them make fewer calls, until they do not fit into the cache.
Why     The best values depend on the machine, and ours must be good on average, so they are measured: the rivals of a
        row take turns in one run. What a value costs is its regret: the geometric mean, over all rows, of its time
        over the best time in the row.
How     python benchmarks/crossover.py [--quick] [--device cuda]
        Four minutes on two cores that do nothing else.
Out     Two tables, the recommended constants beside the present ones, and all numbers as JSON in benchmarks/results/
        (<date>-<machine>-crossover.json). Write the constants into tiles.py by hand, and commit them with the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from linattn.bench.machine import environment
from linattn.bench.measure import Effort, Run, race
from linattn.bench.operator import MODES, Size, implementation, make_operands, prepare
from linattn.bench.report import Row, heading, save_json, seconds_in_words
from linattn.ops import tiles

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
SINGLE, CUT = "single", "cut"
ENOUGH = 1.02  # a smaller block within 2% of the best regret takes less memory


@dataclass(frozen=True)
class Settings:
    """Which sizes are measured. `blocks` are the candidates for BLOCK_ELEMENTS, by device."""

    widths: tuple[int, ...] = (32, 64, 128)
    short: tuple[int, ...] = (80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
    long: tuple[int, ...] = (2048, 16_384)
    cpu_blocks: tuple[int, ...] = tuple(2**n for n in range(14, 23))
    cuda_blocks: tuple[int, ...] = tuple(2**n for n in range(20, 29))
    batch: int = 1
    heads: int = 8
    budget: float = 0.5

    def blocks(self, device: str) -> tuple[int, ...]:
        return self.cuda_blocks if device == "cuda" else self.cpu_blocks


QUICK = Settings(short=(96, 160, 256, 512), long=(2048,), cpu_blocks=tuple(2**n for n in range(14, 23, 2)), budget=0.05)


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute: few sizes.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Measure the constants of linattn/ops/tiles.py on this machine, and recommend values."""
    settings = QUICK if quick else Settings()
    about = environment()
    print(heading(about), flush=True)
    with constants_kept():
        short = list(single_or_cut(settings, device))
        long = list(block_sizes(settings, device))
    recommended = {"SINGLE_CHUNK": best_single_chunk(short), "BLOCK_ELEMENTS": best_block(long)}
    present = {"SINGLE_CHUNK": tiles.SINGLE_CHUNK, "BLOCK_ELEMENTS": tiles.BLOCK_ELEMENTS[device]}
    report(short, recommended, present, device)
    data: dict[str, Any] = {"what": "crossover", "environment": about, "present": present, "recommended": recommended}
    data["single_or_cut"], data["block_elements"] = ([row.to_json() for row in rows] for rows in (short, long))
    print(f"written: {save_json(data, 'crossover-quick' if quick else 'crossover', out)}")


def single_or_cut(settings: Settings, device: str) -> Iterator[Row]:
    """Each short length as one chunk and cut into chunks; nothing for lengths that are not cut in either case."""
    print(f"\none chunk, or several   (B = {settings.batch}, H = {settings.heads})")
    print(f"{'D':>5} {'':18}{'T':>7}{'one chunk':>12}{'several':>12}{'one/several':>14}")
    for size in sizes(settings, settings.short, device):
        if not is_cut(size):
            continue
        run = call(size)
        runs = {SINGLE: with_constants(run, device, single=size.tokens), CUT: with_constants(run, device, single=0)}
        row = size.row(race(runs, Effort(settings.budget), device))
        one, several = row.cells[SINGLE].seconds, row.cells[CUT].seconds
        times = f"{seconds_in_words(one):>12}{seconds_in_words(several):>12}{one / several:>14.2f}"
        print(f"{row.width:>5} {row.mode:18}{row.tokens:>7,}{times}", flush=True)
        yield row


def block_sizes(settings: Settings, device: str) -> Iterator[Row]:
    """Each long length with each candidate for BLOCK_ELEMENTS."""
    blocks = settings.blocks(device)
    print("\ntime over the best in the row, by BLOCK_ELEMENTS")
    print(f"{'D':>5} {'':18}{'T':>7}{'best time':>12}" + "".join(f"{f'2^{math.log2(n):g}':>8}" for n in blocks))
    for size in sizes(settings, settings.long, device):
        run = call(size)
        runs = {str(n): with_constants(run, device, block=n) for n in blocks}
        row = size.row(race(runs, Effort(settings.budget), device))
        best = min(cell.seconds for cell in row.cells.values())
        ratios = "".join(f"{cell.seconds / best:>8.2f}" for cell in row.cells.values())
        print(f"{row.width:>5} {row.mode:18}{row.tokens:>7,}{seconds_in_words(best):>12}{ratios}", flush=True)
        yield row


def sizes(settings: Settings, tokens: tuple[int, ...], device: str) -> Iterator[Size]:
    for width in settings.widths:
        for mode in MODES:
            for time in tokens:
                yield Size(device, torch.float32, settings.batch, settings.heads, width, mode, time)


def call(size: Size) -> Run:
    return prepare(implementation("chunked"), make_operands(size), size.mode)


def with_constants(run: Run, device: str, *, single: int | None = None, block: int | None = None) -> Run:
    """The run with constants of its own: rivals take turns, so each sets them anew."""

    def call() -> Any:
        if single is not None:
            tiles.SINGLE_CHUNK = single
        if block is not None:
            tiles.BLOCK_ELEMENTS[device] = block
        return run()

    return call


@contextmanager
def constants_kept() -> Iterator[None]:
    single, blocks = tiles.SINGLE_CHUNK, dict(tiles.BLOCK_ELEMENTS)
    try:
        yield
    finally:
        tiles.SINGLE_CHUNK = single
        tiles.BLOCK_ELEMENTS.update(blocks)


def is_cut(size: Size) -> bool:
    """Whether SINGLE_CHUNK makes a difference at this length."""
    with constants_kept():
        tiles.SINGLE_CHUNK = 0
        made = tiles.spans(size.tokens, size.batch * size.heads, size.width, size.width, size.device)
    return len(made) > 1 or made[0].chunks > 1


def best_single_chunk(rows: list[Row]) -> int:
    """The largest length for one chunk that is regretted least over all rows; 0: always cut."""
    candidates = [0, *sorted({row.tokens for row in rows})]
    return min(candidates, key=lambda limit: regret(rows, lambda row: SINGLE if row.tokens <= limit else CUT))


def best_block(rows: list[Row]) -> int:
    """The smallest block whose regret is about the least."""
    regrets = {int(name): regret(rows, lambda row, name=name: name) for name in rows[0].cells}
    return min(block for block, value in regrets.items() if value <= ENOUGH * min(regrets.values()))


def regret(rows: list[Row], choice) -> float:
    """Geometric mean, over the rows, of the chosen cell's time over the best cell's."""
    logs = [math.log(row.cells[choice(row)].seconds / min(c.seconds for c in row.cells.values())) for row in rows]
    return math.exp(sum(logs) / max(len(logs), 1))


def crossing(rows: list[Row]) -> int:
    """The longest length at which one chunk is still faster, for rows of one width and mode; 0 where it never is."""
    return max((row.tokens for row in rows if row.cells[SINGLE].seconds < row.cells[CUT].seconds), default=0)


def report(short: list[Row], recommended: dict[str, int], present: dict[str, int], device: str) -> None:
    print("\none chunk is faster up to T =")
    for width, mode in dict.fromkeys((row.width, row.mode) for row in short):
        rows = [row for row in short if (row.width, row.mode) == (width, mode)]
        print(f"{crossing(rows):>9,}   D = {width}, {mode}")
    print(f"\nrecommended for {device}:")
    for name, value in recommended.items():
        print(f"  {name} = {value:,}   (now {present[name]:,})")


if __name__ == "__main__":
    app()
