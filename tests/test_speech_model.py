"""The recogniser: streamed = whole, padding reaches nothing, and every body and subsampling under one call."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from sound_cases import pieces
from torch import Tensor

from linattn.audio import FrontEnd
from linattn.models import SpeechConfig, SpeechModel, build, preset
from linattn.models.files import from_json, to_json
from linattn.nn import Layer
from linattn.nn.recurrent import Recurrent
from linattn.nn.subsample import Subsample

BODIES: dict[str, dict[str, Any]] = {
    "linear": {},
    "softmax": {"attention": "softmax"},
    "hybrid": {"attentions": ("linear", "softmax")},
    "lstm": {"body": "lstm"},
    "convolution": {"conv": 3},
}


def made(*, causal: bool = True, attention: str = "linear", conv: int = 0, **options: Any) -> SpeechModel:
    torch.manual_seed(0)
    layer = Layer(width=12, num_heads=2, causal=causal, attention=attention, norm_first=True, conv=conv)
    config = SpeechConfig(layer, 2, num_labels=5, num_features=7, **options)
    return build(config).double().eval()  # type: ignore[return-value]


def frames(rows: int = 1, time: int = 45) -> Tensor:
    return torch.randn(rows, time, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("subsample", [1, 2, 4, 8])
@pytest.mark.parametrize("position", ["sine_add", "none"])
def test_streamed_is_whole(body, subsample, position):
    model, x = made(**BODIES[body], subsample=subsample, position=position), frames(2)
    whole, none = model(x)
    assert none is None and whole.shape == (2, -(-45 // subsample), 6)
    for seed in range(3):
        state, parts = model.empty_state(2), []
        for piece in pieces(x.transpose(0, 1), seed, most=9):
            log_probs, state = model(piece.transpose(0, 1), state)
            parts.append(log_probs)
        assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
        assert state.seen.tolist() == [45, 45]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("time", [1, 2, 7, 8])
def test_subsampling_against_its_definition(causal, time):
    torch.manual_seed(0)
    subsample, x = Subsample(7, 4, 2, causal=causal).double(), frames(2, time)
    conv = subsample.stages[0]
    assert isinstance(conv, torch.nn.Conv1d) and conv.bias is not None
    first = -2 if causal else -1
    expected = torch.zeros(2, -(-time // 2), 4, dtype=torch.float64)
    for u in range(expected.shape[1]):
        expected[:, u] = conv.bias
        for j in range(3):
            if 0 <= 2 * u + first + j < time:
                expected[:, u] += x[:, 2 * u + first + j] @ conv.weight[..., j].T
    assert (expected < 0).any(), "nothing to clip"
    assert torch.allclose(subsample(x)[0], expected.relu(), rtol=0, atol=1e-12)


def test_a_state_keeps_no_more_frames_than_it_needs():
    """As views of what was read they would hold a whole utterance in memory."""
    subsample = Subsample(7, 4, 4).double()
    _, pending = subsample(frames(2, 45), subsample.empty_state(2))
    assert pending is not None
    assert all(x.untyped_storage().nbytes() == x.numel() * 8 for x in pending)


def test_dropout_is_between_the_layers_of_an_lstm():
    made_with = {depth: Recurrent(8, depth, causal=True, dropout=0.3).layers.dropout for depth in (1, 2)}
    assert made_with == {1: 0.0, 2: 0.3}


def test_an_empty_row_beside_others():
    """Of an LSTM that reads both ways, whose rows are packed."""
    model, x = made(causal=False, body="lstm"), frames(2)
    together, _ = model(x, lengths=[30, 0])
    assert torch.allclose(together[:1, :30], model(x[:1, :30])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("body", [*BODIES, "both ways", "lstm both ways"])
@pytest.mark.parametrize("subsample", [1, 4])
def test_padding_reaches_nothing(body, subsample):
    options = {
        "causal": False,
        "body": "lstm" if "lstm" in body else "transformer",
        "conv": 4 if body == "both ways" else 0,
    }
    model = made(subsample=subsample, **(options if "both" in body else BODIES[body]))
    x, lengths = frames(3), [45, 17, 30]
    apart = [model(x[b : b + 1, :n])[0] for b, n in enumerate(lengths)]
    for b, n in enumerate(lengths):
        x[b, n:] = torch.nan
    together, _ = model(x, lengths=lengths)
    for b, alone in enumerate(apart):
        assert torch.allclose(together[b, : alone.shape[1]], alone[0], rtol=0, atol=1e-12)
    assert model.out_lengths(x, lengths).tolist() == [alone.shape[1] for alone in apart]
    model.train()
    model.nats(x, torch.tensor([[1, 2], [3, 0], [4, 5]]), lengths, [2, 1, 2]).sum().backward()
    assert all(w.grad is not None and bool(w.grad.isfinite().all()) for w in model.parameters())


@pytest.mark.parametrize("subsample", [1, 2, 4])
def test_a_causal_model_does_not_see_the_future(subsample):
    model, x = made(subsample=subsample), frames()
    changed = torch.cat([x[:, :24], 3 * x[:, 24:]], 1)
    known = 24 // subsample
    before, after = model(x)[0], model(changed)[0]
    assert torch.equal(before[:, :known], after[:, :known])
    assert not torch.allclose(before[:, known:], after[:, known:])


@pytest.mark.parametrize("subsample", [2, 4])
def test_the_loss_is_that_of_the_head(subsample):
    model, x = made(subsample=subsample), frames(2)
    labels = torch.tensor([[1, 2, 3], [4, 4, 0]])
    times = torch.tensor([-(-45 // subsample)] * 2)
    expected = torch.nn.functional.ctc_loss(
        model(x)[0].transpose(0, 1), labels, times, torch.tensor([3, 2]), reduction="none"
    )
    assert torch.allclose(model.nats(x, labels, None, [3, 2]), expected, rtol=1e-12)


def test_a_hybrid_has_the_layers_that_were_named():
    model = made(attentions=("softmax", "linear"))
    assert [block.attention.kind for block in model.stack.blocks] == ["softmax", "linear"]  # type: ignore[union-attr]


def test_labels_become_text():
    layer = Layer(width=8, num_heads=2)
    spelt = SpeechModel(SpeechConfig(layer, 1, 3, labels=("a", "b", " ")))
    phonemes = SpeechModel(SpeechConfig(layer, 1, 3, labels=("AH", "B", "T")))
    numbers = SpeechModel(SpeechConfig(layer, 1, 3))
    assert [m.text([2, 3, 1]) for m in (spelt, phonemes, numbers)] == ["b a", "B T AH", "2 3 1"]


def test_the_front_end_is_saved_with_the_model():
    front = FrontEnd(bins=4, mean=(1.0, 2.0, 3.0, 4.0), std=(1.0,) * 4)
    options = {"num_features": 4, "front": front, "num_labels": 2, "labels": ("A", "B")}
    config = preset("transcriber", attentions=("linear",) * 6, **options)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


LAYER = Layer(width=8, num_heads=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SpeechConfig(LAYER, 1, 3, body="gru"), "body must be one of transformer, lstm, got 'gru'"),
        (lambda: SpeechConfig(LAYER, 1, 3, subsample=3), "subsample must be one of 1, 2, 4, 8, got 3"),
        (lambda: SpeechConfig(LAYER, 2, 3, attentions=("linear",)), "names the attention of each of 2 transformer"),
        (lambda: SpeechConfig(LAYER, 1, 3, labels=("a",)), "3 labels have as many names, got 1"),
        (lambda: SpeechConfig(LAYER, 1, 3, front=FrontEnd(bins=80)), "the front end makes 80 features a frame, not 40"),
        (lambda: made(causal=False)(frames(), made().empty_state(1)), r"cannot go on from a state"),
        (lambda: made(causal=False, body="lstm").empty_state(1), "this LSTM reads both ways"),
        (lambda: made(causal=False, subsample=2).empty_state(1), "looks one frame ahead"),
        (
            lambda: made(subsample=2)(frames(), made(subsample=2).empty_state(1), lengths=[3]),
            "rows of different lengths cannot go on from a state where 2 frames become one",
        ),
        (
            lambda: made(body="lstm")(frames(), made(body="lstm").empty_state(1), lengths=[3]),
            "rows of different lengths cannot go on from a state: give them one by one",
        ),
    ],
)
def test_wrong_calls_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
