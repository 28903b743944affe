"""The decode kernels, interpreted on the CPU, against the recurrence in float64: outputs, sums, rows at rest."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_as_accurate
from torch.nn import functional as F

from linattn import State, linear_attention
from linattn.ops import Step, gpu

if not gpu.status()[0]:
    pytest.skip(f"decode kernels: {gpu.status()[1]}", allow_module_level=True)

import interpreted

from linattn.ops.triton import memory as memory_module
from linattn.ops.triton.memory import Memory

interpreted.quicken()

DEVICE = "cpu" if gpu.interpreted() else "cuda"
MAPS = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp_max(0).exp()),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "softplus": F.softplus,
    "exp": lambda x: x.clamp_max(20).exp(),
    "identity": lambda x: x,
}


@pytest.fixture(autouse=True)
def _folds_of_four(request, monkeypatch):
    """Folds often, since the interpreter is slow; a test marked otherwise folds as users do."""
    if "as_users_do" not in request.fixturenames:
        monkeypatch.setattr(memory_module, "FOLD", 4)


@pytest.fixture
def as_users_do():
    return memory_module.FOLD


def tokens(steps, batch, heads, key_heads, D, M, dtype, mean=0.0):
    generator = torch.Generator().manual_seed(D + M + heads)
    made = (torch.randn(steps, batch, n, generator=generator) for n in (heads * D, key_heads * D, key_heads * M))
    q, k, v = made
    return [x.to(dtype).to(DEVICE) for x in (q, k, v + mean)]


def recurrence(q, k, v, heads, key_heads, feature_map, dtype, scale=1.0, eps=None, normalize=True, start=None):
    """Equation (3), one token after the other. -> out (T, B, H·M), kv, z"""
    phi = MAPS[feature_map]
    T, B, group = q.shape[0], q.shape[1], heads // key_heads
    q = phi(q.to(dtype).unflatten(-1, (heads, -1)) * math.sqrt(scale))
    k = phi(k.to(dtype).unflatten(-1, (key_heads, -1)) * math.sqrt(scale))
    v = v.to(dtype).unflatten(-1, (key_heads, -1))
    kv = torch.zeros(B, key_heads, k.shape[-1], v.shape[-1], dtype=dtype, device=v.device)
    z = torch.zeros(B, key_heads, k.shape[-1], dtype=dtype, device=v.device)
    if start is not None:
        kv, z = start[0].to(dtype).clone(), start[1].to(dtype).clone()
    outs = []
    for t in range(T):
        kv = kv + k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
        z = z + k[t]
        num = torch.einsum("bhd,bhdm->bhm", q[t], kv.repeat_interleave(group, 1))
        if normalize:
            den = torch.einsum("bhd,bhd->bh", q[t], z.repeat_interleave(group, 1)).unsqueeze(-1)
            if eps is not None:
                den = torch.where(den < 0, -1.0, 1.0) * den.abs().clamp_min(eps)
            num = num / den.masked_fill(den == 0, math.inf)
        outs.append(num.flatten(1))
    return torch.stack(outs), kv, z


def run(memory, q, k, v, live=None):
    """All tokens through every layer; what the last layer says."""
    outs = []
    for t in range(len(q)):
        memory.begin(None if live is None else live[t])
        out = [memory.step(layer, q[t], k[t], v[t]) for layer in range(memory.layers)]
        memory.end()
        assert all(torch.equal(out[-1], x) for x in out[:-1])
        outs.append(out[-1])
    return torch.stack(outs)


CASES = {
    "paper": (2, 2, 32, 32, torch.float32, "elu", {}),
    "bfloat16": (2, 2, 32, 32, torch.bfloat16, "elu", {}),
    "one head for all": (4, 1, 16, 16, torch.float32, "elu", {}),
    "pairs, narrower values": (4, 2, 24, 16, torch.float32, "softplus", {}),
    "wider values": (1, 1, 16, 136, torch.float32, "exp", {}),
    "wide": (1, 1, 128, 128, torch.bfloat16, "elu", {}),
    "middling": (1, 1, 64, 48, torch.float32, "squared_relu", {}),
    "relu, scaled": (1, 1, 16, 32, torch.float32, "relu", {"scale": 0.25}),
    "signed, eps": (1, 1, 16, 16, torch.float32, "identity", {"eps": 4.0}),
    "not normalised": (1, 1, 16, 16, torch.float32, "identity", {"normalize": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_recurrence(case):
    heads, key_heads, D, M, dtype, feature_map, options = CASES[case]
    q, k, v = tokens(10, 1, heads, key_heads, D, M, dtype)
    exact, kv, z = recurrence(q, k, v, heads, key_heads, feature_map, torch.float64, **options)
    plain, plain_kv, plain_z = recurrence(q, k, v, heads, key_heads, feature_map, torch.float32, **options)
    normalize = options.pop("normalize", True)
    states = [State.empty(1, key_heads, D, M, normalize=normalize, device=DEVICE)]
    memory = Memory(states, heads, dtype, feature_map=feature_map, **options)
    assert_as_accurate(run(memory, q, k, v), exact, plain.to(dtype))
    (end,) = memory.states()
    assert_as_accurate(end.kv, kv, plain_kv)
    if end.z is not None:
        assert_as_accurate(end.z, z, plain_z)


@pytest.mark.usefixtures("as_users_do")
@pytest.mark.parametrize("narrow", [False, True])
def test_many_tokens_later(narrow):
    """3,072 tokens with values of mean 0.5, as pixels have: exact as it is, within 1% with the narrow copy."""
    q, k, v = tokens(3088, 1, 1, 1, 32, 32, torch.bfloat16, mean=0.5)
    split = 3056  # read in parallel; then 32 steps, in which two folds happen
    wide = [x.view(1, -1, 1, 32) for x in (q, k, v)]
    _, state = linear_attention(*(x[:, :split] for x in wide), return_state=True)
    exact, kv, _ = recurrence(q, k, v, 1, 1, "elu", torch.float64)
    plain = recurrence(q, k, v, 1, 1, "elu", torch.float32)[0].bfloat16()
    memory = Memory([state], 1, torch.bfloat16, narrow=narrow)
    got = run(memory, *(x[split:] for x in (q, k, v)))
    if narrow:
        error = (got.double() - exact[split:]).abs().max() / exact[split:].abs().max()
        assert 1e-4 < error < 0.01
    else:
        assert_as_accurate(got, exact[split:], plain[split:])
    (end,) = memory.states()
    assert (end.kv + end.kv_low.double() - kv).abs().max() < 1e-6 * kv.abs().max()  # in both: only the copy is narrow


def test_small_terms_are_not_lost():
    """Sums of 2²⁵, and terms of 0.75 that float32 would round away."""
    D = M = 16
    state = State.empty(1, 1, D, M, device=DEVICE)
    state.kv.fill_(2.0**25)
    state.z.fill_(2.0**25)
    memory = Memory([state], 1, torch.float32, feature_map="relu")
    one = torch.ones(11, 1, D, device=DEVICE)
    run(memory, one, 0.75 * one, one)
    (end,) = memory.states()
    for high, low in ((end.kv, end.kv_low), (end.z, end.z_low)):
        assert ((high.double() + low.double()) == 2.0**25 + 11 * 0.75).all()


def test_each_layer_its_own():
    """Sums of several layers and rows lie side by side: none takes another's."""
    q, k, v = tokens(6, 2, 2, 2, 16, 16, torch.float32)
    layers = 3
    memory = Memory([State.empty(2, 2, 16, 16, device=DEVICE) for _ in range(layers)], 2, torch.float32)
    for t in range(6):
        memory.begin()
        for layer in range(layers):
            memory.step(layer, q[t], k[t] + layer, v[t] * (layer + 1))
        memory.end()
    for layer, end in enumerate(memory.states()):
        _, kv, z = recurrence(q, k + layer, v * (layer + 1), 2, 2, "elu", torch.float64)
        _, plain_kv, plain_z = recurrence(q, k + layer, v * (layer + 1), 2, 2, "elu", torch.float32)
        assert_as_accurate(end.kv, kv, plain_kv)
        assert_as_accurate(end.z, z, plain_z)


def test_rows_that_have_ended_stand_still():
    """Rows end at different times, one of them as its recent tokens were folded, and NaN comes after the end."""
    steps = torch.tensor([9, 4, 6, 0])
    q, k, v = tokens(9, 4, 1, 1, 16, 16, torch.float32)
    live = [(t < steps).long().to(DEVICE) for t in range(9)]
    for t in range(9):
        for x in (q, k, v):
            x[t, live[t] == 0] = math.nan
    memory = Memory([State.empty(4, 1, 16, 16, device=DEVICE)], 1, torch.float32)
    got = run(memory, q, k, v, live)
    (end,) = memory.states()
    for row, count in enumerate(steps):
        mine = [x[:count, row : row + 1] for x in (q, k, v)]
        if not count:
            assert not end.kv[row].any() and not end.z[row].any()
            continue
        exact, kv, z = recurrence(*mine, 1, 1, "elu", torch.float64)
        plain, plain_kv, plain_z = recurrence(*mine, 1, 1, "elu", torch.float32)
        assert_as_accurate(got[:count, row : row + 1], exact, plain)
        assert_as_accurate(end.kv[row : row + 1], kv, plain_kv)
        assert_as_accurate(end.z[row : row + 1], z, plain_z)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_out_and_in_again(steps):
    """Steps, the state as a value, steps again: what one `Step` on the CPU says, to float32's rounding."""
    q, k, v = tokens(9, 1, 1, 1, 16, 24, torch.float32)
    wide = [x.view(9, 1, 1, -1).cpu() for x in (q, k, v)]
    step = Step(State.empty(1, 1, 16, 24))
    want = torch.stack([step(*(x[t] for x in wide)) for t in range(9)])
    memory = Memory([State.empty(1, 1, 16, 24, device=DEVICE)], 1, torch.float32)
    first = run(memory, *(x[:steps] for x in (q, k, v)))
    (state,) = memory.states()
    places = {name: x.data_ptr() for name, x in state.tensors().items()}
    again = Memory([state.clone()], 1, torch.float32)
    for way in (memory, again):  # on in the same memory, and in another one
        rest = run(way, *(x[steps:] for x in (q, k, v)))
        made = torch.cat([first, rest]).cpu().view_as(want)
        torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-6)
    assert {name: x.data_ptr() for name, x in memory.states()[0].tensors().items()} == places


def test_strided_rows():
    """Queries, keys and values may be parts of one wider row, as a single product makes them."""
    whole = torch.randn(5, 2, 3 * 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    q, k, v = whole.split(32, -1)
    made = []
    for parts in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
        memory = Memory([State.empty(2, 2, 16, 16, device=DEVICE)], 2, torch.float32)
        made.append(run(memory, *parts))
    assert torch.equal(*made) and made[0].isfinite().all()


def test_what_a_memory_refuses():
    with pytest.raises(ValueError, match="at least one layer"):
        Memory([], 1, torch.float32)
    with pytest.raises(ValueError, match=r"one shape, got \(1, 1, 16, 16\), \(1, 1, 16, 8\)"):
        Memory([State.empty(1, 1, 16, 16), State.empty(1, 1, 16, 8)], 1, torch.float32)
    with pytest.raises(ValueError, match=r"torch\.float64"):
        Memory([State.empty(1, 1, 16, 16, dtype=torch.float64)], 1, torch.float32)
    with pytest.raises(ValueError, match="multiples of 8 features and values, got 12 and 16"):
        Memory([State.empty(1, 1, 12, 16)], 1, torch.float32)
    state = State.empty(1, 1, 16, 16, device=DEVICE)
    Memory([state], 1, torch.float32)
    with pytest.raises(ValueError, match="donated"):
        state.kv  # noqa: B018
