"""Features of many utterances, made once and kept on disk: a safetensors file for a split, written whole or not at all.

    runs/speechocean762-train-3f9c….safetensors     frames of all utterances in a row, for each speed; lengths; names

The name is the sha256 of what went in: the bytes of every sound, and the options. So a file never needs to be deleted,
and one that was damaged is made again. Sounds that cannot be used are skipped and named.

Axes:  U utterances   N frames of all of them   F bins
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from linattn._typing import Float, Int, Tensor
from linattn.audio import BadSound, FrontEnd, at_speed, read
from linattn.state import write_atomically
from linattn.train.data.progress import Bar
from linattn.train.speech.corpus import Utterance

FORM = 1  # of the cache: raise it when the same sounds would give other features
ENTRY = "linattn_features"
MANY = 200  # utterances: from here on reading them shows a bar
CacheDir = str | os.PathLike[str] | None


class Frames(NamedTuple):
    """Utterances one after the other: that of row u is flat[starts[u] : starts[u] + lengths[u]]."""

    flat: Float[Tensor, "N F"]
    lengths: Int[Tensor, " U"]

    @property
    def starts(self) -> Int[Tensor, " U"]:
        return self.lengths.cumsum(0) - self.lengths

    def each(self) -> list[Tensor]:
        return list(self.flat.split(self.lengths.tolist()))

    @classmethod
    def of(cls, parts: list[Tensor]) -> Frames:
        return cls(torch.cat(parts), torch.tensor([len(part) for part in parts]))


class Features(NamedTuple):
    """Of the utterances that could be used: their places in the list, and their frames at each speed."""

    kept: list[int]
    versions: tuple[Frames, ...]
    skipped: list[str]  # "name (why)"


def features_of(
    name: str,
    utterances: list[Utterance],
    front: FrontEnd,
    *,
    speeds: tuple[float, ...] = (1.0,),
    max_seconds: float | None = None,
    cache_dir: CacheDir = None,
) -> Features:
    """Log energies (not normalised), from the cache where it has them."""
    if cache_dir is None:
        return _made(name, utterances, front, speeds, max_seconds)
    options = repr((FORM, front.rate, front.bins, speeds, max_seconds))
    key = hashlib.sha256(options.encode())
    for utterance in utterances:
        key.update(utterance.name.encode() + hashlib.sha256(_contents(utterance) or b"").digest())
    path = Path(cache_dir) / f"{name}-{key.hexdigest()[:16]}.safetensors"
    kept = _from_cache(path, len(speeds))
    if kept is None:
        kept = _made(name, utterances, front, speeds, max_seconds)
        _to_cache(path, kept)
    return kept


def _made(
    name: str, utterances: list[Utterance], front: FrontEnd, speeds: tuple[float, ...], max_seconds: float | None
) -> Features:
    kept, skipped = [], []
    versions: list[list[Tensor]] = [[] for _ in speeds]
    bar = (
        Bar(f"features of {name}: {len(utterances):,} utterances", len(utterances)) if len(utterances) > MANY else None
    )
    try:
        for i, utterance in enumerate(utterances):
            try:
                made = _of_one(utterance, front, speeds, max_seconds)
            except BadSound as error:
                skipped.append(f"{utterance.name} ({error})")
            else:
                kept.append(i)
                for version, frames in zip(versions, made, strict=True):
                    version.append(frames)
            if bar:
                bar.update(1)
    finally:
        if bar:
            bar.close()
    if not kept:
        raise ValueError(f"{name}: not one of {len(utterances)} sounds can be used: {'; '.join(skipped[:3])}")
    return Features(kept, tuple(map(Frames.of, versions)), skipped)


def _of_one(
    utterance: Utterance, front: FrontEnd, speeds: tuple[float, ...], max_seconds: float | None
) -> list[Tensor]:
    contents = _contents(utterance)
    if contents is None:
        raise BadSound("it is not there, or cannot be read")
    sound = read(contents, rate=front.rate, max_seconds=max_seconds, name="it")
    made = [front.features(sound.samples if speed == 1 else at_speed(sound.samples, speed)) for speed in speeds]
    if not all(map(len, made)):
        raise BadSound(f"it lasts {1000 * sound.seconds:.0f} ms, less than a frame of 25 ms")
    return made


def _contents(utterance: Utterance) -> bytes | None:
    try:
        return utterance.contents()
    except (OSError, KeyError, BadZipFile, zlib.error):
        return None


def _to_cache(path: Path, features: Features) -> None:
    tensors = {f"{part}.{i}": x for i, v in enumerate(features.versions) for part, x in v._asdict().items()}
    form = {"kept": features.kept, "skipped": features.skipped}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, save(tensors, metadata={ENTRY: json.dumps(form)}))
    except OSError as error:
        warnings.warn(f"cannot keep these features for next time: {error}", stacklevel=3)


def _from_cache(path: Path, num_versions: int) -> Features | None:
    if not path.is_file():
        return None
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            form = json.loads((file.metadata() or {})[ENTRY])
            parts = [[file.get_tensor(f"{p}.{i}") for p in Frames._fields] for i in range(num_versions)]
    except (SafetensorError, OSError, KeyError, ValueError):
        return None  # not ours, or not whole: it is made again
    return Features(form["kept"], tuple(Frames(*part) for part in parts), form["skipped"])
