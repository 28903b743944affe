"""What the tests of generation share: tiny float64 models with weights by formula, and a loop to compare with.

The loop is slow and its own: a model call over the whole prefix for every value, and numpy for all that is random.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from linattn.models import ImageConfig, ImageModel, LanguageConfig, LanguageModel, SequenceModel
from linattn.nn import Layer

VOCABULARY = 11
KINDS = {
    "linear": {},
    "linear, rotary": {"rotary": "before"},
    "linear, rotary after": {"rotary": "after"},
    "favor": {"feature_map": "favor"},
    "softmax": {"attention": "softmax", "num_kv_heads": 1},
    "softmax, rotary": {"attention": "softmax", "rotary": "before"},
}


def language_model(kind: str = "linear", **layer) -> LanguageModel:
    generator = torch.Generator().manual_seed(0)
    layers = Layer(width=16, num_heads=2, **{**KINDS.get(kind, {"attention": kind}), **layer})
    return _weighted(LanguageModel(LanguageConfig(layers, depth=2, vocabulary=VOCABULARY), generator=generator))


def image_model(
    attention: str = "linear", head: str = "logistics", shape: tuple[int, int, int] = (4, 3, 2)
) -> ImageModel:
    layer = Layer(width=16, num_heads=2, attention=attention, chunk_length=4)
    model = _weighted(ImageModel(ImageConfig(shape, layer, depth=2, head=head, mixtures=3)))
    model.first.fit(torch.tensor([0] * 5 + [7] * 3 + [200] * 2))
    return model


def _weighted(model):
    """Weights that do not depend on torch's generators: 0.5 sin(i · (0.7 + p)) for parameter p; norms about 1."""
    for p, (name, weight) in enumerate(model.named_parameters()):
        wave = 0.5 * torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (0.7 + p)).view_as(weight)
        weight.data = wave if weight.dim() > 1 else 0.2 * wave + (1.0 if "norm" in name and "weight" in name else 0.0)
    return model.double().eval()


def loop(
    model: SequenceModel,
    prompt: list[int],
    length: int,
    seed: int,
    row: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: tuple[int, ...] = (),
) -> list[int]:
    """One sequence, one value at a time, for heads whose values are drawn from a table of probabilities."""
    values = list(prompt)
    while len(values) < length and (len(values) == len(prompt) or values[-1] not in stop):
        if values:
            with torch.no_grad():
                params, _ = model(torch.tensor([values]))
            log_p = model.head.log_probs_all(params[0, -1]).numpy()
        else:
            log_p = np.log(model.first.probabilities.numpy())
        values.append(_draw(log_p, philox_uniform(seed, row, len(values)), temperature, top_k, top_p))
    return values


def _draw(log_p: np.ndarray, u: float, temperature: float, top_k: int | None, top_p: float | None) -> int:
    if temperature == 0:
        return int(log_p.argmax())
    p = np.exp(log_p / temperature)
    ranked = sorted(range(len(p)), key=lambda v: -p[v])[:top_k]
    total, mass, kept = sum(p[ranked]), 0.0, []
    for v in ranked:
        kept.append(v)
        mass += p[v]
        if top_p is not None and mass >= top_p * total:
            break
    p[[v for v in range(len(p)) if v not in kept]] = 0
    return int(np.searchsorted(np.cumsum(p / p.sum()), u, side="right"))


def philox_uniform(seed: int, row: int, place: int) -> float:
    """u(seed, row, place): numpy's counter is one ahead, as it counts before it computes."""
    word = philox((place // 4 + 1, 0, 0, 0), (seed, row))[place % 4]
    return math.ldexp(word >> 11, -53)


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox-4×64 with ten rounds (Salmon et al. 2011, section 3.4)."""
    low = 2**64 - 1
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (right >> 64) ^ b ^ k, right & low, (left >> 64) ^ d ^ m, left & low
        k, m = (k + 0x9E3779B97F4A7C15) & low, (m + 0xBB67AE8584CAA73B) & low
    return a, b, c, d
