"""Generation's fused step, interpreted on the CPU: the same distributions, values and states as the ordinary step."""

# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import pytest
import torch
from generate_cases import philox_uniform
from helpers import assert_as_accurate

from linattn.generate import Snapshot, Stream, stream
from linattn.generate.fused import FusedStep, step_for, why_not
from linattn.generate.graph import StaticStep
from linattn.generate.request import Request, start
from linattn.generate.snapshot import Sampling
from linattn.generate.steps import CachedStep
from linattn.generate.stream import _may_be_ragged
from linattn.generate.uniforms import AHEAD, Uniforms
from linattn.models import ImageConfig, ImageModel, LanguageConfig, LanguageModel
from linattn.nn import Layer
from linattn.nn import fused as fused_module
from linattn.nn.heads import MixtureOfLogistics
from linattn.ops import gpu

if not gpu.status()[0]:
    pytest.skip(f"fused steps: {gpu.status()[1]}", allow_module_level=True)

import interpreted

from linattn.ops.triton import memory as memory_module

interpreted.quicken()

DEVICE = "cpu" if gpu.interpreted() else "cuda"
SHAPE = (4, 2, 1)
LENGTH = 8


@pytest.fixture(autouse=True)
def _folds_of_four(monkeypatch):
    """Several folds in a few steps."""
    monkeypatch.setattr(memory_module, "FOLD", 4)


@pytest.fixture(params=["thin", "wide"])
def form(request, monkeypatch):
    """Both forms of the step, whatever the number of rows."""
    monkeypatch.setattr(fused_module, "THIN_ROWS", 8 if request.param == "thin" else 0)
    return request.param


def image_model(dtype=torch.float32, depth=2, **layer) -> ImageModel:
    options = {"width": 32, "num_heads": 2, "ff_width": 72} | layer
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = ImageModel(ImageConfig(SHAPE, Layer(**options), depth=depth, mixtures=3))
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.data += 0.3 * torch.randn_like(p)
    model.first.fit(torch.arange(200))
    return model.to(DEVICE, dtype).eval()


def params_of(model, step, values, live=None):
    """The parameters of each value's distribution, step by step, and the last state."""
    seen = []
    hook = model.head.register_forward_hook(lambda _, __, made: seen.append(made.flatten(1)))
    state = model.empty_state(len(values))
    with torch.no_grad():
        for t in range(values.shape[1]):
            now = None if live is None else (t < live).long()
            u = torch.full((len(values),), 0.5, dtype=torch.float64, device=DEVICE)
            state, _ = step(state, values[:, t].contiguous(), u, now)
    hook.remove()
    step.fold()
    return torch.stack(seen), state


LAYERS = {
    "paper": {},
    "norms first": {"norm_first": True, "activation": "gelu"},
    "swiglu, rms, no biases": {"norm_first": True, "norm": "rms", "activation": "swiglu", "bias": False},
    "one head for all": {"num_kv_heads": 1},
    "rotary": {"rotary": "before", "activation": "gelu"},
    "other widths": {
        "width": 40,
        "num_heads": 3,
        "head_width": 8,
        "value_width": 24,
        "feature_map": "relu",
        "eps": 0.01,
    },
    "not normalised": {"normalize": False, "feature_map": "identity", "scale": 0.1},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_against_the_model(layer, form):
    """Against the model over whole sequences, in float64, and as accurate as the model's own steps are."""
    model = image_model(**LAYERS[layer])
    values = torch.randint(256, (1, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    step = FusedStep(model, Sampling(), LENGTH)
    got, state = params_of(model, step, values)
    assert step._stack.thin == (form == "thin" and layer not in ("one head for all", "rotary"))
    plain, plain_state = params_of(model, CachedStep(model, Sampling()), values)
    exact_model = image_model(**LAYERS[layer]).double()
    with torch.no_grad():
        exact, exact_state = exact_model(values, exact_model.empty_state(1))
    assert_as_accurate(got, exact.transpose(0, 1), plain, factor=3.0)
    assert state.tensors().keys() == plain_state.tensors().keys()
    truth = exact_state.tensors()
    for name, x in state.tensors().items():
        if name.endswith("seen"):
            assert torch.equal(x, truth[name])
        elif name in truth:
            assert_as_accurate(x, truth[name], plain_state.tensors()[name], factor=3.0)


def test_in_bfloat16(form):
    model = image_model(torch.bfloat16)
    values = torch.randint(256, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    got, _ = params_of(model, FusedStep(model, Sampling(), LENGTH), values)
    plain, _ = params_of(model, CachedStep(model, Sampling()), values)
    exact_model = image_model(torch.bfloat16).double()
    with torch.no_grad():
        exact, _ = exact_model(values)
    assert_as_accurate(got, exact.transpose(0, 1), plain)


def test_rows_that_have_ended(form):
    model = image_model()
    values = torch.randint(256, (3, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    live = torch.tensor([6, 2, 4], device=DEVICE)
    _, state = params_of(model, FusedStep(model, Sampling(), LENGTH), values, live)
    _, plain = params_of(model, CachedStep(model, Sampling()), values, live)
    assert torch.equal(state.seen, live)
    for name, x in plain.tensors().items():
        if not name.endswith("low"):
            torch.testing.assert_close(state.tensors()[name], x, rtol=1e-4, atol=1e-5)


def static_stream(model, prompt, **options) -> Stream:
    """A stream as it is on a GPU; interpreted, without the graph."""
    begin = start(model, Request(prompt, **options))
    run = Stream(model, begin)
    step = step_for(model, run.sampling, begin.state, begin.length)
    assert isinstance(step, FusedStep)
    run._step = StaticStep(step, capture=DEVICE == "cuda", ragged=_may_be_ragged(begin))
    return run


def values_of(run: Stream) -> torch.Tensor:
    return torch.stack(list(run), 1)


def test_the_same_images(form):
    """Values that are drawn: equal ones, from equal random numbers; first ones from the counts of first values."""
    model = image_model(depth=1)
    want = values_of(stream(model, None, count=2, seed=3, graph=False))
    assert torch.equal(values_of(static_stream(model, None, count=2, seed=3)), want)


def test_a_stream_of_rows_that_end_apart():
    """Prompts of different lengths, a stop value, top-k: ordinary drawing behind a fused stack."""
    layer = Layer(width=16, num_heads=2, feature_map="softplus")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel(LanguageConfig(layer, depth=1, vocabulary=11)).to(DEVICE).eval()
    prompts, options = [[3], [5, 1, 5], [2] * 6], {"length": 11, "seed": 1, "stop": (5,), "top_k": 6}
    want = values_of(stream(model, prompts, graph=False, **options))
    assert torch.equal(values_of(static_stream(model, prompts, **options)), want)


def test_a_snapshot_says_all(tmp_path):
    """Taken between two folds, it is a state like any other: the stream, the ordinary step and the fused one go on."""
    model = image_model(depth=1)
    run = static_stream(model, None, count=1, seed=3)
    begun = [next(run) for _ in range(6)]
    run.snapshot().save(tmp_path / "half.safetensors")
    half = Snapshot.load(tmp_path / "half.safetensors", DEVICE)
    ordinary = stream(model, None, count=1, seed=3, graph=False)
    for _ in begun:
        next(ordinary)
    for name, x in ordinary.stands().state.tensors().items():
        if not name.endswith("low"):
            torch.testing.assert_close(half.state.tensors()[name], x, rtol=1e-4, atol=1e-5)
    rest = values_of(run)
    assert torch.equal(values_of(static_stream(model, None, snapshot=half.clone())), rest)
    assert torch.equal(values_of(stream(model, snapshot=half, graph=False)), rest)
    want = values_of(stream(model, None, count=1, seed=3, graph=False))
    assert torch.equal(torch.cat([torch.stack(begun, 1), rest], 1), want)


def test_what_is_not_fused(monkeypatch):
    model = image_model()
    state = model.empty_state(1)
    assert why_not(model, state, LENGTH) is None
    assert "need a length" in why_not(model, state, None)
    refused = {
        "of one dtype": image_model().double(),
        "rotary positions after": image_model(rotary="after"),
        "feature map 'favor'": image_model(feature_map="favor", map_options={"num_samples": 16}),
        "multiples of 8": image_model(width=24),
        "not that of linear": image_model(attention="softmax"),
    }
    for reason, other in refused.items():
        found = why_not(other, other.empty_state(1), LENGTH)
        assert found is not None and reason in found
        assert type(step_for(other, Sampling(), other.empty_state(1), LENGTH)) is CachedStep
    with torch.autocast(DEVICE, torch.bfloat16):
        assert "autocast" in why_not(model, state, LENGTH)
    monkeypatch.setattr(gpu, "status", lambda: (False, "no CUDA device was found"))
    assert why_not(model, state, LENGTH) == "no CUDA device was found"


@pytest.mark.parametrize("seed", [0, 3, 2**64 - 1])
def test_uniforms_of_the_device(seed):
    rows, places = [0, 5, 2**40], [0, 7, 3070]
    drawing = Uniforms(seed, rows, places, torch.device(DEVICE))
    drawing._begin = 0
    made = drawing._drawn_on_device()
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        for ahead in (0, 1, 2, 3, AHEAD - 1):
            assert made[ahead, i].item() == philox_uniform(seed, row, place + ahead)
    host = Uniforms(seed, rows, places, torch.device("cpu"))
    assert all(torch.equal(host.at(t), made[t].cpu()) for t in range(AHEAD))


def test_values_of_the_device():
    """A mixture of logistics is drawn from as on the host: narrow and wide, in the tails, at the ends of [0, 1)."""
    head = MixtureOfLogistics(8, mixtures=3)
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(300, 9, generator=generator) * torch.tensor([3.0] * 3 + [0.8] * 3 + [4.0] * 3)
    params[:4, :3] = torch.tensor([-200.0, 0.0, -200.0])  # all weight on the second component
    u = torch.rand(300, generator=generator, dtype=torch.float64)
    u[:4] = torch.tensor([0, 2.0**-53, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    pending = torch.randint(256, (300,), generator=generator)
    live = (torch.arange(300) % 5 > 0).long()
    step = FusedStep(replaced_head(image_model(), head), Sampling(), LENGTH)
    on_device = [x.to(DEVICE) for x in (params, pending, u, live)]
    want = head.draw(params, u)
    assert len(want.unique()) > 100
    assert torch.equal(step._drawn(*on_device[:3], None).cpu(), want)
    assert torch.equal(step._drawn(*on_device).cpu(), torch.where(live > 0, want, pending))


def replaced_head(model, head):
    model.head = head.to(DEVICE)
    return model


def test_narrow_sums():
    model = image_model()
    values = torch.randint(256, (1, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact, _ = params_of(model, FusedStep(model, Sampling(), LENGTH), values)
    narrow, _ = params_of(model, FusedStep(model, Sampling(), LENGTH, narrow=True), values)
    error = (narrow - exact).abs().max() / exact.abs().max()
    assert 0 < error < 0.01
    assert torch.equal(narrow[:4], exact[:4])  # before the first fold nothing is in the copy
