"""What the tests of sound and speech share: small sounds that are made up, and a corpus of them on disk."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch import Tensor

RATE = 16_000
LEXICON = "BEE  B IY1\nTOE  T OW1\nTOE  T UW2\nA  AH0\n"


def noise(seconds: float = 0.5, rate: int = RATE, seed: int = 0) -> Tensor:
    """Something that every filter hears, louder and quieter in turn."""
    samples = torch.randn(round(seconds * rate), generator=torch.Generator().manual_seed(seed))
    return 0.1 * samples * (1.2 + torch.sin(torch.arange(len(samples)) / rate * 20))


def tone(hertz: float, seconds: float = 0.5, rate: int = RATE) -> Tensor:
    return (
        0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(round(seconds * rate), dtype=torch.float64) / rate)
    ).float()


def write(path: Path, samples: Tensor, rate: int = RATE, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples.numpy().astype(np.float32), rate, **options)
    return path


def pieces(x: Tensor, seed: int, most: int = 700) -> list[Tensor]:
    """x cut at random, with empty pieces and single samples among them."""
    draw = torch.Generator().manual_seed(seed)
    sizes, left = [0, 1], len(x)
    while sum(sizes) < left:
        sizes.append(int(torch.randint(most, (), generator=draw)))
    return list(torch.split(torch.cat([x, x.new_zeros(sum(sizes) - left, *x.shape[1:])]), sizes))[:-1] + [
        x[sum(sizes[:-1]) :]
    ]


def little_ocean(root: Path, speakers: int = 14, utterances: int = 2) -> Path:
    """A folder in the form of speechocean762: `speakers` in train and two in test, with words of a sound each."""
    folder = root / "speechocean762"
    folder.mkdir(parents=True)
    (folder / "lexicon.txt").write_text(LEXICON)
    for split, count in (("train", speakers), ("test", 2)):
        texts, owners = [], []
        with zipfile.ZipFile(folder / f"{split}.opus.zip", "w") as archive:
            for i in range(count * utterances):
                name, words = f"{split}{i:03d}", ("BEE", "TOE", "A")[i % 3 :] + ("BEE",) * (i % 2)
                sound = torch.cat([said(word, seed=i) for word in words])
                soundfile.write(root / "one.opus", sound.numpy(), RATE, format="OGG", subtype="OPUS")
                archive.write(root / "one.opus", f"{name}.opus")
                texts.append(f"{name}\t{' '.join(words)}")
                owners.append(f"{name} {split}-{i // utterances:02d}")
        (folder / f"{split}.text").write_text("\n".join(texts) + "\n")
        (folder / f"{split}.utt2spk").write_text("\n".join(owners) + "\n")
    return root


def said(word: str, seed: int = 0, seconds: float = 0.25) -> Tensor:
    """A word is a tone of its own and a little noise, with a pause behind it."""
    hertz = {"BEE": 400.0, "TOE": 1200.0, "A": 2500.0}[word]
    sound = tone(hertz, seconds) + 0.05 * noise(seconds, seed=seed)
    return torch.cat([sound, 0.01 * noise(0.1, seed=seed + 1)])
