"""Generation against a loop of its own, and its laws: batches, prompts, places and caches change no value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from generate_cases import KINDS, VOCABULARY, image_model, language_model, loop, philox, philox_uniform

from linattn.generate import generate, stream
from linattn.generate import steps as steps_module
from linattn.generate.uniforms import AHEAD, Uniforms, uniforms
from linattn.models import build, preset

OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3, "top_k": 4},
    {"temperature": 3.0, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.8},
]
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7], [10, 0], [9] * 14]


def as_lists(rows) -> list[list[int]]:
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_a_loop(options):
    model = language_model()
    made = generate(model, PROMPTS, length=14, seed=5, **options)
    assert as_lists(made.values) == [loop(model, p, 14, 5, row, **options) for row, p in enumerate(PROMPTS)]
    assert made.prompt_lengths.tolist() == [1, 7, 2, 14] and as_lists(made.made)[3] == []
    assert made.finished.all() and not made.interrupted and made.seed == 5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_first_values_against_a_loop(options):
    model = image_model(head="categorical", shape=(2, 3, 2))
    made = generate(model, count=3, seed=2, **options)
    assert made.tensor.shape == (3, 12)
    assert as_lists(made.tensor) == [loop(model, [], 12, 2, row, **options) for row in range(3)]
    assert model.to_images(made.tensor).shape == (3, 2, 3, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_alone_and_together(kind):
    """The same bytes for a row: alone, in any batch, beside prompts of any length, with and without a cache."""
    model = language_model(kind)
    together = generate(model, PROMPTS, length=14, seed=1)
    assert len({tuple(row) for row in as_lists(together.values)}) == 4
    alone = [generate(model, p, length=14, seed=1, first_row=row).tensor[0] for row, p in enumerate(PROMPTS)]
    assert torch.equal(together.tensor, torch.stack(alone))
    uncached = generate(model, PROMPTS, length=14, seed=1, cache=False)
    assert torch.equal(uncached.tensor, together.tensor)


def test_reformer_recomputes_each_prefix():
    """Its step is defined by all tokens so far, so a stack of it is what it is in parallel only without a cache."""
    model = language_model("reformer", chunk_length=4)
    prompts, cold = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9]], 0.1  # a temperature that tells small differences apart
    made = generate(model, prompts, length=14, seed=1, cache=False, temperature=cold)
    assert as_lists(made.values) == [loop(model, p, 14, 1, row, temperature=cold) for row, p in enumerate(prompts)]
    assert generate(model, prompts, length=14, seed=1).finished.all()


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_thousand_images_can_be_made_in_batches(attention):
    model = image_model(attention, shape=(2, 3, 2))
    whole = generate(model, count=5, seed=7).tensor
    parts = [generate(model, count=n, seed=7, first_row=row).tensor for row, n in ((0, 2), (2, 1), (3, 2))]
    assert torch.equal(whole, torch.cat(parts)) and len(whole.unique(dim=0)) == 5
    assert not torch.equal(whole, generate(model, count=5, seed=8).tensor)


@pytest.mark.parametrize("kept", [1, 11, 23, 24])
def test_a_sequence_continues_from_its_own_beginning(kept):
    """The random numbers belong to places: the top part of an image, given as a prompt, is completed as it was."""
    model = image_model()
    whole = generate(model, count=3, seed=4).tensor
    top = whole[:, :kept].to(torch.uint8)
    assert torch.equal(generate(model, top, seed=4).tensor, whole)
    if kept < 20:
        assert not torch.equal(generate(model, top, seed=5).tensor, whole)


def test_several_continuations_of_each_prompt():
    model = language_model("softmax")
    made = generate(model, [[1, 2, 3], [4]], count=3, length=16, seed=3)
    repeated = [[1, 2, 3]] * 3 + [[4]] * 3
    assert torch.equal(made.tensor, generate(model, repeated, length=16, seed=3).tensor)
    assert len(made.tensor.unique(dim=0)) == 6 and made.prompt_lengths.tolist() == [3] * 3 + [1] * 3


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_long_prompt_is_read_in_pieces(kind, monkeypatch):
    model = language_model(kind)
    prompts = [[(7 * i) % VOCABULARY for i in range(n)] for n in (25, 1, 10, 11, 21)]
    whole = generate(model, prompts, length=30, seed=6).tensor
    pieces = []
    before = model.features
    monkeypatch.setattr(
        model, "features", lambda values, *rest, **more: pieces.append(values.shape[1]) or before(values, *rest, **more)
    )
    monkeypatch.setattr(steps_module, "PIECE", 10)
    assert torch.equal(generate(model, prompts, length=30, seed=6).tensor, whole)
    assert pieces[:4] == [10, 10, 4, 1]


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_stop_values(kind, cache):
    """A row ends with the stop value that it met; rows that go on notice nothing; one in the prompt stops nothing."""
    model = language_model(kind)
    prompts, stop = [[3], [5, 1, 5], [2, 2], [1], [8]], (5, 9)
    made = generate(model, prompts, length=40, seed=8, stop=stop, cache=cache)
    assert as_lists(made.values) == [loop(model, p, 40, 8, row, stop=stop) for row, p in enumerate(prompts)]
    lengths = [len(row) for row in made.values]
    assert len(set(lengths)) > 2 and made.finished.all()
    assert all(len(row) == 40 or row[-1] in stop for row in as_lists(made.values))
    with pytest.raises(ValueError, match=r"the rows have \[.*\] values: take the list"):
        _ = made.tensor


def test_stopped_rows_leave_the_state():
    """As soon as they are half of it: one long row does not pay for a hundred that have ended."""
    model, sizes = language_model(), []
    model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    made = generate(model, [[3], [5, 1, 5], [2, 2], [1], [8]], length=40, seed=8, stop=(5, 9))
    new = sorted(len(row) for row in made.made)
    assert sizes[0] == 5 and sizes[-1] == 1 and sum(sizes) < 5 * new[-1]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) <= 2 * sum(new)


def test_uniforms_are_philox():
    # The first of the known answers that the authors of Philox publish (Random123, kat_vectors)
    words = (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)
    assert philox((0, 0, 0, 0), (0, 0)) == words
    for seed, row, start in ((0, 0, 0), (2**64 - 1, 3, 5), (12, 2**40, 1_000_003)):
        exact = [philox_uniform(seed, row, start + i) for i in range(9)]
        assert uniforms(seed, row, start, 9).tolist() == exact


def test_uniforms_are_uniform_and_of_one_row_each():
    rows = np.stack([uniforms(seed, row, 0, 5000) for seed in (0, 1) for row in (0, 1, 2)])
    assert rows.min() >= 0 and rows.max() < 1
    grid = (np.arange(5000) + 0.5) / 5000
    assert np.abs(np.sort(rows, 1) - grid).max() < 1.63 / 5000**0.5  # Kolmogorov and Smirnov, 1%, for each of the six
    assert np.abs(np.corrcoef(rows) - np.eye(6)).max() < 4 / 5000**0.5


def test_uniforms_by_step():
    drawn = Uniforms(9, [4, 0], [3, 100], torch.device("cpu"))
    for step in (0, 1, AHEAD - 1, AHEAD, 3 * AHEAD + 5, 2):  # also back, after an interrupt
        expected = [uniforms(9, 4, 3 + step, 1)[0], uniforms(9, 0, 100 + step, 1)[0]]
        assert drawn.at(step).tolist() == expected and drawn.at(step).dtype == torch.float64


def test_a_seed_is_drawn_as_torch_is_seeded():
    model = image_model()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first, second = generate(model), generate(model)
        torch.manual_seed(3)
        again = generate(model)
    assert torch.equal(first.tensor, again.tensor) and first.seed == again.seed != second.seed
    assert torch.equal(generate(model, seed=second.seed).tensor, second.tensor)


def test_the_same_bytes_as_ever():
    """Recorded: what seeds mean must not change between versions."""
    text = generate(language_model(), [[1], [2, 3]], length=16, seed=0)
    images = generate(image_model(), count=2, seed=0)
    assert as_lists(text.values) == RECORDED_TEXT
    assert as_lists(images.tensor) == RECORDED_IMAGES


RECORDED_TEXT = [
    [1, 1, 0, 6, 5, 1, 10, 10, 1, 1, 7, 1, 6, 1, 10, 8],
    [2, 3, 6, 5, 8, 2, 10, 5, 5, 10, 9, 6, 2, 6, 1, 2],
]
RECORDED_IMAGES = [
    [0, 0, 0, 0, 64, 0, 255, 255, 255, 255, 255, 255, 0, 255, 255, 255, 0, 255, 255, 255, 0, 0, 101, 255],
    [200, 255, 255, 255, 0, 245, 0, 255, 0, 255, 111, 0, 255, 0, 0, 255, 255, 0, 255, 0, 255, 255, 0, 255],
]


def test_a_stream_gives_the_same_values():
    model = language_model()
    options = {"seed": 8, "stop": (5, 9)}
    prompts = [[3], [5, 1, 5], [2, 2], [1], [8]]
    made = generate(model, prompts, length=40, **options)
    rows: list[list[int]] = [[] for _ in prompts]
    run = stream(model, prompts, length=40, **options)
    for values in run:
        assert values.shape == (5,) and values.dtype == torch.int64
        for row, v in zip(rows, values.tolist(), strict=True):
            if v >= 0:
                row.append(v)
        assert run.counts.tolist() == [len(p) + len(row) for p, row in zip(prompts, rows, strict=True)]
        values.fill_(0)  # the caller's, to do with as he likes
    assert rows == as_lists(made.made) and run.finished.all() and next(run, None) is None


def test_an_endless_stream_keeps_its_size():
    run, sizes = stream(language_model(), [[1], [2, 3]], seed=0), []
    for _ in range(30):
        next(run)
        sizes.append(run.snapshot().nbytes)
    assert len(set(sizes)) == 1 and not run.finished.any() and run.counts.tolist() == [31, 32]


def test_prompts_in_all_their_forms():
    model = build(preset("text", width=16, num_heads=2, depth=1)).double()
    forms = [b"ab", [97, 98], torch.tensor([97, 98], dtype=torch.uint8), torch.tensor([[97, 98]]), [b"ab"], [[97, 98]]]
    forms.append([torch.tensor([97, 98], dtype=torch.int32)])
    first = generate(model, forms[0], length=8, seed=1).tensor
    assert all(torch.equal(generate(model, form, length=8, seed=1).tensor, first) for form in forms)
    two = generate(model, [b"ab", torch.tensor([97])], length=8, seed=1)
    assert torch.equal(two.tensor[:1], first) and two.values[1][0] == 97


def test_dropout_is_off_and_the_model_as_before():
    model = language_model()
    quiet = generate(model, [1], length=16, seed=2).tensor
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    modes = [module.training for module in model.modules()]
    assert torch.equal(generate(model, [1], length=16, seed=2).tensor, quiet)
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    run = stream(model, [1], length=16, seed=2)
    next(run)
    assert model.training and torch.is_grad_enabled()
