"""`linattn report NAME`: pages of docs/ from what was measured and recorded. A report is a line of REPORTS."""

from __future__ import annotations

from collections.abc import Callable

import typer

from linattn.bench.image_report import images
from linattn.study.report import report_study

REPORTS: dict[str, Callable[..., None]] = {"images": images, "study": report_study}


def register(app: typer.Typer) -> None:
    reports = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
    for name, report in REPORTS.items():
        reports.command(name)(report)
    app.add_typer(reports, name="report", help="Write pages of docs from recorded measurements.")
