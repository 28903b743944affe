"""`linattn bench`: what `python -m linattn.bench` measures, under the same command as everything else."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    from linattn.bench.__main__ import app as bench

    app.add_typer(bench, name="bench", help="Measure this machine: the operator, and generation.")
