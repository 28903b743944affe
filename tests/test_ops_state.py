"""States as values, and the step that consumes them: aliasing, donation, saving, and memory that never grows."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from cases import IMPLS, POSITIVE, Case, assert_near, assert_same, expected, make_inputs
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from linattn import State, linear_attention
from linattn.ops import Step
from linattn.state import add_exactly


def filled_state(case: Case, x: dict[str, Tensor]) -> State:
    state = State.empty(case.batch, case.kv_heads, *x["kv"].shape[2:], normalize=case.normalize, dtype=case.sums)
    state.kv.copy_(x["kv"])
    if case.normalize:
        state.tensors()["z"].copy_(x["z"])
    return state


def sums(state: State) -> dict[str, Tensor]:
    """The exact sums in float64, wherever their digits lie."""
    parts = {name: tensor.double() for name, tensor in state.tensors().items()}
    return {name: parts[name] + parts.get(f"{name}_low", 0) for name in ("kv", "z") if name in parts}


@pytest.mark.parametrize("time", [0, 1, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_is_never_written_and_never_shared(impl, dtype, causal, time):
    case = Case(time=time, dtype=dtype, impl=impl, causal=causal)
    x = make_inputs(case)
    state = filled_state(case, x)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    out, final = linear_attention(x["q"], x["k"], x["v"], state=state, return_state=True, causal=causal, impl=impl)
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before[name]), f"{name} of the state that came in was written"
    memory = {t.untyped_storage().data_ptr() for t in (*state.tensors().values(), x["q"], x["k"], x["v"])} - {0}
    for name, tensor in (final.tensors() | {"out": out}).items():
        assert tensor.untyped_storage().data_ptr() not in memory, f"{name} shares memory with what came in"
    places = [tensor.untyped_storage().data_ptr() for tensor in final.tensors().values()]
    assert len(set(places)) == len(places), "the parts of the state share memory with each other"


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_sequence_returns_a_copy_of_its_state(impl):
    case = Case(3, 6, impl=impl, dtype=torch.float32)
    x = make_inputs(case)
    state = filled_state(case, x)
    _, final = linear_attention(x["q"], x["k"], x["v"], state=state, return_state=True, lengths=[0, 6, 0], impl=impl)
    for name, tensor in state.tensors().items():
        assert torch.equal(final.tensors()[name][::2], tensor[::2])
    assert not torch.equal(final.kv[1], state.kv[1])
    final.kv.zero_()
    assert torch.equal(state.kv, x["kv"])


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize("time", [1, 20])
def test_a_donated_state_gives_the_same_and_is_gone(impl, time):
    case = Case(time=time, dtype=torch.float32, impl=impl)
    x = make_inputs(case)
    tokens = [x[name] for name in ("q", "k", "v")]
    kept, given = filled_state(case, x), filled_state(case, x)
    want, want_state = linear_attention(*tokens, state=kept, return_state=True, impl=impl)
    got, got_state = linear_attention(*tokens, state=given, return_state=True, impl=impl, donate=True)
    assert_same("out", got, want)
    for name, total in sums(got_state).items():
        assert_same(name, total.float(), sums(want_state)[name].float())
    for use in (
        lambda: given.kv,
        lambda: given.kv_low,
        lambda: given.nbytes,
        given.clone,
        lambda: linear_attention(*tokens, state=given),
    ):
        with pytest.raises(ValueError, match=r"(?s)donat.*clone"):
            use()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("feature_map", [*POSITIVE, "relu", "taylor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("time_axis", [True, False], ids=["(B, 1, H, D)", "(B, H, D)"])
def test_steps_are_the_whole(time_axis, dtype, feature_map, normalize):
    case = Case(time=210, dtype=dtype, feature_map=feature_map, normalize=normalize, stateful=False, scale=0.5)
    x = make_inputs(case)
    options = {"feature_map": feature_map, "normalize": normalize, "scale": 0.5}
    prompt = [x[name][:, :10] for name in ("q", "k", "v")]
    _, state = linear_attention(*prompt, return_state=True, **options)
    step, outs = Step(state, feature_map, scale=0.5), []
    for t in range(10, case.time):
        token = [x[name][:, t : t + 1] if time_axis else x[name][:, t] for name in ("q", "k", "v")]
        out = step(*token)
        assert out.shape == (*token[0].shape[:-1], case.values) and out.dtype == dtype
        outs.append(out.clone() if time_axis else out[:, None].clone())
    want, final = linear_attention(*(x[name] for name in ("q", "k", "v")), return_state=True, **options)
    assert_same("out", torch.cat(outs, 1), want[:, 10:], worsened=10)
    got = sums(step.state())
    for name, total in sums(final).items():
        assert_same(name, got[name].to(case.sums), total.to(case.sums), worsened=10)


def test_steps_with_eps():
    case = Case(time=40, feature_map="identity", heads=2, kv_heads=2, width=2)
    x = make_inputs(case)
    step, want = Step(filled_state(case, x), "identity", eps=0.5), expected(case, x)["out"]
    got = torch.stack([step(x["q"][:, t], x["k"][:, t], x["v"][:, t]).clone() for t in range(40)], 1)
    assert_near("out", got, want, want, factor=1)


def test_a_step_consumes_its_state_and_ends_when_it_gives_it_back():
    case = Case(time=1, dtype=torch.float32)
    x = make_inputs(case)
    token = [x[name][:, 0] for name in ("q", "k", "v")]
    given = filled_state(case, x)
    step = Step(given)
    with pytest.raises(ValueError, match=r"(?s)donat.*clone"):
        linear_attention(x["q"], x["k"], x["v"], state=given)
    out = step(*token)
    assert_near("out", out[:, None], expected(case, x)["out"], expected(case, x, np.float32)["out"], factor=4)
    state = step.state()
    assert isinstance(state, State)
    for use in (lambda: step(*token), step.state):
        with pytest.raises(ValueError, match="state"):
            use()


def allocated_by(steps: int, step) -> int:
    """Bytes that the allocator handed out during some steps, by torch's own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        for _ in range(steps):
            step()
    return sum(max(event.self_cpu_memory_usage, 0) for event in record.key_averages())


@pytest.mark.usefixtures("unchecked")  # thousands of calls
@pytest.mark.parametrize(("how", "last"), [("Step", 10_000), ("linear_attention", 2_000)])
def test_a_step_allocates_nothing_that_grows(how, last):
    """Token 10 and the last one cost the same memory; 128 of each, for steps that fold recent tokens in blocks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 2, 8, generator=generator) for _ in range(3))
    box = {"state": State.empty(1, 2, 8, 8), "step": Step(State.empty(1, 2, 8, 8))}

    def advance() -> None:
        if how == "Step":
            box["step"](q, k, v)
        else:
            _, box["state"] = linear_attention(q, k, v, state=box["state"], return_state=True)

    def size() -> int:
        if how == "Step":
            state = box["step"].state()
            box["step"], size = Step(state.clone()), state.nbytes
            return size
        return box["state"].nbytes

    for _ in range(10):
        advance()
    early, early_size = allocated_by(128, advance), size()
    for _ in range(last - 128):
        advance()
    late, late_size = allocated_by(128, advance), size()
    assert early > 0, "nothing was counted"
    assert late == early and late_size == early_size


def test_rows_of_a_state_can_be_chosen_joined_and_copied():
    case = Case(3, 5, dtype=torch.float32)
    x = make_inputs(case)
    _, state = linear_attention(x["q"], x["k"], x["v"], state=filled_state(case, x), return_state=True)
    for index in ([2, 0], torch.tensor([2, 0]), 1, slice(1, 3), torch.tensor([True, False, True])):
        chosen = state.select(index)
        for name, tensor in state.tensors().items():
            want = tensor[[index]] if isinstance(index, int) else tensor[index]
            assert torch.equal(chosen.tensors()[name], want)
    joined = State.cat([state.select([0]), state.select([1, 2])])
    for copied in (joined, state.clone(), state.detach(), state.to("cpu"), copy.deepcopy(state)):
        for name, tensor in state.tensors().items():
            assert torch.equal(copied.tensors()[name], tensor)
            assert copied.tensors()[name].data_ptr() != tensor.data_ptr()
    assert state.nbytes == sum(t.numel() * t.element_size() for t in state.tensors().values())
    assert state.nbytes == 2 * 4 * (3 * 2 * 5 * 3 + 3 * 2 * 5), "two floats for each number of kv and z"


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_state_goes_on_bit_for_bit(tmp_path, dtype, normalize):
    case = Case(2, 30, dtype=dtype, normalize=normalize)
    x = make_inputs(case)
    first, second = ([x[name][:, part] for name in ("q", "k", "v")] for part in (slice(0, 13), slice(13, 30)))
    _, state = linear_attention(*first, state=filled_state(case, x), return_state=True, normalize=normalize)
    state.save(tmp_path / "state.safetensors")
    loaded = State.load(tmp_path / "state.safetensors")
    pickled = pickle.load(io.BytesIO(pickle.dumps(state)))  # noqa: S301 (what multiprocessing does)
    want = linear_attention(*second, state=state, normalize=normalize)
    for same in (loaded, pickled, copy.deepcopy(state)):
        assert same.tensors().keys() == state.tensors().keys()
        assert torch.equal(linear_attention(*second, state=same, normalize=normalize), want)


def test_exact_addition_keeps_what_a_plain_sum_loses():
    """10⁸ tokens by simulation: 10⁵ blocks whose sum is 1000.1 each. A plain fp32 sum is off by more than 10⁻³."""
    block = torch.tensor([1000.1, -333.3, 0.125])
    high, low, plain = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    for _ in range(100_000):
        high, low = add_exactly(high, low, block)
        assert low is not None
        plain = plain + block
    exact = 100_000 * block.double()
    assert ((plain.double() - exact).abs() / exact.abs()).max() > 1e-5
    assert ((high.double() + low.double() - exact).abs() / exact.abs()).max() < 1e-9
    wide, none = add_exactly(exact, None, block.double())
    assert none is None and torch.equal(wide, exact + block.double())
