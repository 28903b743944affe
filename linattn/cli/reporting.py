"""`linattn report NAME`: pages of docs/ from what was measured and recorded. A report is a line here."""

from __future__ import annotations

import typer

from linattn.bench.image_report import images

REPORTS = {"images": images}
report = typer.Typer(help="Write pages of docs/ from recorded measurements.", no_args_is_help=True)
for name, command in REPORTS.items():
    report.command(name)(command)


def register(app: typer.Typer) -> None:
    app.add_typer(report, name="report")
