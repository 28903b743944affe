"""What several commands need of a model: its samples as images or text, and prompts made of files."""

from __future__ import annotations

from pathlib import Path

import torch

from linattn._typing import Tensor
from linattn.generate import generate
from linattn.models import ImageModel, LanguageModel, Model, SequenceModel, load
from linattn.train.setup import choose_device

BYTES = 256  # the vocabulary of text; any other is shown as numbers


def load_model(name: str, device: str) -> Model:
    return load(name, choose_device(device))


def samples(model: SequenceModel, count: int, seed: int) -> Tensor | list[str]:
    """What a training run shows of itself as it goes: images, or texts."""
    if isinstance(model, ImageModel):
        return model.to_images(generate(model, count=count, seed=seed, progress=False).tensor)
    made = generate(model, count=min(count, 4), length=256, seed=seed, progress=False)
    if model.head.num_values != BYTES:
        return [" ".join(map(str, row.tolist())) for row in made.values]
    return [bytes(row.tolist()).decode(errors="replace") for row in made.values]


def image_file(path: Path, model: ImageModel) -> Tensor:
    """A picture in the model's size, as its values (L,)."""
    from PIL import Image, UnidentifiedImageError

    height, width, channels = model.config.shape
    try:
        picture = Image.open(path)
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    picture = picture.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BOX)
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).long()


def text_prompt(text: str, model: LanguageModel) -> Tensor:
    if model.config.vocabulary != BYTES:
        raise ValueError(f"this model reads ids of a vocabulary of {model.config.vocabulary}, not bytes of text")
    return torch.tensor(list(text.encode()), dtype=torch.int64)
