"""`linattn`: every command, and how its errors end.

Exit codes: 0 done, 1 it could not be done (the message says why and what to do), 2 the call was wrong, 130 interrupted.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import torch
import typer

import linattn
from linattn.cli import judging, making, measuring, packing, reporting, speech, studying, training
from linattn.cli.show import complain, warn

app = typer.Typer(
    name="linattn",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for module in (training, making, speech, judging, packing, measuring, studying, reporting):
    module.register(app)


def version(asked: bool | None) -> None:
    if asked:
        print(f"linattn {linattn.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def about(
    asked: Annotated[
        bool | None, typer.Option("--version", is_eager=True, callback=version, help="Which version.")
    ] = None,
) -> None:
    """Linear attention: train in parallel, generate in constant memory."""


def main() -> None:
    """Run a command; what a user can mend is one line, not a traceback."""
    warnings.showwarning = lambda message, *_, **__: warn(str(message))  # without the line of our source it stands in
    try:
        app(prog_name="linattn")
    except (ValueError, OSError) as error:
        complain(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
