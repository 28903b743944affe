"""What several commands need of a model: its samples as images or text, and prompts made of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linattn._typing import Tensor
from linattn.models import ImageModel, LanguageModel, Model, load


def load_model(name: str, device: str) -> Model:
    return load(name, "cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device)


def sheet_sampler() -> Callable[..., Any]:
    """What the training loop calls for its sample sheets: values of `count` images of the model."""
    from linattn.generate import generate

    def sample(model: ImageModel, count: int, seed: int) -> Tensor:
        made = generate(model, count=count, seed=seed, progress=False)
        return model.to_images(torch.stack(list(made.values)))

    return sample


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
    if model.config.vocabulary != 256:
        raise ValueError(f"this model reads ids of a vocabulary of {model.config.vocabulary}, not bytes of text")
    return torch.tensor(list(text.encode()), dtype=torch.int64)
