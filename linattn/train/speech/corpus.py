"""Collections of speech: which utterances there are, who speaks, what is said, and in which labels.

speechocean762     read English, 250 speakers, CC BY 4.0 (Zhang et al. 2021): {train,test}.opus.zip, or the WAVE files
                   of the published archive; transcripts; a lexicon of words as phonemes
a folder           NAME.wav (or flac, ogg, opus, mp3) with its transcript in NAME.txt beside it, at any depth; a
                   folder in it is a speaker, and what lies in no folder has a speaker each
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from linattn.train.data.dataset import check_split

SOUNDS = (".wav", ".flac", ".ogg", ".opus", ".mp3")
HELD_OUT = 12  # speakers of speechocean762's training set: dev
UNITS = ("phonemes", "characters", "tokens")
LICENCE = "CC BY 4.0 (speechocean762, Zhang et al. 2021, arXiv 2104.01378)"


class Utterance(NamedTuple):
    name: str
    speaker: str
    text: str
    contents: Callable[[], bytes]  # of the sound's file


@dataclass(frozen=True)
class Corpus:
    """`splits` by name; `lexicon` from words to phonemes where there is one; what had to be left out."""

    name: str
    licence: str
    splits: dict[str, list[Utterance]]
    lexicon: dict[str, tuple[str, ...]]
    skipped: tuple[str, ...] = ()

    def utterances(self, split: str) -> list[Utterance]:
        check_split(split)
        return self.splits[split]

    @property
    def texts(self) -> list[str]:
        return [utterance.text for part in self.splits.values() for utterance in part]


class Unreadable(ValueError):
    """A transcript that has no labels, and why."""


class Labeller:
    """Texts to labels, 1 … n: "phonemes" by the lexicon, "characters" in lower case, or "tokens" between spaces."""

    def __init__(self, units: str, corpus: Corpus):
        if units not in UNITS:
            raise ValueError(f"units must be one of {', '.join(UNITS)}, got {units!r}")
        if units == "phonemes" and not corpus.lexicon:
            raise ValueError(
                f"{corpus.name} has no lexicon of words as phonemes: take units=characters, or name one with "
                f"lexicon=FILE, a line for each word: the word, a space or tab, its phonemes"
            )
        self.units, self.lexicon = units, corpus.lexicon
        if units == "phonemes":
            known = {phoneme for phonemes in corpus.lexicon.values() for phoneme in phonemes}
        else:
            known = {part for text in corpus.texts for part in self.parts(text)}
        self.names = tuple(sorted(known))
        self.index = {name: i for i, name in enumerate(self.names, 1)}

    def __call__(self, text: str) -> list[int]:
        made = [self.index[part] for part in self.parts(text)]
        if not made:
            raise Unreadable("its transcript is empty")
        return made

    def parts(self, text: str) -> list[str]:
        if self.units == "tokens":
            return text.split()
        if self.units == "characters":
            return list(plain(text))
        return [phoneme for word in text.split() for phoneme in self._phonemes(word)]

    def _phonemes(self, word: str) -> tuple[str, ...]:
        found = self.lexicon.get(word.upper())
        if found is None:
            raise Unreadable(f"the lexicon does not have {word!r}")
        return found


def plain(text: str) -> str:
    """Lower case, letters, digits and apostrophes, single spaces."""
    return " ".join("".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split())


def read_lexicon(path: Path) -> dict[str, tuple[str, ...]]:
    """Words to phonemes: the first pronunciation of each, without digits of stress (AH0 is AH)."""
    found: dict[str, tuple[str, ...]] = {}
    for line in _lines(path):
        word, *phonemes = line.split()
        if phonemes:
            found.setdefault(word.upper(), tuple(p.rstrip("012") for p in phonemes))
    if not found:
        raise ValueError(f"{path} is no lexicon: a line has a word and its phonemes, with spaces or a tab between")
    return found


def speechocean762(root: Path, lexicon: Path | None = None) -> Corpus:
    """Its test set is the published one. dev is twelve speakers of the published training set, chosen by `held_out`."""
    words = read_lexicon(lexicon or _first(root, "lexicon.txt", "resource/lexicon.txt"))
    known, test = ([*_ocean_split(root, split)] for split in ("train", "test"))
    away = held_out({utterance.speaker for utterance in known}, HELD_OUT)
    splits = {
        "train": [utterance for utterance in known if utterance.speaker not in away],
        "dev": [utterance for utterance in known if utterance.speaker in away],
        "test": test,
    }
    return Corpus("speechocean762", LICENCE, splits, words)


def held_out(speakers: set[str], count: int) -> set[str]:
    """The `count` speakers whose names have the smallest sha256: a choice that nobody made, the same everywhere."""
    return set(sorted(speakers, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:count])


def sound_folder(root: Path, lexicon: Path | None = None) -> Corpus:
    """train 90% · dev 5% · test 5% of the speakers, or of the utterances where there are fewer than twenty speakers."""
    found, skipped = [], []
    for path in sorted(path for path in root.rglob("*") if path.suffix.lower() in SOUNDS and _shown(path, root)):
        name, transcript = str(path.relative_to(root)), path.with_suffix(".txt")
        if transcript.is_file():
            text = " ".join(transcript.read_text(encoding="utf-8", errors="replace").split())
            speaker = name if path.parent == root else str(path.parent.relative_to(root))
            found.append(Utterance(name, speaker, text, path.read_bytes))
        else:
            skipped.append(f"{name} (there is no transcript {transcript.name} beside it)")
    if not found:
        more = f", of {len(skipped)} sound files none has a NAME.txt beside it" if skipped else ""
        raise ValueError(f"{root} holds no speech: expected NAME.wav with its transcript in NAME.txt{more}")
    words = read_lexicon(lexicon) if lexicon else {}
    return Corpus(root.resolve().name, "of the folder's owner", _parts(found), words, tuple(skipped))


def _parts(found: list[Utterance]) -> dict[str, list[Utterance]]:
    speakers = {utterance.speaker for utterance in found}
    by_speaker = len(speakers) >= 20
    groups = speakers if by_speaker else {utterance.name for utterance in found}
    held = max(1, len(groups) // 20) if len(groups) >= 3 else 0
    away = sorted(held_out(groups, 2 * held))
    split_of = {name: "dev" if i < held else "test" for i, name in enumerate(away)}
    splits: dict[str, list[Utterance]] = {"train": [], "dev": [], "test": []}
    for utterance in found:
        splits[split_of.get(utterance.speaker if by_speaker else utterance.name, "train")].append(utterance)
    return splits


def _ocean_split(root: Path, split: str) -> list[Utterance]:
    texts = _pairs(_first(root, f"{split}.text", f"{split}/text"))
    speakers = _pairs(_first(root, f"{split}.utt2spk", f"{split}/utt2spk"))
    contents = _ocean_sounds(root, split)
    return [Utterance(name, speakers[name], text, contents(name, speakers[name])) for name, text in texts.items()]


def _ocean_sounds(root: Path, split: str) -> Callable[[str, str], Callable[[], bytes]]:
    """(utterance, speaker) to what reads its file: from the zip of opus files, or from the published WAVE folder."""
    packed = root / f"{split}.opus.zip"
    if packed.is_file():
        try:
            archive = zipfile.ZipFile(packed)
        except zipfile.BadZipFile as error:
            raise ValueError(
                f"{packed} cannot be read ({error}): is it damaged or incomplete? Fetch it again"
            ) from error
        return lambda name, speaker: lambda: archive.read(f"{name}.opus")
    waves = _first(root, "WAVE")
    return lambda name, speaker: (waves / f"SPEAKER{speaker}" / f"{name}.WAV").read_bytes


def _first(root: Path, *names: str) -> Path:
    for name in names:
        if (root / name).exists():
            return root / name
    raise ValueError(
        f"{root} holds no speechocean762: neither {' nor '.join(names)} is there. It is published at "
        f"https://www.openslr.org/101/ (unpack speechocean762.tar.gz); name its folder with data_dir= or LINATTN_DATA"
    )


def _pairs(path: Path) -> dict[str, str]:
    made = (line.split(maxsplit=1) for line in _lines(path))
    return {pair[0]: pair[1].strip() for pair in made if len(pair) == 2}


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error})") from error


def _shown(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)
