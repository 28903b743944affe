"""Speech: the error rate of phonemes on held-out speakers, by the recipe of `linattn bench speech`, shortened."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from linattn.models import SpeechModel
from linattn.study.jobs import Missing
from linattn.study.learn import Pupil
from linattn.study.sizes import TaskSize
from linattn.train.config import Run
from linattn.train.speech.data import SpeechData, load_speech
from linattn.train.speech.evaluate import evaluate_speech
from linattn.train.speech.trainer import SpeechTrainer


class SpeechPupil(Pupil, SpeechTrainer):
    """SpeechTrainer that keeps its curve and writes nothing."""


@functools.lru_cache(maxsize=3)
def utterances(name: str, split: str, options: tuple[tuple[str, Any], ...]) -> SpeechData:
    """One split; features are kept in the system's folder for such things, for the other workers."""
    cache = Path(gettempdir()) / "linattn-study"
    cache.mkdir(exist_ok=True)
    try:
        return load_speech(name, split=split, cache_dir=str(cache), **dict(options))
    except ValueError as error:
        raise Missing(str(error)) from error
    except ImportError as error:
        raise Missing(f"{error}: pip install 'linattn[audio]'") from error


def learn(run: Run, task: TaskSize, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train and judge one recogniser. dev is as `linattn bench speech` has it: the screen's and the finals' split."""
    options = tuple((key, x) for key, x in task.data.items() if key != "name")
    pupil = SpeechPupil(run, lambda split: utterances(task.data["name"], split, options))  # type: ignore[arg-type]
    model: SpeechModel = pupil.learn()
    split = "dev" if settings["stage"] == "screen" else "test"
    judged = evaluate_speech(model, utterances(task.data["name"], split, options), batch=run.batch)
    return {
        "data": task.data["name"],
        "split": split,
        "score": judged["error_rate"],
        "speakers_interval": judged["interval"],
        "nats": judged["nats"],
        "parameters": model.num_parameters,
        "state_bytes": None,  # an encoder: it reads the whole utterance at once
        "curve": pupil.curve,
        "steps": run.steps,
    }
