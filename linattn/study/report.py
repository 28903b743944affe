"""`linattn report study`: docs/study.md and its plots, from what was recorded.

The page between its two marks is made by code from the numbers alone; what stands outside of them is kept as it is, and
is where a person's remarks go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn.bench.machine import results_folder
from linattn.bench.report import heading
from linattn.state import write_atomically
from linattn.study import sections
from linattn.study.folder import load
from linattn.study.jobs import Study
from linattn.train.run_folder import writing

BEGIN = "<!-- begin: made by `linattn report study`, remarks belong below its end -->"
END = "<!-- end: made by `linattn report study` -->"
REMARKS = "\n## Remarks\n\nWritten by hand, and kept when the page is made again.\n"
QUICK = """\
**This is the quick study: tiny models, seconds of training each, two CPU cores. The full study, on a GPU, is
still to be made.** The figures here say how the maps compare at this size and budget, and nothing about larger ones.
The full study is made by

```bash
linattn study --minutes 9 --workers 6    # again and again until it is complete; it goes on by itself
linattn report study runs/study
```

and this one, in under five minutes, by `linattn study --quick` and `linattn report study`.
"""
PLACES = (Path("runs/study"), Path("runs/study-quick"))


def report_study(
    source: Annotated[
        Path | None,
        typer.Argument(help="A study's folder or JSON. Default: runs/study, runs/study-quick, or the newest recorded."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page; its plots go to the folder beside it.")] = Path("docs/study.md"),
) -> None:
    """Plots, tables and plain conclusions of `linattn study`, as one page.

    Also from a study that is not complete: what is missing is named. The plots need matplotlib (`linattn[plots]`).

        linattn report study
        linattn report study benchmarks/results/2026-11-20-amd-epyc-2-cores-study-quick.json --out /tmp/study.md
    """
    source = source or newest()
    study = load(source)
    if not study.results:
        raise ValueError(f"{source} holds no results yet: run `linattn study` for longer")
    plots = draw(study, out)
    text = f"{BEGIN}\n{page(study, plots, source)}{END}\n"
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, merged(out, text).encode())
    print(f"written: {out}, {len(plots)} plots in {out.with_suffix('')}")


def newest() -> Path:
    """The study at hand."""
    recorded = sorted(
        results_folder().glob("*-study*.json"), key=lambda path: (path.name[:10], "quick" not in path.name)
    )
    for path in (*(place for place in PLACES if (place / "study.jsonl").is_file()), *reversed(recorded)):
        return path
    raise ValueError("no study was recorded here: run `linattn study --quick`, or name its folder or JSON")


def draw(study: Study, out: Path) -> dict[str, str]:
    """The plots, each by its name as the path that the page links to."""
    try:
        import matplotlib as mpl

        from linattn.study import plots

        assert mpl
    except ImportError as error:
        raise ValueError(
            f"the report needs matplotlib for its plots ({error}): pip install 'linattn[plots]'"
        ) from error
    folder = out.with_suffix("")
    return {name: f"{folder.name}/{path.name}" for name, path in plots.draw_all(study, folder).items()}


def merged(out: Path, made: str) -> str:
    """The page with its generated part replaced; a new one, or one without marks, begins with it."""
    before = out.read_text(encoding="utf-8") if out.exists() else ""
    if BEGIN in before and END in before:
        head, _, rest = before.partition(BEGIN)
        return head + made.rstrip("\n") + rest.partition(END)[2]
    return made + (("\n" + before) if before.strip() else REMARKS)


def page(study: Study, plots: dict[str, str], source: Path) -> str:
    """The generated part."""
    parts = [
        "# Which feature map for which task\n",
        opening(study, source),
        sections.decisions(study),
        sections.surprises(study),
        *sections.tasks(study, plots),
        sections.copying(study, plots),
        sections.short(study, plots),
        sections.lengths(study, plots),
        sections.scaling(study, plots),
        sections.method(study),
        sections.left_out(study),
    ]
    return "\n".join(part for part in parts if part)


def opening(study: Study, source: Path) -> str:
    """What this is: which study, where and when, and what it is not."""
    environments = [session["environment"] for session in study.sessions]
    where = heading(environments[-1]).splitlines()[:2] if environments else ["machine unknown"]
    when = ", ".join(dict.fromkeys(environment["date"][:10] for environment in environments))
    lines = [QUICK if study.scale == "quick" else "Made by `linattn study` and `linattn report study`.\n"]
    if study.to_come is None or study.to_come > 0:
        lines += ["**It is not complete:** what follows is what was recorded until now.\n"]
    lines += [f"{len(study.results):,} small runs, {when}: {'; '.join(where)}. Recorded in `{source.name}`.\n"]
    return "\n".join(lines)
