"""`linattn report NAME`: a page of docs from what was recorded. Each report is a line of REPORTS."""

from __future__ import annotations

from collections.abc import Callable

import typer

from linattn.study.report import report_study

REPORTS: dict[str, Callable[..., None]] = {
    "study": report_study,
}


def register(app: typer.Typer) -> None:
    reports = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
    reports.callback()(lambda: None)  # a group, also with one report
    for name, report in REPORTS.items():
        reports.command(name)(report)
    app.add_typer(reports, name="report", help="Write a page of docs from recorded measurements.")
