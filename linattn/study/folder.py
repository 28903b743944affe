"""Everything that a study knows, in one file of lines, FOLDER/study.jsonl: copy it away, bring it back, go on.

    {"line": "begun", "scale": "quick"}
    {"line": "session", "number": 1, "environment": {…}, …}
    {"line": "result", "id": "text/screen/elu/16/0", …}         see `Study`

A line is on the disk before the next job begins. A last line that was cut off is as if it had never been. What was
missing or failed is said by the session that found it so, and tried again by the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linattn.bench.machine import environment
from linattn.study.jobs import Study
from linattn.train.metrics import Metrics, read_lines
from linattn.train.run_folder import alone, writing

FILE = "study.jsonl"


class Folder:
    """A study under way, held by one process."""

    def __init__(self, path: Path, scale: str):
        self.path, self.study = path, Study(scale)

    @contextmanager
    def opened(self) -> Iterator[Folder]:
        """The folder with what it holds so far; closed, and free for others, at the end."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with alone(self.path):
            lines = read_lines(self.path / FILE)
            known = study_of(lines, self.path / FILE) if lines else None
            if known is not None and known.scale != self.study.scale:
                raise ValueError(
                    f"{self.path} holds a study that is {known.scale}, not {self.study.scale}: go on with that one, or "
                    f"choose another --folder"
                )
            self.file = Lines(self.path)
            try:
                if known is None:
                    self.file.write({"line": "begun", "scale": self.study.scale})
                else:
                    self.study = known
                yield self
            finally:
                self.file.close()

    def begin_session(self, **about: Any) -> None:
        """A new sitting: where it is, and with what. What was missing or failed before is forgotten."""
        session = {"number": len(self.study.sessions) + 1, "environment": environment(), **about}
        self._write({"line": "session", **session})

    def add(self, line: dict[str, Any]) -> None:
        """A line of kind "result", "missing" or "failed"."""
        self._write(line)
        self.file.sync()

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(line)
        apply(self.study, line)


class Lines(Metrics):
    """The file of lines; what was cut off is taken out when it is opened."""

    def __init__(self, folder: Path):
        path = folder / FILE
        if path.exists():
            with writing(path):
                whole = path.read_bytes()
                keep = whole.rfind(b"\n") + 1
                if keep < len(whole):
                    with open(path, "r+b") as file:
                        file.truncate(keep)
        self.path = path
        with writing(path):
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115


def study_of(lines: list[dict[str, Any]], where: Path) -> Study:
    if lines[0].get("line") != "begun":
        raise ValueError(f"{where} is no file of `linattn study`: its first line does not say how it was begun")
    study = Study(lines[0]["scale"])
    for line in lines[1:]:
        apply(study, line)
    return study


def apply(study: Study, line: dict[str, Any]) -> None:
    """What a line adds to what is known."""
    content = {key: x for key, x in line.items() if key != "line"}
    if line["line"] == "session":
        study.sessions.append(content)
        study.missing, study.failed = {}, {}
    elif line["line"] == "result":
        study.results[line["id"]] = content
    elif line["line"] == "missing":
        study.missing[line["part"]] = line["why"]
    elif line["line"] == "failed":
        study.failed[line["id"]] = line["why"]
    else:
        raise ValueError(f"a study has no lines of the kind {line['line']!r}: was it written by a newer version?")


def load(path: Path) -> Study:
    """A study as it was recorded: the folder, its file of lines, or the JSON that was made of it."""
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise ValueError(f"there is no study at {path}: run `linattn study --quick`, or name a folder or a .json file")
    if path.suffix == ".jsonl":
        lines = read_lines(path)
        if not lines:
            raise ValueError(f"{path} is empty: run `linattn study` in its folder again")
        return study_of(lines, path)
    try:
        return Study.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no study that was recorded: {type(error).__name__}: {error}") from error
