"""Image, language and speech models: what they predict, how they go on, what they cost, and the paper's sizes."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from nn_cases import KINDS, assert_close, gradients, layer_of, made, tokens

from linattn.models import (
    PRESETS,
    ImageConfig,
    ImageModel,
    LanguageConfig,
    LanguageModel,
    SpeechConfig,
    SpeechModel,
    build,
    preset,
)
from linattn.nn import Layer

POSITIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "sine_concat": {"tied": False},
    "sine_add": {},
    "learned": {"position_options": {"max_length": 40}},
}


def language(position: str = "sine_add", vocabulary: int = 11, depth: int = 2, **options: Any) -> LanguageModel:
    config = LanguageConfig(layer_of(**options), depth, vocabulary, position=position, **POSITIONS[position])
    return made(LanguageModel, config)


def image(shape: tuple[int, int, int] = (2, 3, 2), **options: Any) -> ImageModel:
    return made(ImageModel, ImageConfig(shape, layer_of(), depth=2, **options))


def speech(causal: bool, **options: Any) -> SpeechModel:
    return made(SpeechModel, SpeechConfig(layer_of(causal=causal, **options), 2, num_labels=5, num_features=7))


def values(batch: int = 2, time: int = 23, most: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(most, (batch, time), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", ["linear", "after favor", "softmax"])
def test_prompt_and_steps_are_the_whole(name, position):
    """Prompts of different lengths in one batch, then steps: each row as if it were alone, at its own positions."""
    model, x, lengths = language(position, **KINDS[name]), values(3), [9, 1, 14]
    whole, none = model(x)
    params, state = model(x, model.empty_state(3), lengths=lengths)
    assert none is None and state is not None
    for row, length in enumerate(lengths):
        assert_close(params[row, :length], whole[row, :length], 1e-11)
    for step in range(9):
        following = torch.stack([x[row, length + step] for row, length in enumerate(lengths)])
        params, state = model(following[:, None], state)
        for row, length in enumerate(lengths):
            assert_close(params[row, 0], whole[row, length + step], 1e-11)
    assert state.seen.tolist() == [18, 10, 23]


@pytest.mark.parametrize("make", [language, image, partial(image, position="row_column_channel")])
def test_the_future_changes_nothing(make):
    model = make()
    x = values(2, 12, 8)
    changed = x.clone()
    changed[:, 7:] = 7 - x[:, 7:]
    a, b = model(x)[0], model(changed)[0]
    assert torch.equal(a[:, :7], b[:, :7])
    assert (a[:, 7:] - b[:, 7:]).abs().amin(1).max() > 1e-6


@pytest.mark.parametrize("name", ["linear", "softmax"])
@torch.no_grad()
def test_probabilities_of_all_continuations_sum_to_one(name):
    """nats are those of values 2 … T given the ones before: 27 sequences that begin alike exhaust what can follow."""
    model = language("sine_concat", vocabulary=3, **KINDS[name])
    all_of_them = torch.tensor([(1, *rest) for rest in itertools.product(range(3), repeat=3)])
    nats, _ = model.nats(all_of_them)
    assert nats.shape == (27, 3)
    assert math.isclose(float((-nats.sum(1)).exp().sum()), 1.0, rel_tol=1e-12)
    assert float(nats.std()) > 0.01, "a uniform distribution would prove little"


def test_nats_go_on_from_a_state():
    model, x = language(), values()
    whole, _ = model.nats(x)
    first, state = model.nats(x[:, :9], model.empty_state(2))
    rest, _ = model.nats(x[:, 8:], state)
    assert_close(torch.cat([first, rest], 1), whole, 1e-11)


@pytest.mark.parametrize("head", ["logistics", "categorical"])
def test_bits_per_dim_by_brute_force(head):
    """Byte by byte, each from its prefix alone; the first from counts in the training set, one observation spread."""
    model = image((2, 2, 1), head=head)
    train_first, images = torch.tensor([3, 3, 200, 7]), values(3, 4, 256).view(3, 2, 2, 1)
    images[0, 0, 0, 0] = 3
    model.first.fit(train_first)
    headline, full = model.bits_per_dim(images.to(torch.uint8))
    for row in range(3):
        v = images[row].flatten().tolist()
        bits = []
        for t in range(1, 4):
            params, _ = model(torch.tensor([v[:t]]))
            bits.append(-model.head.log_probs_all(params)[0, -1, v[t]].item() / math.log(2))
        count = train_first.tolist().count(v[0])
        first = -math.log2((count + 1 / 256) / (4 + 1))
        assert math.isclose(headline[row], sum(bits) / 3, rel_tol=1e-9)
        assert math.isclose(full[row], (first + sum(bits)) / 4, rel_tol=1e-9)


def test_images_in_raster_order():
    """Height 2, width 3, channels 2: byte (r · 3 + c) · 2 + h is channel h of the pixel in row r, column c."""
    model, images = image(), torch.arange(24, dtype=torch.uint8).view(2, 2, 3, 2).flip(0)
    x = model.sequences(images)
    for r, c, h in itertools.product(range(2), range(3), range(2)):
        assert torch.equal(x[:, (r * 3 + c) * 2 + h], images[:, r, c, h].long())
    assert torch.equal(model.to_images(x), images) and model.to_images(x).dtype == torch.uint8
    assert torch.equal(model.sequences(x), x)
    grey = image((2, 3, 1))
    assert torch.equal(grey.sequences(images[..., 0]), grey.sequences(images[..., :1]))


@pytest.mark.parametrize("name", ["linear", "softmax", "reformer"])
def test_an_encoder_hears_whole_utterances_of_any_length(name):
    """Padding (NaN) reaches nothing; the last frame reaches the first output."""
    model, x, lengths = speech(False, **KINDS[name]), tokens(3, 30, 7), [30, 12, 20]
    junk = x.clone()
    for row, length in enumerate(lengths):
        junk[row, length:] = torch.nan
    log_probs, _ = model(junk, lengths=lengths)
    for row, length in enumerate(lengths):
        assert_close(log_probs[row, :length], model(x[row : row + 1, :length])[0][0], 1e-11)
    labels, label_lengths = values(3, 6, 5) + 1, [6, 2, 0]
    nats = model.nats(junk, labels, lengths, label_lengths)
    for row, (length, count) in enumerate(zip(lengths, label_lengths, strict=True)):
        assert_close(nats[row : row + 1], model.nats(x[row : row + 1, :length], labels[row : row + 1, :count]), 1e-11)
    assert all(grad.isfinite().all() for grad in gradients(nats, *model.parameters()))
    heard = x.clone()
    heard[0, -1] += 1
    assert (model(heard)[0][0, 0] - model(x)[0][0, 0]).abs().max() > 1e-6
    with pytest.raises(ValueError, match="whole utterances"):
        model(x, model.empty_state(3))


def test_a_causal_recogniser_streams():
    model, x = speech(True), tokens(2, 30, 7)
    whole, _ = model(x)
    first, state = model(x[:, :20], model.empty_state(2), lengths=[20, 11])
    assert_close(first[0], whole[0, :20], 1e-11)
    rest, _ = model(torch.stack([x[0, 20:30], x[1, 11:21]]), state)
    assert_close(rest, torch.stack([whole[0, 20:30], whole[1, 11:21]]), 1e-11)


def test_every_weight_learns():
    """A step down the gradient lowers the loss, and no parameter is without one."""
    x, frames = values(2, 12), tokens(2, 30, 7)
    cases: list[Any] = [
        (m, lambda m=m: m.nats(x)[0].mean())
        for m in (language(), language("learned"), image(), image(head="categorical"))
    ]
    recogniser = speech(False)
    cases.append((recogniser, lambda: recogniser.nats(frames, values(2, 6, 5) + 1).mean()))
    for model, loss in cases:
        before = loss()
        before.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-9, name
            parameter.data -= 1e-3 * parameter.grad
        assert loss() < before


def test_parameters_of_the_papers_models():
    """A layer has 4 W (W + 1) in attention, 8 W² + 5 W in its feed-forward part, 4 W in norms; a value has 30."""

    def count(width: int, depth: int, outside: int) -> int:
        layer = 4 * width * (width + 1) + 8 * width**2 + 5 * width + 4 * width
        return depth * layer + 2 * width + outside

    image_ends = 256 * 128 + 30 * 257
    expected = {
        "mnist": count(256, 8, image_ends),
        "cifar10": count(256, 16, image_ends),
        "speech": count(192, 9, 41 * 192 + 40 * 193),
        "copy": count(256, 4, 11 * 256),
    }
    for name, number in expected.items():
        with torch.device("meta"):
            assert build(PRESETS[name]).num_parameters == number, name
    assert expected["mnist"] == 6_359_070
    lengths = {name: config.length for name, config in PRESETS.items() if isinstance(config, ImageConfig)}
    assert lengths["mnist"] == 784 and lengths["cifar10"] == 3072
    layer = PRESETS["cifar10"].layer
    assert (layer.num_heads, layer.key_width, layer.hidden, layer.dropout) == (8, 32, 1024, 0.1)
    assert (layer.feature_map, layer.activation, layer.norm, layer.norm_first) == ("elu", "relu", "layer", False)
    layer = PRESETS["speech"].layer
    assert (layer.num_heads, layer.key_width, layer.hidden, layer.causal) == (6, 32, 768, False)


@pytest.mark.parametrize("name", ["digits", "text", "copy", "speech"])
def test_presets_build_and_run(name):
    model = build(preset(name)).eval()
    if isinstance(model, SpeechModel):
        assert model(tokens(1, 20, 40).float())[0].exp().sum(-1).sub(1).abs().max() < 1e-5
    else:
        assert model.nats(values(1, 20))[0].shape == (1, 19)


def test_presets_change():
    config = preset("mnist", attention="softmax", depth=2, head="categorical")
    assert isinstance(config, ImageConfig)
    assert (config.layer.attention, config.depth, config.head, config.shape) == (
        "softmax",
        2,
        "categorical",
        (28, 28, 1),
    )
    assert config.layer.width == 256 and PRESETS["mnist"].layer.attention == "linear"
    other = preset("text", layer=Layer(width=32, num_heads=2), activation="swiglu")
    assert (other.layer.width, other.layer.activation) == (32, "swiglu")
    with pytest.raises(ValueError, match=r"mnist has no field 'heads'; there are .*, depth, .*num_heads"):
        preset("mnist", heads=4)
    with pytest.raises(ValueError, match="unknown preset 'mnits'; there are mnist"):
        preset("mnits")


def test_a_tied_weight_is_one():
    """Counted once, trained from both ends, and still one after a cast."""
    tied, untied = language(), made(LanguageModel, LanguageConfig(layer_of(), 2, 11, tied=False))
    assert untied.num_parameters - tied.num_parameters == 11 * 12
    x = tied.stack(tied.position(tied.embedding(values()), torch.arange(23)))[0]
    assert_close(tied(values())[0], x @ tied.embedding.weight.T)
    assert tied.bfloat16()(values())[0].dtype == torch.float32 and tied.embedding.weight.dtype == torch.bfloat16


def test_errors_say_what_was_seen(unchecked):
    for match, call in {
        r"values must lie in 0 … 10, got 11": lambda: language()(torch.tensor([[1, 11]])),
        r"reads integers \(batch, time\), got torch.float32": lambda: language()(torch.zeros(2, 3)),
        r"got torch.int64 \(3,\)": lambda: language()(torch.zeros(3, dtype=torch.int64)),
        "max_length of more than 40": lambda: language("learned")(values(1, 41)),
        r"\(batch, 2, 3, 2\) or sequences": lambda: image().sequences(torch.zeros(5, 2, 2, 3, dtype=torch.uint8)),
        "got torch.float32": lambda: image().sequences(torch.zeros(5, 2, 3, 2)),
        "an image model generates": lambda: ImageConfig((2, 2, 1), layer_of(causal=False), 1),
        "head must be": lambda: ImageConfig((2, 2, 1), layer_of(), 1, head="softmax"),
        "shape must be": lambda: ImageConfig((2, 2, 0), layer_of(), 1),
        "a language model generates": lambda: LanguageConfig(layer_of(causal=False), 1),
        "vocabulary must be at least 2": lambda: LanguageConfig(layer_of(), 1, vocabulary=1),
        "depth must be a positive integer, got 0": lambda: LanguageConfig(layer_of(), 0),
        "num_labels must be a positive integer": lambda: SpeechConfig(layer_of(), 1, num_labels=0),
        "use tied=False": lambda: LanguageModel(LanguageConfig(layer_of(), 1, position="sine_concat")),
        r"frames must be .* with width 7, got \(2, 30, 8\)": lambda: speech(True)(tokens(2, 30, 8)),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
