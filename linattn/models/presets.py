"""Models by name: frozen configs. The paper's are from Katharopoulos et al. 2020 (arXiv 2006.16236), section 4."""

from __future__ import annotations

import dataclasses

from linattn.models.image import ImageConfig
from linattn.models.lm import LanguageConfig
from linattn.models.speech import SpeechConfig
from linattn.nn.layer import Layer

PAPER_IMAGE = Layer(width=256, num_heads=8, dropout=0.1)
Config = ImageConfig | LanguageConfig | SpeechConfig

PRESETS: dict[str, Config] = {
    # MNIST as in the paper: 784 bytes, 8 layers of 8 heads of 32, feed-forward 1,024.
    "mnist": ImageConfig((28, 28, 1), PAPER_IMAGE, depth=8),
    # CIFAR-10 as in the paper: 3,072 bytes, 16 such layers.
    "cifar10": ImageConfig((32, 32, 3), PAPER_IMAGE, depth=16),
    # 8 × 8 digits of 17 grey levels: small enough to train on a laptop in two minutes.
    "digits": ImageConfig(
        (8, 8, 1),
        Layer(width=96, num_heads=3, norm_first=True, activation="gelu"),
        depth=3,
        head="categorical",
        position="row_column_channel",
    ),
    # Phoneme recognition as in the paper: 9 layers, 6 heads of 32, feed-forward 768; 39 phonemes.
    "speech": SpeechConfig(Layer(width=192, num_heads=6, causal=False, dropout=0.1), depth=9, num_labels=39),
    # A recogniser that streams: causal, forty milliseconds a token, small enough to train without a GPU.
    "transcriber": SpeechConfig(
        Layer(width=144, num_heads=4, norm_first=True, activation="gelu", dropout=0.1),
        depth=6,
        num_labels=39,
        position="none",
        subsample=4,
    ),
    # The copy task as in the paper: 10 symbols and a separator.
    "copy": LanguageConfig(Layer(width=256, num_heads=8), depth=4, vocabulary=11),
    # A byte-level language model that a laptop trains.
    "text": LanguageConfig(
        Layer(width=192, num_heads=6, norm_first=True, activation="gelu", bias=False, rotary="before"),
        depth=4,
        position="none",
    ),
}


def preset(name: str, **changes: object) -> Config:
    """A config by name. `changes` are fields of it, or of its layer: preset("mnist", attention="softmax", depth=2)."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    config = PRESETS[name]
    own, of_layer = {f.name for f in dataclasses.fields(config)}, {f.name for f in dataclasses.fields(Layer)}
    unknown = [key for key in changes if key not in own | of_layer]
    if unknown:
        raise ValueError(
            f"{name} has no field {unknown[0]!r}; there are {', '.join(sorted((own | of_layer) - {'layer'}))}"
        )
    start: Layer = changes.get("layer", config.layer)  # type: ignore[assignment]
    layer = dataclasses.replace(start, **{k: v for k, v in changes.items() if k in of_layer and k not in own})
    return dataclasses.replace(config, **{k: v for k, v in changes.items() if k in own} | {"layer": layer})  # type: ignore[arg-type]
