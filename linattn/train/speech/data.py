"""A split of a corpus as a value: features in memory, labels, who speaks and what is said; and batches of it.

    data = load_speech("speechocean762", split="train", speeds=(0.9, 1.0, 1.1))
    steps = SpeechWalk(data, batch=32, seed=0)      # endless; steps.state_dict() is a place to go on from
    for batch in in_order(data, 32): ...            # each utterance once: evaluation

Axes:  U utterances   B batch   T frames   F bins   S labels
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from linattn._typing import Float, Int, Tensor
from linattn.audio import FrontEnd
from linattn.train.data.originals import place
from linattn.train.speech.corpus import Corpus, Labeller, Unreadable, Utterance, sound_folder, speechocean762
from linattn.train.speech.features import Features, Frames, features_of

NAMED = 20  # skipped files that are named
SPREAD = 0.2  # of lengths within a batch: more mixes batches better, less pads less


class SpeechBatch(NamedTuple):
    """Some utterances. What stands behind `lengths` and `label_lengths` is padding."""

    frames: Float[Tensor, "B T F"]
    lengths: Int[Tensor, " B"]
    labels: Int[Tensor, "B S"]
    label_lengths: Int[Tensor, " B"]
    rows: Int[Tensor, " B"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SpeechData:
    """One split.

    versions       the normalised frames of all utterances at each speed, the first at speed 1
    names, speakers, texts    of each utterance
    labels         of each utterance, 1 … n, which `label_names` names
    batch_frames   padded frames that a batch holds at most, None: as many as come
    augment        whether SpecAugment is to be applied in training
    skipped        what could not be used: "name (why)"
    sha256         of frames and labels: what exactly was trained on
    """

    name: str
    split: str
    versions: tuple[Frames, ...]
    names: tuple[str, ...]
    speakers: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[Tensor, ...]
    label_names: tuple[str, ...]
    front: FrontEnd
    batch_frames: int | None = None
    augment: bool = False
    licence: str = "unknown"
    skipped: tuple[str, ...] = ()
    sha256: str = ""

    kind = "speech"

    def __post_init__(self) -> None:
        if not self.sha256:
            digest = hashlib.sha256()
            for x in (*(frames.flat for frames in self.versions), *self.labels):
                digest.update(x.contiguous().numpy().data)
            object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def seconds(self) -> float:
        return int(self.versions[0].lengths.sum()) / self.front.frames_a_second

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        speakers, hours = len(set(self.speakers)), self.seconds / 3600
        return (
            f"<{self.name} {self.split}: {len(self):,} utterances of {speakers} speakers, {hours:.2f} h, "
            f"{len(self.label_names)} labels, sha256 {self.sha256[:12]}>"
        )

    def batch(self, rows: Int[Tensor, " B"], version: Int[Tensor, " B"] | None = None) -> SpeechBatch:
        """Utterances by number; `version` says at which of the speeds."""
        speeds = [0] * len(rows) if version is None else version.tolist()
        frames = [self._frames(row, speed) for row, speed in zip(rows.tolist(), speeds, strict=True)]
        labels = [self.labels[row] for row in rows.tolist()]
        return SpeechBatch(
            pad_sequence(frames, batch_first=True),
            torch.tensor([len(x) for x in frames]),
            pad_sequence(labels, batch_first=True),
            torch.tensor([len(x) for x in labels]),
            rows,
        )

    def first(self, count: int | None) -> SpeechData:
        """The first utterances; None: all."""
        if count is None or count >= len(self):
            return self
        kept = {name: getattr(self, name)[:count] for name in ("names", "speakers", "texts", "labels")}
        versions = tuple(Frames.of(frames.each()[:count]) for frames in self.versions)
        return dataclasses.replace(self, **kept, versions=versions, sha256="")

    def _frames(self, row: int, version: int) -> Float[Tensor, "T F"]:
        frames = self.versions[version]
        end = int(self._ends[version][row])
        return frames.flat[end - int(frames.lengths[row]) : end]

    @property
    def _ends(self) -> list[Tensor]:
        made = self.__dict__.get("_kept_ends")
        if made is None:
            made = [frames.lengths.cumsum(0) for frames in self.versions]
            object.__setattr__(self, "_kept_ends", made)
        return made


def load_speech(
    name: str | os.PathLike[str],
    split: str = "train",
    front: FrontEnd | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    units: str | None = None,
    lexicon: str | None = None,
    bins: int = 40,
    scaling: str = "running",
    speeds: tuple[float, ...] = (1.0,),
    augment: bool = True,
    batch_frames: int | None = 20_000,
    join: int | None = None,
    max_seconds: float = 30.0,
    cache_dir: str | None = "runs",
) -> SpeechData:
    """One split of "speechocean762", or of a folder of sounds and transcripts (see corpus.py).

    front       of a trained model, to evaluate it; None: made of bins, scaling and the training set's statistics
    data_dir    the folder that holds speechocean762/; else $LINATTN_DATA, else a cache folder
    units       "phonemes" (where there is a lexicon), "characters" or "tokens"; None: the first that is possible
    speeds      at which training utterances are heard, one of them drawn in each epoch (0.9, 1.0, 1.1)
    join        utterances of a speaker are joined as long as they have no more frames together
    max_seconds of an utterance; longer ones are skipped, as are sounds that cannot be used
    """
    corpus = find_corpus(os.fspath(name), data_dir, lexicon)
    label = Labeller(units or ("phonemes" if corpus.lexicon else "characters"), corpus)
    options: dict[str, Any] = {"max_seconds": max_seconds, "cache_dir": cache_dir}
    begun = FrontEnd(bins=bins, scaling=scaling) if front is None else front
    front = begun if front is not None or scaling == "utterance" else _fitted(corpus, begun, options)
    hears = (1.0, *(speed for speed in speeds if speed != 1)) if split == "train" else (1.0,)
    utterances, labels, unlabelled = _labelled(corpus.utterances(split), label)
    if not utterances:
        raise ValueError(f"{corpus.name} has no utterance in its {split} split that can be used{_named(unlabelled)}")
    features = features_of(f"{corpus.name}-{split}", utterances, front, speeds=hears, **options)
    skipped = (*corpus.skipped, *unlabelled, *features.skipped)
    if skipped and split == "train":
        warnings.warn(f"{corpus.name}: skipped {len(skipped)} utterances{_named(skipped)}", stacklevel=2)
    kept = [utterances[i] for i in features.kept]
    made = SpeechData(
        corpus.name,
        split,
        tuple(Frames.of([front.normalized(x) for x in version.each()]) for version in features.versions),
        names=tuple(utterance.name for utterance in kept),
        speakers=tuple(utterance.speaker for utterance in kept),
        texts=tuple(utterance.text for utterance in kept),
        labels=tuple(torch.tensor(labels[i]) for i in features.kept),
        label_names=label.names,
        front=front,
        batch_frames=batch_frames,
        augment=augment and split == "train",
        licence=corpus.licence,
        skipped=skipped,
    )
    return made if join is None else joined(made, join)


def find_corpus(name: str, data_dir: str | os.PathLike[str] | None = None, lexicon: str | None = None) -> Corpus:
    words = Path(lexicon).expanduser() if lexicon else None
    root = place(data_dir, download=False).root
    if name == "speechocean762":
        return speechocean762(root / name, words)
    for path in (Path(name).expanduser(), root / name):
        if path.is_dir():
            return sound_folder(path, words)
    raise ValueError(
        f"no speech {name!r}: it is neither speechocean762 nor a folder of sounds and transcripts, here or in {root}"
    )


def joined(data: SpeechData, frames: int) -> SpeechData:
    """Neighbours by the same speaker as one utterance, as long as it has at most so many frames (at each speed)."""
    groups: list[list[int]] = []
    longest = torch.stack([version.lengths for version in data.versions]).amax(0).tolist()
    for row in range(len(data)):
        fits = groups and data.speakers[groups[-1][0]] == data.speakers[row]
        if fits and sum(longest[i] for i in groups[-1]) + longest[row] <= frames:
            groups[-1].append(row)
        else:
            groups.append([row])
    space = [data.label_names.index(" ") + 1] if " " in data.label_names else []
    labels = [
        torch.cat([torch.tensor(space * (i > 0) + data.labels[r].tolist()) for i, r in enumerate(g)]) for g in groups
    ]
    parts = [version.each() for version in data.versions]
    return dataclasses.replace(
        data,
        versions=tuple(Frames.of([torch.cat([each[r] for r in group]) for group in groups]) for each in parts),
        names=tuple("+".join(data.names[r] for r in group) for group in groups),
        speakers=tuple(data.speakers[group[0]] for group in groups),
        texts=tuple(" ".join(data.texts[r] for r in group) for group in groups),
        labels=tuple(labels),
        sha256="",
    )


def cut(order: Int[Tensor, " U"], lengths: Int[Tensor, " U"], batch: int, frames: int | None) -> list[Tensor]:
    """`order`, of similar lengths, in batches of at most `batch` utterances and `frames` padded frames."""
    made, now, longest = [], [], 0
    for row in order.tolist():
        longest = max(longest, int(lengths[row]))
        full = len(now) == batch or (frames is not None and (len(now) + 1) * longest > frames)
        if now and full:
            made.append(torch.tensor(now))
            now, longest = [], int(lengths[row])
        now.append(row)
    return [*made, torch.tensor(now)] if now else made


def in_order(data: SpeechData, batch: int) -> Iterator[SpeechBatch]:
    """Every utterance once, the shortest first, so that there is little padding."""
    lengths = data.versions[0].lengths
    for rows in cut(lengths.argsort(stable=True), lengths, batch, data.batch_frames):
        yield data.batch(rows)


class SpeechWalk(Iterator[SpeechBatch]):
    """Random batches of similar lengths without end. Each epoch visits every utterance once, at a speed drawn for it.

    The batches of epoch e are a function of (seed, e): its place is epoch and offset, and can be entered at once.
    """

    def __init__(self, data: SpeechData, batch: int, seed: int):
        self.data, self.batch_size, self.seed = data, batch, seed
        self.epoch = self.offset = 0
        self._entered: tuple[int, int] | None = None  # the (seed, epoch) that _batches belong to

    def __next__(self) -> SpeechBatch:
        self._enter()
        if self.offset >= len(self._batches):
            self.epoch, self.offset = self.epoch + 1, 0
            self._enter()
        rows = self._batches[self.offset]
        self.offset += 1
        return self.data.batch(rows, self._speeds[rows])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "offset": self.offset, "seed": self.seed, **self._identity()}

    @property
    def epochs(self) -> float:
        """How often the data has been heard by now."""
        self._enter()
        return self.epoch + self.offset / len(self._batches)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"this place is of another walk: its {name} is {state.get(name)!r}, here it is {value!r}. "
                    f"Make the loader as it was made then, or start anew"
                )
        self.epoch, self.offset, self.seed = (int(state[name]) for name in ("epoch", "offset", "seed"))

    def _enter(self) -> None:
        if self._entered == (self.seed, self.epoch):
            return
        draw = torch.Generator().manual_seed((self.seed + self.epoch) % 2**63)
        count = len(self.data)
        self._speeds = torch.randint(len(self.data.versions), (count,), generator=draw)
        lengths = torch.stack([v.lengths for v in self.data.versions])[self._speeds, torch.arange(count)]
        roughly = lengths * (1 + SPREAD * torch.rand(count, generator=draw))
        batches = cut(roughly.argsort(), lengths, self.batch_size, self.data.batch_frames)
        self._batches = [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]
        self._entered = (self.seed, self.epoch)

    def _identity(self) -> dict[str, Any]:
        data = f"{self.data.name} {self.data.split} {self.data.sha256}"
        return {"kind": "speech", "batch": self.batch_size, "frames": self.data.batch_frames, "data": data}


def _labelled(utterances: list[Utterance], label: Labeller) -> tuple[list[Utterance], list[list[int]], list[str]]:
    kept, labels, skipped = [], [], []
    for utterance in utterances:
        made = _labels_or_why(label, utterance.text)
        if isinstance(made, str):
            skipped.append(f"{utterance.name} ({made})")
        else:
            kept.append(utterance)
            labels.append(made)
    return kept, labels, skipped


def _labels_or_why(label: Labeller, text: str) -> list[int] | str:
    try:
        return label(text)
    except Unreadable as error:
        return str(error)


def _fitted(corpus: Corpus, front: FrontEnd, options: dict[str, Any]) -> FrontEnd:
    """With mean and spread of the training set, each frame counting once."""
    made: Features = features_of(f"{corpus.name}-train", corpus.utterances("train"), front, **options)
    flat = made.versions[0].flat
    return front.fitted(flat.mean(0, dtype=torch.float64), flat.double().std(0))


def _named(skipped: tuple[str, ...] | list[str]) -> str:
    more = f", and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
    return f": {', '.join(skipped[:NAMED])}{more}" if skipped else ""
