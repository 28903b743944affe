"""`linattn study`: the study of maps, lengths and tasks (linattn/study)."""

from __future__ import annotations

import typer

from linattn.study.command import study


def register(app: typer.Typer) -> None:
    app.command()(study)
