"""`linattn bench`: what `python -m linattn.bench` measures, under the same command as everything else."""

from __future__ import annotations

import typer

from linattn.bench.__main__ import app as bench


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench", help="Measure this machine: the operator, and generation.")
