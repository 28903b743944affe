"""How well a recogniser hears: the rate of wrong labels, and how sure that is.

    error_rate      changes that make what was said of what was heard, over labels said; greedy decoding, or a beam
    interval        95% of it, by drawing speakers anew
    word_error_rate    the same in words, where the labels are characters with spaces
    heard_before    the rate over sentences that also occur in the training set, and over_new over all others

Axes:  B batch   T frames   S labels
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import torch

from linattn._typing import Float, Tensor
from linattn.models import SpeechModel
from linattn.nn.heads.beam import beam_search
from linattn.train.speech.data import SpeechData, in_order
from linattn.train.speech.error_rate import Errors, errors, interval


@torch.no_grad()
def evaluate_speech(
    model: SpeechModel, data: SpeechData, *, batch: int = 32, beam: int = 0, known: Set[str] = frozenset()
) -> dict[str, Any]:
    """What is listed above, nats and bits of a label, and the counts of each speaker. The model is left as it was.

    beam: paths of a prefix search, 0: greedy. known: the sentences of the training set.
    """
    check_labels(model, data)
    was_training = model.training
    model.eval()
    try:
        heard, nats, unfit = _heard(model, data, batch, beam)
    finally:
        model.train(was_training)
    said = [labels.tolist() for labels in data.labels]
    found = [errors(a, b) for a, b in zip(said, heard, strict=True)]
    made: dict[str, Any] = {"examples": len(data), "nats": nats, "bits": nats / math.log(2)}
    made |= {"error_rate": _sum(found).rate} | _counts(_sum(found))
    by_speaker = _by(data.speakers, found)
    made["interval"] = interval(by_speaker)
    made["too_short"] = unfit
    if " " in data.label_names:
        words = [errors(model.text(a).split(), model.text(b).split()) for a, b in zip(said, heard, strict=True)]
        made["word_error_rate"] = _sum(words).rate
    if known:
        before = [text in known for text in data.texts]
        made["heard_before"] = {"examples": sum(before), **_rate([e for e, b in zip(found, before, strict=True) if b])}
        made["over_new"] = _rate([e for e, b in zip(found, before, strict=True) if not b])
    made["speakers"] = {name: {"error_rate": e.rate} | _counts(e) for name, e in by_speaker.items()}
    return made


def check_labels(model: SpeechModel, data: SpeechData) -> None:
    names = model.config.labels
    if len(data.label_names) != model.config.num_labels or (names and names != data.label_names):
        raise ValueError(
            f"the model knows {model.config.num_labels} labels ({' '.join(names[:5])} …), the data has "
            f"{len(data.label_names)} ({' '.join(data.label_names[:5])} …): give it data with its labels (units=)"
        )


def decoder(model: SpeechModel, beam: int) -> Callable[[Float[Tensor, "B T P"], Tensor], list[list[int]]]:
    if beam < 0:
        raise ValueError(f"beam is the number of paths that are followed, or 0 for greedy decoding, got {beam}")
    if not beam:
        return model.head.decode
    return lambda log_probs, lengths: [
        beam_search(row[: int(n)], width=beam)[0].labels for row, n in zip(log_probs.cpu(), lengths, strict=True)
    ]


def _heard(model: SpeechModel, data: SpeechData, batch: int, beam: int) -> tuple[list[list[int]], float, int]:
    """The labels of each utterance, nats of a label, and how many utterances have more labels than frames."""
    heard: list[list[int]] = [[] for _ in range(len(data))]
    decode = decoder(model, beam)
    total, count, unfit = 0.0, 0, 0
    for some in in_order(data, batch):
        frames = some.frames.to(model.device)
        lengths = some.lengths.to(model.device)
        features, _ = model.features(frames, lengths=lengths)
        out_lengths = model.out_lengths(frames, lengths)
        for row, labels in zip(some.rows.tolist(), decode(model.head(features), out_lengths), strict=True):
            heard[row] = labels
        nats = model.head.loss(features, some.labels.to(model.device), out_lengths, some.label_lengths).double()
        fits = nats.isfinite()
        total += float(nats[fits].sum())
        count += int(some.label_lengths[fits.cpu()].sum())
        unfit += int((~fits).sum())
    return heard, total / max(count, 1), unfit


def _by(speakers: tuple[str, ...], found: list[Errors]) -> dict[str, Errors]:
    made: dict[str, Errors] = {}
    for speaker, one in zip(speakers, found, strict=True):
        made[speaker] = made.get(speaker, Errors()) + one
    return made


def _sum(found: list[Errors]) -> Errors:
    return sum(found, Errors())


def _rate(found: list[Errors]) -> dict[str, Any]:
    return {"error_rate": _sum(found).rate if found else None, "labels": _sum(found).length}


def _counts(e: Errors) -> dict[str, int]:
    counts = {"substitutions": e.substitutions, "deletions": e.deletions, "insertions": e.insertions}
    return counts | {"labels": e.length}
