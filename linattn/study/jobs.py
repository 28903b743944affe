"""A small run as a value, and what was found by all of them.

A job is the grain of the study: it is done or it is not, and one that was interrupted is done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARTS = ("copy", "recall", "images", "text", "speech", "music", "short", "lengths", "scaling")


@dataclass(frozen=True)
class Job:
    """One small run.

    part, name   together its id, which is what a result is found by
    kind         what does it: a key of kinds.KINDS
    settings     everything else that it needs, plain values
    rank         jobs of a lower one come first
    seconds      what it takes, roughly: only proportions matter, a session finds out how fast its machine is
    alone        nothing else may run beside it, since it is timed
    """

    part: str
    name: str
    kind: str
    settings: Mapping[str, Any]
    rank: int
    seconds: float
    alone: bool = False

    @property
    def id(self) -> str:
        return f"{self.part}/{self.name}"


@dataclass
class Study:
    """What is known: results by the id of their job, in the order in which they came.

    A result is {"id", "part", "settings", "session", "seconds", "found"}. `missing` has parts without their data, and
    `failed` jobs that broke, with the reasons; both are tried again by the next session.
    """

    scale: str
    sessions: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    to_come: float | None = None  # seconds of jobs that were not done when this was written; 0: the study is complete

    def of(self, part: str, **settings: Any) -> list[dict[str, Any]]:
        """Results of a part whose settings hold these values."""
        return [
            result
            for result in self.results.values()
            if result["part"] == part and all(result["settings"].get(key) == x for key, x in settings.items())
        ]

    def settled(self, job: Job) -> bool:
        """Whether nothing more is to be done about a job now."""
        return job.id in self.results or job.id in self.failed or job.part in self.missing

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the environment that the files of all measurements have."""
        return {
            "what": "study" + f"-{self.scale}" * (self.scale != "full"),
            "environment": self.sessions[-1]["environment"] if self.sessions else {},
            "scale": self.scale,
            "to_come": self.to_come,
            "sessions": self.sessions,
            "missing": self.missing,
            "failed": self.failed,
            "results": list(self.results.values()),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Study:
        made = cls(data["scale"], list(data["sessions"]), to_come=data.get("to_come"))
        made.results = {result["id"]: result for result in data["results"]}
        made.missing, made.failed = dict(data["missing"]), dict(data["failed"])
        return made


class Missing(Exception):
    """Data that a part needs is not there: the part is left out, and named."""
