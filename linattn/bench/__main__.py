"""`python -m linattn.bench`: measure this machine, print the tables, keep the numbers as JSON.

Without a command it measures the operator; `generate` measures what an image costs, `speech` trains recognisers.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from linattn.bench import generation_command, operator, speech, step_command, verdicts
from linattn.bench.choices import devices
from linattn.bench.measure import Effort
from linattn.bench.operator import QUICK, Settings
from linattn.bench.report import Report, Row, heading, long_head, long_line, table_head, table_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class OperatorFirst(TyperGroup):
    """Without the name of a command, it is `operator`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in (*self.commands, "--help")
        return super().parse_args(ctx, args if named else ["operator", *args])


app = typer.Typer(cls=OperatorFirst, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("generate")(generation_command.generate)
app.command("step")(step_command.step)
app.command("speech")(speech.main)


@app.command("operator")
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: few sizes, short measurements.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or all: the CPU, and a GPU where one is found.")] = "all",
    dtype: Annotated[str, typer.Option(help="auto (float32 on the CPU, bfloat16 on a GPU) or a torch dtype.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
    part: Annotated[str, typer.Option(help="all, or one of the two tables: table, long.")] = "all",
    budget: Annotated[float, typer.Option(help="Seconds for each rival of a row of the first table.")] = 0.6,
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Measure linear attention beside softmax attention, on this machine.

    First table: each implementation of `linear_attention`, the naive quadratic form among them, beside torch's
    scaled_dot_product_attention (causal): T from 32 to 65,536 tokens, D = 32, 64 and 128, forward and with gradients.
    Rivals of one row take turns, so ratios can be trusted where absolute times cannot. "≈" marks what would have taken
    too long or too much memory: it is extrapolated from the row above. Second table: linear attention alone, up to a
    million tokens. Then the claims, each with PASS or MISS.

    About ten minutes on two cores (half of that with --budget 0.3); leave the machine alone meanwhile. Ctrl-C keeps
    what was measured. The numbers go to benchmarks/results/ in a checkout, to the current folder elsewhere:
    DATE-MACHINE-operator.json.
    """
    if threads:
        torch.set_num_threads(threads)
    settings = chosen_part(QUICK if quick else Settings(effort=Effort(budget)), part)
    plain = json.loads(json.dumps(dataclasses.asdict(settings)))
    report = Report("operator" + "-quick" * quick + f"-{part}" * (part != "all"), plain)
    print(heading(report.environment))
    try:
        for place in devices(device):
            measure(report, settings, place, chosen_dtype(dtype, place))
    except KeyboardInterrupt:
        report.interrupted = True
        print("\ninterrupted: what was measured until now is kept")
    report.verdicts = verdicts.judge(report.table, report.long)
    print()
    for verdict in report.verdicts:
        print(f"{verdict.outcome}  {verdict.claim}: {verdict.seen}")
    print(f"\nwritten: {report.save(out)}")
    if report.interrupted:
        raise typer.Exit(130)


def measure(report: Report, settings: Settings, device: str, dtype: torch.dtype) -> None:
    """Both tables, printed and kept line by line."""
    names = [rival.name for rival in operator.rivals(device)]
    total = len(settings.widths) * len(operator.MODES) * len(settings.tokens)
    for row in progress(operator.measure_table(settings, device, dtype), f"{device}, table", total):
        if starts_block(row, report.table):
            print(f"\n{table_head(row, names)}")
        print(table_line(row, names), flush=True)
        report.table.append(row)
    total = len(settings.long_widths) * len(operator.MODES) * len(settings.long_tokens)
    for item in progress(operator.measure_long(settings, device, dtype), f"{device}, long sequences", total):
        if isinstance(item, str):
            print(f"\n{item}", flush=True)
            report.left_out.append(item)
            continue
        if starts_block(item, report.long):
            print(f"\n{long_head(item)}")
        print(long_line(item), flush=True)
        report.long.append(item)


def starts_block(row: Row, rows: list[Row]) -> bool:
    """Whether a row is the first of its device, width and mode."""
    return not rows or (row.device, row.width, row.mode) != (rows[-1].device, rows[-1].width, rows[-1].mode)


def chosen_part(settings: Settings, part: str) -> Settings:
    if part not in ("all", "table", "long"):
        raise typer.BadParameter(f"unknown part {part!r}: choose 'all', 'table' or 'long'")
    left_out = {"all": {}, "table": {"long_widths": ()}, "long": {"widths": ()}}[part]
    return dataclasses.replace(settings, **left_out)


def chosen_dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":  # softmax's fast kernels on a GPU take half precision only
        return torch.bfloat16 if device == "cuda" else torch.float32
    if name not in DTYPES:
        raise typer.BadParameter(f"unknown dtype {name!r}: choose 'auto' or one of {', '.join(map(repr, DTYPES))}")
    return DTYPES[name]


def progress(rows: Iterator, what: str, total: int) -> Iterator:
    """The same rows; while each is measured, a terminal shows which. No thread draws it: that would take time away."""
    start = time.monotonic()
    for done in range(total + 1):
        if sys.stderr.isatty():
            spent = time.monotonic() - start
            print(f"{what}: {done} of {total}, {spent:.0f} s", end="", file=sys.stderr, flush=True)
        row = next(rows, None)
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if row is None:
            return
        yield row


if __name__ == "__main__":
    app(prog_name="python -m linattn.bench")
