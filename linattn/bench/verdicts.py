"""What linear attention claims of its speed and memory on the CPU, and whether the numbers bear it out.

A verdict is PASS or MISS, or OPEN where too little was measured to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby

from linattn.bench.operator import OURS
from linattn.bench.report import SOFTMAX, Row, Verdict

SHORT = 512  # tokens: from here on faster than softmax
SLOWEST = 5.0  # times softmax, below that
START, FLAT_FROM, END = 1_024, 16_384, 1_048_576  # tokens: where the cost of a token is compared
FLAT = 1.15  # the largest over the smallest cost of a token from FLAT_FROM to END
GROWTH = 1.5  # the largest time of a token from FLAT_FROM to END, over that at START
STEADY = 1.15  # the same for memory, over that at FLAT_FROM


def judge(table: Iterable[Row], long: Iterable[Row]) -> list[Verdict]:
    """All claims. They are about torch alone on the CPU: rows of a GPU do not count."""
    table = [row for row in table if row.device == "cpu" and OURS in row.ratios]
    series = _series(row for row in long if row.device == "cpu")
    table = [row for row in table if not row.cells[OURS].extrapolated]
    flat = f"flat within {FLAT - 1:.0%} from T = {FLAT_FROM:,} to {END:,}"
    growth, steady = f"{GROWTH:g}× of its value at T = {START:,}", f"{STEADY:g}× of their number at T = {FLAT_FROM:,}"
    return [
        _ratio_verdict(
            f"faster than SDPA at every T ≥ {SHORT}",
            [row for row in table if row.tokens >= SHORT],
            lambda ratio: ratio < 1,
        ),
        _ratio_verdict(
            f"at most {SLOWEST:g}× slower than SDPA below T = {SHORT}",
            [row for row in table if row.tokens < SHORT],
            lambda ratio: ratio <= SLOWEST,
        ),
        _series_verdict(f"time per token {flat}", series, _spread, FLAT),
        _series_verdict(f"time per token at most {growth}", series, _growth(seconds_a_token, START), GROWTH),
        _series_verdict(
            f"memory linear: bytes per token at most {steady}", series, _growth(bytes_a_token, FLAT_FROM), STEADY
        ),
    ]


def seconds_a_token(row: Row) -> float:
    return row.cells[OURS].seconds / row.tokens


def bytes_a_token(row: Row) -> float | None:
    peak = row.cells[OURS].peak_bytes
    return None if peak is None else peak / row.tokens


def _ratio_verdict(claim: str, rows: list[Row], holds: Callable[[float], bool]) -> Verdict:
    if not rows:
        return Verdict(claim, "OPEN", "not measured")
    worst = max(rows, key=lambda row: row.ratios[OURS])
    missed = sum(not holds(row.ratios[OURS]) for row in rows)
    about = sum(row.cells[SOFTMAX].extrapolated for row in rows)
    counted = f"{missed} of {len(rows)} rows miss it" if missed else f"{len(rows)} rows"
    counted += f", SDPA extrapolated in {about}" if about else ""
    seen = f"worst {worst.ratios[OURS]:.3g}× at T = {worst.tokens:,}, D = {worst.width}, {worst.mode} ({counted})"
    return Verdict(claim, "MISS" if missed else "PASS", seen)


def _series(rows: Iterable[Row]) -> list[list[Row]]:
    """The long rows of one width and mode belong together."""

    def key(row: Row) -> tuple[int, str]:
        return row.width, row.mode

    return [sorted(group, key=lambda row: row.tokens) for _, group in groupby(sorted(rows, key=key), key)]


def _series_verdict(
    claim: str, series: list[list[Row]], measure: Callable[[list[Row]], float | None], limit: float
) -> Verdict:
    """It holds where every width and mode stays within the limit, and at least one of them was measured to the END."""
    known = [(value, rows) for rows in series if (value := measure(rows)) is not None]
    if not known:
        return Verdict(claim, "OPEN", "not measured")
    worst, rows = max(known, key=lambda pair: pair[0])
    complete = any(rows[-1].tokens >= END for _, rows in known)
    outcome = "MISS" if worst > limit else "PASS" if complete else "OPEN"
    where = f"{rows[-1].mode}, D = {rows[-1].width}"
    seen = f"worst {worst:.2f}×, {where}{_not_to_the_end([rows[-1] for _, rows in known])}"
    return Verdict(claim, outcome, seen + (_of_that_the_system(rows, measure, worst) if worst > limit else ""))


def _of_that_the_system(rows: list[Row], measure: Callable[[list[Row]], float | None], worst: float) -> str:
    """What is left of a miss without the time that the system took, to hand out memory above all."""
    cells = [row.cells[OURS] for row in rows]
    if any(cell.system_seconds is None for cell in cells):
        return ""
    own = [replace(cell, seconds=cell.seconds - (cell.system_seconds or 0.0)) for cell in cells]
    left = measure([replace(row, cells={OURS: cell}) for row, cell in zip(rows, own, strict=True)])
    return "" if left is None or left == worst else f"; {left:.2f}× without the time the system took to hand out memory"


def _not_to_the_end(lasts: list[Row]) -> str:
    """Which series stopped before END, and where."""
    stops = {f"{last.mode}, D = {last.width}": last.tokens for last in lasts if last.tokens < END}
    if len(stops) == len(lasts) and len(set(stops.values())) == 1:
        return f"; measured up to {stops.popitem()[1]:,}"
    return "".join(f"; {name} up to {tokens:,}" for name, tokens in stops.items())


def _spread(rows: list[Row]) -> float | None:
    """The largest over the smallest time of a token from FLAT_FROM on; None with fewer than two."""
    values = [seconds_a_token(row) for row in rows if row.tokens >= FLAT_FROM]
    return max(values) / min(values) if len(values) > 1 else None


def _growth(quantity: Callable[[Row], float | None], start: int) -> Callable[[list[Row]], float | None]:
    """The largest value beyond `start` (from FLAT_FROM on) over the value there; None where one of them is missing."""

    def growth(rows: list[Row]) -> float | None:
        values = {row.tokens: value for row in rows if (value := quantity(row)) is not None}
        later = [value for tokens, value in values.items() if tokens > start and tokens >= FLAT_FROM]
        return max(later) / values[start] if later and values.get(start) else None

    return growth
