"""LSH attention: against loops over tokens in float64, and by its laws: rounds, steps, rows, gradients, cost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_as_accurate
from lsh_reference import attend
from softmax_table import Largest, assert_close, host, operands, table  # noqa: F401
from test_ops_compile import fresh_compiler  # noqa: F401
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from linattn.ops.hashing import draw_rotations
from linattn.ops.reformer import LSHState, reformer_attention


def tokens(batch: int = 2, time: int = 40, heads: int = 2, width: int = 4, values: int = 3, *, seed: int = 0) -> Any:
    """qk and v."""
    return operands(batch, time, heads, heads, width, values, seed=seed)[::2]


def draw_for(heads: int = 2, width: int = 4, rounds: int = 2, columns: int = 32, *, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return draw_rotations(heads, width, rounds=rounds, columns=columns, generator=generator).double()


def loops(qk: Tensor, v: Tensor, draw: Tensor, chunk_length: int, causal: bool = True) -> Tensor:
    return torch.from_numpy(attend(qk.numpy(), v.numpy(), draw.numpy(), chunk_length, causal))


@pytest.mark.parametrize("causal", [True, False])
def test_any_length_against_loops(causal):
    draw = draw_for()
    for time in range(1, 71):
        qk, v = tokens(1, time, seed=time)
        got = reformer_attention(qk, v, rounds=2, rotations=draw, chunk_length=6, causal=causal)
        assert_close(got, loops(qk, v, draw, 6, causal))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("rounds", "chunk_length", "columns"),
    [(1, 1, 32), (1, 2, 32), (3, 5, 32), (4, 32, 32), (2, 100, 32), (2, 2, 2), (3, 1, 5), (1, 4, 1)],
)
def test_forms_against_loops(rounds, chunk_length, columns, causal):
    """Chunks of one token, one chunk of all, and more buckets than one factor has, or than two have."""
    qk, v, draw = *tokens(2, 50), draw_for(rounds=rounds, columns=columns)
    options: dict[str, Any] = {"rounds": rounds, "chunk_length": chunk_length, "causal": causal}
    got = reformer_attention(qk, v, rotations=draw, **options)
    assert_close(got, loops(qk, v, draw, chunk_length, causal))


def full(qk: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention over shared queries and keys, but for the token itself; who sees nobody sees itself."""
    keys = qk / (qk.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    scores = torch.einsum("bthd,bshd->bhts", qk, keys) / qk.shape[-1] ** 0.5
    itself = torch.eye(qk.shape[1], dtype=torch.bool)
    hidden = torch.ones_like(itself).triu() if causal else itself
    hidden = hidden & ~(itself & hidden.all(1, keepdim=True))
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    return torch.einsum("bhts,bshm->bthm", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("causal", [True, False])
def test_one_bucket_is_full_attention(causal):
    """By a sequence that fits one chunk, or by rotations of zero where two chunks show all earlier tokens."""
    qk, v = tokens(2, 32)
    forms: list[dict[str, Any]] = [{"chunk_length": 32}, {"chunk_length": 99}]
    if causal:
        forms.append({"chunk_length": 16, "rotations": torch.zeros(4, 2, 2, 4, 8)})
    for options in forms:
        assert_close(reformer_attention(qk, v, causal=causal, **options), full(qk, v, causal))


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_alone_keeps_its_value(causal):
    qk, v = tokens(2, 20)
    out = reformer_attention(qk, v, chunk_length=4)
    assert torch.equal(out[:, 0], v[:, 0]), "causal: the first token has nobody else"
    assert torch.equal(reformer_attention(qk[:, :1], v[:, :1], causal=causal), v[:, :1])
    apart = torch.tensor([[3.0, 0], [-3.0, 0], [0, 3.0], [0, -3.0]], dtype=torch.float64)[None, :, None]
    identity = torch.eye(2, dtype=torch.float64).expand(1, 2, 1, 2, 2)
    own = v[:1, :4, :1]
    got = reformer_attention(apart, own, rounds=1, chunk_length=2, rotations=identity, causal=causal)
    assert torch.equal(got, own), "four directions, four buckets"


def test_rounds_find_more():
    """The same draw twice is the draw once; the rounds together lie within what each says alone."""
    qk, v = tokens(2, 60)
    one, other = draw_for(rounds=1, seed=1), draw_for(rounds=1, seed=2)

    def call(*draws: Tensor) -> Tensor:
        return reformer_attention(qk, v, rounds=len(draws), rotations=torch.cat(draws), chunk_length=8)

    a, b = call(one), call(other)
    assert_close(call(one, one), a)
    assert (a - b).abs().max() > 0.1
    both = call(one, other)
    first, second = (both - a).norm(dim=-1), (both - b).norm(dim=-1)
    assert_close(first + second, (a - b).norm(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype):
    """Sums run in fp32: bf16 errs by its last rounding only."""
    qk, v = (x.to(dtype) for x in tokens(2, 100))
    draw = draw_for()
    got = reformer_attention(qk, v, rounds=2, rotations=draw.float(), chunk_length=8)
    exact = loops(qk.double(), v.double(), draw, 8)
    assert_as_accurate(got, exact, exact.to(dtype), factor=4)


def test_extreme_scores():
    """Scores of ±10⁴: the maximum is subtracted for each token, so that nothing overflows and nobody is lost."""
    qk, v = tokens(1, 40)
    qk, draw = qk * 1e4, draw_for()
    got = reformer_attention(qk.float(), v.float(), rounds=2, rotations=draw.float(), chunk_length=8)
    scaled = loops(qk * 1e-2, v, draw, 8)
    assert got.isfinite().all() and (got.abs() <= v.abs().amax(1, keepdim=True).float() + 1e-5).all()
    sharp = reformer_attention(qk, v, rounds=2, rotations=draw, chunk_length=8)
    assert (sharp - scaled).abs().max() < 2.0 and (got - sharp).abs().max() < 1e-2


def test_draws():
    qk, v = tokens(2, 100)
    made = [reformer_attention(qk, v, chunk_length=8, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(made[0], made[1]) and (made[0] - made[2]).abs().max() > 0.1
    assert (reformer_attention(qk, v, chunk_length=8) - reformer_attention(qk, v, chunk_length=8)).abs().max() > 0.1


# Steps


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("causal", [True, False])
def test_steps_are_last_rows(causal):
    """Each step equals the last row of the loops on the tokens so far, whatever the prompt."""
    qk, v = tokens(2, 45)
    options: dict[str, Any] = {"rounds": 2, "chunk_length": 4, "causal": causal}
    draw = draw_for(columns=6)
    _, state = reformer_attention(qk[:, :3], v[:, :3], rotations=draw, return_state=True, **options)
    for t in range(3, 45):
        step, state = reformer_attention(qk[:, t : t + 1], v[:, t : t + 1], state=state, return_state=True, **options)
        assert_close(step, loops(qk[:, : t + 1], v[:, : t + 1], draw, 4, causal)[:, t:])
    assert torch.equal(state.qk[:, :45], qk) and state.lengths.tolist() == [45, 45]


@pytest.mark.usefixtures("host")
def test_more_tokens_after_a_prompt_are_the_last_rows():
    qk, v, draw = *tokens(2, 60), draw_for()
    options: dict[str, Any] = {"rounds": 2, "chunk_length": 8}
    start = LSHState.empty(2, 3, draw, dtype=torch.float64, capacity=4)
    first, state = reformer_attention(qk[:, :40], v[:, :40], state=start, return_state=True, **options)
    assert_close(first, loops(qk[:, :40], v[:, :40], draw, 8))
    out, same = reformer_attention(qk[:, 40:40], v[:, 40:40], state=state, return_state=True, **options)
    assert out.shape == (2, 0, 2, 3)
    for before in (state, same, state.clone(), LSHState.cat([state.select(0), state.select([1])])):
        out = reformer_attention(qk[:, 40:], v[:, 40:], state=before, **options)
        assert_close(out, loops(qk, v, draw, 8)[:, 40:])


@pytest.mark.usefixtures("host")
def test_rows_of_different_lengths_are_each_alone():
    """NaN in the padding of a prompt and of steps; each row has its own number of buckets."""
    counts = [[33, 9, 0, 2], [1, 0, 1, 1], [1, 1, 1, 1], [3, 5, 2, 0]]
    qk, v, draw = *tokens(4, 80), draw_for(columns=6)
    options: dict[str, Any] = {"rounds": 2, "chunk_length": 4}
    state, sofar = LSHState.empty(4, 3, draw, dtype=torch.float64), [[qk[n, :0], v[n, :0]] for n in range(4)]
    for now in counts:
        at, time = sum(max(c) for c in counts[: counts.index(now)]), max(now)
        piece = [x[:, at : at + time].clone() for x in (qk, v)]
        for row, count in enumerate(now):
            sofar[row] = [torch.cat([a, x[row, :count]]) for a, x in zip(sofar[row], piece, strict=True)]
            for x in piece:
                x[row, count:] = torch.nan
        given = torch.tensor(now)
        out, state = reformer_attention(*piece, state=state, lengths=given, return_state=True, **options)
        for row, count in enumerate(now):
            assert not out[row, count:].any()
            if count:
                want = loops(sofar[row][0][None], sofar[row][1][None], draw, 4)
                assert_close(out[row, :count], want[0, -count:])
    assert state.lengths.tolist() == [38, 15, 4, 4]


@pytest.mark.usefixtures("host")
def test_forks_stay_apart():
    qk, v, draw = *tokens(2, 30), draw_for()
    options: dict[str, Any] = {"rounds": 2, "chunk_length": 8}
    ways = [tokens(2, 5, seed=seed) for seed in (1, 2)]
    for lengths in (None, [30, 11]):
        _, start = reformer_attention(qk, v, rotations=draw, lengths=lengths, return_state=True, **options)
        nan = [torch.full_like(x, torch.nan) for x in ways[0]]
        reformer_attention(*nan, state=start, return_state=True, **options)
        states = [start, start, start.clone()]
        for t in range(5):
            for n, way in enumerate((ways[0], ways[1], ways[0])):
                token = [x[:, t : t + 1] for x in way]
                out, states[n] = reformer_attention(*token, state=states[n], return_state=True, **options)
                for row in range(2):
                    length = 30 if lengths is None else lengths[row]
                    whole = [
                        torch.cat([a[row, :length], b[row, : t + 1]])[None] for a, b in zip((qk, v), way, strict=True)
                    ]
                    assert_close(out[row : row + 1], loops(whole[0], whole[1], draw, 8)[:, -1:])


def test_saved_and_given_away(tmp_path):
    qk, v = tokens(2, 30)
    _, state = reformer_attention(qk, v, chunk_length=8, return_state=True)
    state.save(tmp_path / "state")
    loaded = LSHState.load(tmp_path / "state")
    assert loaded.capacity == 30 and torch.equal(loaded.rotations, state.rotations)
    token = tokens(2, 1, seed=1)
    want = reformer_attention(*token, state=state, chunk_length=8)
    assert torch.equal(reformer_attention(*token, state=loaded, chunk_length=8), want)
    out, _ = reformer_attention(*token, state=state, chunk_length=8, return_state=True, donate=True)
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match=r"(?s)donat.*clone"):
        reformer_attention(*token, state=state, chunk_length=8)


# Gradients, and what it costs


def test_gradcheck():
    """Through chunks and rounds, padding, a token that is alone, and the state into a step and into several tokens."""
    draw = draw_for(1, 2)
    qk, v = (x.requires_grad_() for x in tokens(2, 5, 1, 2, 1))

    def call(cut: int, lengths: Tensor | None, qk: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"rounds": 2, "chunk_length": 2}
        left, state = reformer_attention(
            qk[:, :cut], v[:, :cut], rotations=draw, lengths=lengths, return_state=True, **options
        )
        right = reformer_attention(qk[:, cut:], v[:, cut:], state=state, **options)
        return left, right

    for cut, lengths in ((5, torch.tensor([5, 3])), (4, None), (3, torch.tensor([3, 2]))):
        assert torch.autograd.gradcheck(partial(call, cut, lengths), (qk, v))


def test_gradients_are_those_of_full_attention():
    """One bucket: by autograd through the table, padding of NaN left out."""
    qk, v = tokens(2, 32)
    wanted = [x[:, :20].clone().requires_grad_() for x in (qk, v)]
    given = [x.clone() for x in (qk, v)]
    for x in given:
        x[:, 20:] = torch.nan
        x.requires_grad_()
    full(wanted[0], wanted[1], True).square().sum().backward()
    reformer_attention(*given, lengths=[20, 20]).square().sum().backward()
    for got, want in zip(given, wanted, strict=True):
        assert got.grad is not None and want.grad is not None
        assert_close(got.grad[:, :20], want.grad)
        assert not got.grad[:, 20:].any(), "zeros, not NaN"


def kept_for_backward(time: int, rounds: int) -> int:
    """Numbers that autograd holds between the forward and the backward pass."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.numel()
        return x

    qk, v = (x.requires_grad_() for x in tokens(1, time, 1, 8, 8))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = reformer_attention(qk, v, rounds=rounds, chunk_length=32)
    del held
    return sum(sizes.values())


def test_the_backward_pass_keeps_no_weights():
    """What a round keeps is of the size of q and v, not of the 2L weights of each token."""
    more = kept_for_backward(2048, 3) - kept_for_backward(2048, 1)
    assert 0 < more / 2 < 2048 * 64 / 2


def test_n_log_n():
    """Four times the tokens: four times the products, four times the largest tensor, 3% more at most; never all pairs.

    With as many columns as the hash may have: up to there it grows as the root of the number of buckets.
    """
    flops, largest, draw = [], [], draw_for(1, 8, columns=4)
    for time in (2048, 8192):
        qk, v = (x.requires_grad_() for x in tokens(1, time, 1, 8, 8))
        with Largest() as most, FlopCounterMode(display=False) as counter:
            reformer_attention(qk, v, rounds=2, rotations=draw, chunk_length=16).sum().backward()
        flops.append(counter.get_total_flops())
        largest.append(most.numbers)
    assert flops[0] > 2 * 2048 * 32 * 16 * 2 and flops[1] / flops[0] < 4.12
    assert largest[0] >= 2048 * 32 and largest[1] / largest[0] <= 4.12
    assert largest[1] < 8192 * 8192 // 64


def test_a_step_is_linear():
    flops, draw = [], draw_for(1, 8, columns=4)
    for time in (2048, 8192):
        qk, v = tokens(1, time, 1, 8, 8)
        _, state = reformer_attention(qk, v, rounds=2, rotations=draw, chunk_length=32, return_state=True)
        with Largest() as most, FlopCounterMode(display=False) as counter:
            reformer_attention(qk[:, :1], v[:, :1], rounds=2, chunk_length=32, state=state)
        flops.append(counter.get_total_flops())
        assert most.numbers <= 64 * (time + 1)
    assert flops[1] / flops[0] < 4.12


# torch


def test_autocast_changes_nothing():
    qk, v = (x.float() for x in tokens(2, 50))
    draw = draw_for().float()
    want = reformer_attention(qk, v, rounds=2, rotations=draw, chunk_length=8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reformer_attention(qk, v, rounds=2, rotations=draw, chunk_length=8), want)


def test_func_grad_and_vmap():
    qk, v, draw = *tokens(3, 20), draw_for()

    def loss(qk: Tensor, v: Tensor) -> Tensor:
        return reformer_attention(qk[None], v[None], rounds=2, rotations=draw, chunk_length=4).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(qk, v)
    leaves = [x.clone().requires_grad_() for x in (qk, v)]
    reformer_attention(*leaves, rounds=2, rotations=draw, chunk_length=4).square().sum().backward()
    for got, leaf in zip(each, leaves, strict=True):
        assert leaf.grad is not None
        assert_close(got, leaf.grad)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_is_eager():
    qk, v, draw = *tokens(2, 30), draw_for()
    call = partial(reformer_attention, rounds=2, rotations=draw, chunk_length=4)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for options in ({}, {"causal": False, "lengths": torch.tensor([30, 9])}):
        assert_close(compiled(qk, v, **options), call(qk, v, **options))
