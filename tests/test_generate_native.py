"""The native step beside torch's: the same numbers, states that go from one to the other, the same values by a seed."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_as_accurate

from linattn.audio import FrontEnd
from linattn.generate import Snapshot, generate, stream
from linattn.generate import native as native_room
from linattn.generate.native import NativeStep, Plan, SpeechStep, owned, params_after, why_not
from linattn.generate.run import Pace
from linattn.generate.snapshot import Sampling
from linattn.models import ImageConfig, ImageModel, LanguageConfig, LanguageModel, SpeechConfig, SpeechModel
from linattn.nn import Layer
from linattn.ops import cpu
from linattn.ops.parts import PARTS
from linattn.transcribe import FEW, Transcriber

pytestmark = pytest.mark.skipif(not cpu.status()[0], reason=cpu.status()[1])

OTHERS = cpu.library().linattn_available().decode().split()[1:] if cpu.status()[0] else []

PLAIN = Layer(width=32, num_heads=2)
ODD = Layer(width=33, num_heads=3, head_width=5, value_width=19, ff_width=67)


def image(layer: Layer = PLAIN, depth: int = 2, **options) -> Any:
    return _made(ImageModel(ImageConfig((4, 3, 2), layer, depth, **{"mixtures": 3, **options})))


def language(layer: Layer = PLAIN, depth: int = 2, **options) -> Any:
    return _made(LanguageModel(LanguageConfig(layer, depth, **{"vocabulary": 11, **options})))


def speech(layer: Layer = PLAIN, **options) -> Any:
    return _made(SpeechModel(SpeechConfig(layer, 2, num_labels=7, num_features=13, **options)))


def _made(model) -> Any:
    """Random weights of size one, norms and biases too, so that every part matters."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        away = torch.randn(weight.shape, generator=generator) / (weight.shape[-1] ** 0.5 if weight.dim() > 1 else 3)
        weight.data = away + (1.0 if weight.dim() == 1 and "norm" in name and "weight" in name else 0.0)
    return model.eval()


MODELS = {
    "image, logistics": image,
    "image, categorical": lambda: image(head="categorical"),
    "row, column, channel": lambda: image(position="row_column_channel"),
    "learned": lambda: language(position="learned", position_options={"max_length": 9}, tied=False),
    "no place, pre-norm, gelu": lambda: language(replace(PLAIN, norm_first=True, activation="gelu"), position="none"),
    "rms, swiglu, no bias": lambda: language(replace(PLAIN, norm="rms", activation="swiglu", bias=False)),
    "rotary before": lambda: language(replace(PLAIN, rotary="before")),
    "rotary after, one key head": lambda: language(replace(PLAIN, rotary="after", num_kv_heads=1)),
    "odd sizes": lambda: language(ODD, position="learned", position_options={"max_length": 99}),
    "odd sizes, shared heads": lambda: language(replace(ODD, num_kv_heads=1, norm_first=True), position="none"),
    "softplus, not normalised": lambda: language(replace(PLAIN, feature_map="softplus", normalize=False)),
    "identity, eps, scale": lambda: language(replace(PLAIN, feature_map="identity", eps=0.1, scale=0.5)),
    "relu": lambda: language(replace(PLAIN, feature_map="relu")),
    "convolution": lambda: language(replace(PLAIN, conv=4)),
    "convolution, pre-norm, odd sizes": lambda: language(replace(ODD, conv=2, norm_first=True), position="none"),
    "speech, convolution": lambda: speech(replace(PLAIN, conv=3, norm_first=True)),
    "wide": lambda: image(Layer(width=160, num_heads=2, norm_first=True), depth=1),
    "speech": speech,
}


def tokens(model, rows: int, steps: int) -> torch.Tensor:
    """(steps, rows), or frames (steps, rows, features)."""
    generator = torch.Generator().manual_seed(rows)
    if isinstance(model, SpeechModel):
        return torch.randn(steps, rows, model.config.num_features, generator=generator)
    return torch.randint(model.head.num_values, (steps, rows), generator=generator)


@torch.no_grad()
def in_steps(model, inputs, state=None):
    """Torch, step by step: parameters (steps, rows, P), and the last state."""
    state = model.empty_state(inputs.shape[1]) if state is None else state
    made = []
    for x in inputs:
        params, state = model(x[:, None], state)
        made.append(params[:, 0])
    return torch.stack(made), state


def natively(plan, state: Any, inputs) -> Any:
    made = []
    for x in inputs:
        params, state = params_after(plan, state, x)
        made.append(params)
    return torch.stack(made), state


def same_bits(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


def test_the_structures_are_laid_out_as_in_c():
    sizes = [cpu.library().linattn_model_sizes(which) for which in range(len(PARTS))]
    assert sizes == [ctypes.sizeof(part) for part in PARTS]


@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("name", MODELS)
def test_against_torch(name, rows):
    """Parameters as accurate as torch's, within 1e-5 of their scale; states that torch goes on from."""
    model = MODELS[name]()
    inputs = tokens(model, rows, 7)
    plain, _ = in_steps(model, inputs)
    got, state = natively(Plan(model), model.empty_state(rows), inputs[:4])
    more, _ = in_steps(model, inputs[4:6], state)  # torch goes on from a native state
    _, halfway = in_steps(model, inputs[:5])
    last, end = natively(Plan(model), halfway, inputs[5:])  # and the other way round
    got = torch.cat([got, more, last[1:]])
    exact, true_end = in_steps(model.double(), inputs.double() if isinstance(model, SpeechModel) else inputs)
    assert_as_accurate(got, exact, plain, factor=4.0)
    assert (got - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert torch.equal(end.seen, torch.full((rows,), 7))
    for part, true in zip(end.blocks, true_end.blocks, strict=True):
        assert (part.own.memory.kv - true.own.memory.kv).abs().max() <= 1e-5 * true.own.memory.kv.abs().max()


def test_sums_stay_exact_over_many_steps():
    """As torch's steps: a plain fp32 sum of so many terms would be a thousand roundings off."""
    model = language(Layer(width=8, num_heads=1, ff_width=8), depth=1, position="none")
    steps, token = 20_000, torch.tensor([3])
    step = NativeStep(Plan(model), Sampling(temperature=0.0))
    state: Any = owned(model.empty_state(1))
    _, once = in_steps(model.double(), token[None])
    model.float()
    for _ in range(20):  # one token at a time would take long: the same token, made by force
        made = step.slice(state, token, torch.zeros(1, 1), torch.ones(1, dtype=torch.int64))
        made.run()
    assert torch.equal(state.seen, torch.tensor([20]))
    part = native_room.RunPart(rows=1, steps=1)
    left, pending = torch.tensor([steps]), token.clone()
    part.left, part.pending = left.data_ptr(), pending.data_ptr()
    part.steps = steps - 20  # without `made` nothing is drawn, and the pending token stays
    step.plan.call(step.plan.bind(state), part)
    exact = once.blocks[0].own.memory.kv * steps
    error = (state.blocks[0].own.memory.kv - exact).abs().max() / exact.abs().max()
    assert error < 2e-7 and torch.equal(state.seen, torch.tensor([steps]))


@pytest.mark.parametrize("name", ["image, logistics", "rotary after, one key head", "wide"])
def test_rows_threads_and_slices_change_no_bit(name, monkeypatch):
    model = MODELS[name]()
    monkeypatch.setattr(native_room, "SHARE", 1)  # threads for any model
    alone = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert Plan(model).threads(1) == threads
            made.append(generate(model, count=9, length=20, seed=3, progress=False))
    finally:
        torch.set_num_threads(alone)
    for other in made[1:]:
        assert torch.equal(made[0].tensor, other.tensor) and same_bits(made[0].snapshot, other.snapshot)
    row = generate(model, count=1, first_row=4, length=20, seed=3, progress=False)
    assert torch.equal(row.tensor[0], made[0].tensor[4]) and same_bits(
        row.snapshot.state, made[0].snapshot.state.select(4)
    )
    steps = torch.stack(list(stream(model, count=9, length=20, seed=3)), 1)
    assert torch.equal(steps, made[0].tensor)


SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 4},
    {"top_p": 0.6, "temperature": 1.3},
    {"top_k": 6, "top_p": 0.8},
]


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("name", ["image, logistics", "image, categorical", "rms, swiglu, no bias", "wide"])
def test_the_same_seed_makes_the_same_values_as_torch(name, options):
    model = MODELS[name]()
    given: dict[str, Any] = {"count": 5, "length": 24, "seed": 11, "progress": False, **options}
    mine, theirs = (generate(model, impl=impl, **given) for impl in ("native", "torch"))
    assert torch.equal(mine.tensor, theirs.tensor)
    assert mine.tensor.unique().numel() > 3 or options.get("temperature") == 0


def test_prompts_of_different_lengths_and_stop_values():
    model = language()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1]] * 4
    given: dict[str, Any] = {"length": 30, "seed": 2, "stop": (0, 7), "progress": False}
    mine, theirs = (generate(model, prompts, impl=impl, **given) for impl in ("native", "torch"))
    assert [row.tolist() for row in mine.values] == [row.tolist() for row in theirs.values]
    assert torch.equal(mine.finished, theirs.finished) and torch.equal(mine.snapshot.stopped, theirs.snapshot.stopped)
    assert len({len(row) for row in mine.values}) > 3


@pytest.mark.parametrize("cut", [1, 2, 9, 23])
def test_snapshot_and_resume_bit_for_bit(cut, tmp_path):
    model = image()
    whole = generate(model, count=3, seed=5, progress=False)
    run = stream(model, count=3, seed=5)
    for _ in range(cut):
        next(run)
    taken = run.snapshot()
    kept = taken.clone()
    rest = torch.stack(list(run), 1)
    assert same_bits(taken, kept)  # the stream went on in memory of its own
    taken.save(tmp_path / "half")
    again = torch.stack(list(stream(model, snapshot=Snapshot.load(tmp_path / "half"))), 1)
    assert torch.equal(again, rest) and torch.equal(rest, whole.tensor[:, cut:])
    again = torch.stack(list(stream(model, snapshot=taken)), 1)
    assert torch.equal(again, rest) and same_bits(taken, kept)  # and so did the one from the snapshot at hand
    by_torch = torch.stack(list(stream(model, snapshot=taken, impl="torch")), 1)
    assert torch.equal(by_torch, rest)


def test_interrupted_between_a_call_and_its_values(monkeypatch):
    """What a native call has made is neither lost nor made twice."""
    model = image()
    whole = generate(model, count=2, seed=5, progress=False)
    monkeypatch.setattr(Pace, "now", lambda self: 4)
    settle, calls = native_room.Slice.run, []

    def run_then_stop(self):
        settle(self)
        calls.append(self)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(native_room.Slice, "run", run_then_stop)
    made = generate(model, count=2, seed=5, progress=False)
    assert made.interrupted and torch.equal(made.tensor, whole.tensor[:, :13])
    rest = generate(model, snapshot=made.snapshot, progress=False)
    assert torch.equal(rest.tensor, whole.tensor)


def test_narrow_weights_are_close_and_read_less():
    model = image(Layer(width=64, num_heads=2))
    inputs = tokens(model, 3, 5)
    plain, _ = in_steps(model, inputs)
    sizes = []
    for weights, most in (("fp32", 1e-5), ("bf16", 2e-2), ("int8", 4e-2)):
        plan = Plan(model, weights)
        got, _ = natively(plan, model.empty_state(3), inputs)
        error = (got - plain).abs().max() / plain.abs().max()
        assert error < most and (weights == "fp32" or error > 1e-5), (weights, error)
        sizes.append(plan.nbytes)
    assert sizes[0] > 1.9 * sizes[1] > 3.2 * sizes[2]
    assert generate(model, weights="int8", seed=1, progress=False).tensor.shape == (1, 24)


@pytest.fixture(params=OTHERS)
def isa(request):
    """All of the machine's instruction sets but the best one, which the other tests run on."""
    library = cpu.library()
    best = library.linattn_isa()
    assert library.linattn_choose(request.param.encode()) == 0
    yield request.param
    assert library.linattn_choose(best) == 0


@pytest.mark.parametrize("name", MODELS)
def test_each_instruction_set(isa, name):
    assert cpu.library().linattn_isa().decode() == isa
    for rows in (1, 8):
        test_against_torch(name, rows)


def test_narrow_weights_of_each_instruction_set(isa):
    test_narrow_weights_are_close_and_read_less()


def test_numbers_that_are_none_cannot_crash():
    """Uniforms that are NaN or outside [0, 1), and weights that are not finite."""
    model = language()
    plan = Plan(model)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.5)):
        for u in (float("nan"), -1.0, 1.0, 1e300, float("inf")):
            made = NativeStep(plan, sampling).slice(
                owned(model.empty_state(2)),
                torch.tensor([1, 2]),
                torch.full((3, 2), u, dtype=torch.float64),
                torch.full((2,), 3),
            )
            made.run()
            assert made.done == 3 and (made.made >= 0).all() and (made.made < 11).all()
    model.head.tied[0].weight.data[4] = torch.nan
    run = stream(model, [1], seed=1)
    with pytest.raises(ValueError, match="of 11 parameters of the distribution are not finite"):
        next(run)
    with pytest.raises(ValueError, match="not finite"):
        next(run)


def test_wrong_calls_are_refused(unchecked):
    model = language()
    plan, step = Plan(model), NativeStep(Plan(model), Sampling())
    state, left, u = model.empty_state(2), torch.tensor([1, 1]), torch.zeros(1, 2)
    for pending in (torch.tensor([1, 11]), torch.tensor([-1, 1])):
        with pytest.raises(ValueError, match="pending tokens must lie in 0 … 10"):
            step.slice(state, pending, u, left)
    for wrong in (torch.zeros(1, 3), torch.zeros(2)[None, :1]):
        with pytest.raises(ValueError, match="one state, pending token and count for each row"):
            step.slice(state, torch.tensor([1, 2]), wrong, left)
    with pytest.raises(ValueError, match="not one that this plan's model can write to"):
        step.slice(language(replace(PLAIN, num_heads=1)).empty_state(2), torch.tensor([1, 2]), u, left)
    state = state.clone()
    state.blocks[0].own.memory.kv = state.blocks[0].own.memory.kv.transpose(2, 3)
    with pytest.raises(ValueError, match="not one that this plan's model can write to"):
        step.slice(state, torch.tensor([1, 2]), u, left)
    with pytest.raises(ValueError, match="tokens must lie in"):
        params_after(plan, model.empty_state(1), torch.tensor([11]))
    with pytest.raises(ValueError, match="the step reads integers"):
        params_after(plan, model.empty_state(1), torch.tensor([1.0]))
    short = language(position="learned", position_options={"max_length": 3}, tied=False)
    run = stream(short, [1], seed=1)
    assert len([next(run) for _ in range(3)]) == 3
    with pytest.raises(ValueError, match="max_length"):
        next(run)


def test_what_it_cannot_express_goes_to_torch(monkeypatch):
    cases = {
        "softmax": (language(replace(PLAIN, attention="softmax")), "linear self-attention only"),
        "favor": (language(replace(PLAIN, feature_map="favor")), "not elementwise"),
        "double": (language().double(), "torch.float64"),
        "hook": (language(), "forward hooks"),
        "adapter": (language(), "it knows no Sequential"),
    }
    cases["hook"][0].stack.blocks[0].ff.register_forward_hook(lambda *_: None)
    cases["adapter"][0].stack.blocks[1].ff = torch.nn.Sequential(cases["adapter"][0].stack.blocks[1].ff)
    for model, reason in cases.values():
        assert reason in str(why_not(model))
        assert generate(model, [1], length=4, seed=1, progress=False).tensor.shape == (1, 4)
        with pytest.raises(ValueError, match=r"impl='native' cannot run here: .*" + reason):
            generate(model, [1], length=4, impl="native", progress=False)
        with pytest.raises(ValueError, match=r"weights='int8' are for the native step, .*" + reason):
            generate(model, [1], length=4, weights="int8", progress=False)
    with torch.autocast("cpu"):
        assert why_not(language()) == "autocast is on"
    for wrong in ({"impl": "fast"}, {"weights": "int4"}):
        with pytest.raises(ValueError, match=r"must be (one of )?'(auto|fp32)'"):
            generate(language(), [1], length=4, progress=False, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a cache"):
        generate(language(), [1], length=4, cache=False, impl="native", progress=False)
    monkeypatch.setattr(cpu, "status", lambda: (False, "no library here"))
    assert generate(language(), [1], length=4, seed=1, progress=False).tensor.shape == (1, 4)
    assert why_not(language()) == "no library here"


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"subsample": 4}, {"subsample": 2, "position": "none"}], ids=str)
def test_a_recogniser_reads_pieces_natively(options):
    """Pieces of any length, now by torch and now natively: log-probabilities within 1e-5 of their scale."""
    model = speech(**options)
    step, frames = SpeechStep(model), torch.randn(1, 60, 13, generator=torch.Generator().manual_seed(0))
    want, _ = model(frames, model.empty_state(1))
    state, made = model.empty_state(1), []
    for i, piece in enumerate(frames.split([1, 1, 3, 9, 2, 20, 7, 1, 16], 1)):
        got, state = model(piece, state, donate=True) if i in (2, 5) else step(piece, state)
        made.append(got)
    got = torch.cat(made, 1)
    assert got.shape == want.shape and (got - want).abs().max() < 1e-5 * want.abs().max()
    _, whole = model(frames, model.empty_state(1))
    for name, x in state.tensors().items():
        if not name.endswith("_low"):  # what rounding took depends on the order of sums
            same = whole.tensors()[name]
            assert (x - same).abs().max() <= 1e-5 * same.abs().max(), name


def test_a_stream_of_sound_is_read_natively(monkeypatch):
    """By itself, and only while few frames come at once; with a reason where it cannot."""
    front = FrontEnd(bins=13).fitted(torch.full((13,), 9.0), torch.full((13,), 3.0))
    model = speech(subsample=2, front=front)
    model.enter.weight.data *= 20
    model.head.linear.weight.data *= 10
    sound = torch.randn(16_000, generator=torch.Generator().manual_seed(0)).cumsum(0) / 100
    calls: list[int] = []
    run = Plan.call
    monkeypatch.setattr(Plan, "call", lambda self, *given: (calls.append(1), run(self, *given))[1])

    def heard(impl: str, piece: int) -> list[int]:
        said = Transcriber(model, impl=impl)
        for samples in sound.split(piece):
            said.hear(samples)
        said.end()
        return said.labels

    want = heard("torch", 1_600)
    assert len(want) > 5 and not calls, "a model that says nothing would prove nothing"
    assert heard("auto", 1_600) == heard("native", 700) == want
    assert len(calls) == 2 * 49  # 98 frames in a second, half as many after subsampling
    calls.clear()
    assert heard("auto", 16_000) == want and FEW < 49 and len(calls) < FEW  # the end of the sound
    assert Transcriber(model).why_torch is None
    for other, reason in ((speech(front=front, body="lstm"), "Recurrent"), (copy.deepcopy(model).double(), "float64")):
        assert reason in str(Transcriber(other).why_torch)
        with pytest.raises(ValueError, match=rf"impl='native' cannot run here: .*{reason}"):
            Transcriber(other, impl="native")
    with pytest.raises(ValueError, match=r"one of 'auto', 'native', 'torch', got 'fast'"):
        Transcriber(model, impl="fast")


def test_the_mixture_in_the_tails():
    """Temperatures, top-k and top-p of a mixture, down to where probabilities are no fp64 numbers; torch in fp64."""
    model = image()
    generator = np.random.default_rng(0)
    for _ in range(5):
        bias = torch.tensor(generator.normal(0, 4, 9), dtype=torch.float32)
        with torch.no_grad():
            model.head.linear.weight.zero_()
            model.head.linear.bias.copy_(bias)
        exact = copy.deepcopy(model).double()
        for options in ({"temperature": 60.0}, {"temperature": 3.0, "top_k": 99}, {"temperature": 0.5}, {"top_p": 0.7}):
            given: dict[str, Any] = {"count": 3, "seed": 1, "progress": False, **options}
            assert torch.equal(
                generate(model, impl="native", **given).tensor, generate(exact, impl="torch", **given).tensor
            )
