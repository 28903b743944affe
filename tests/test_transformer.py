"""Blocks and stacks: against numpy and torch.nn's own layers, and as recurrent networks whose state is a value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from helpers import assert_as_accurate
from nn_cases import (
    KINDS,
    WIDTH,
    array,
    assert_close,
    assert_same_bits,
    block_by_numpy,
    gradients,
    in_pieces,
    layer_of,
    made,
    tokens,
)
from safetensors.torch import load_file
from test_ops_compile import fresh_compiler  # noqa: F401  (a fixture)
from torch import nn

from linattn.nn import Block, BlockState, Stack, StackState

FORMS = [
    {"norm_first": first, "norm": norm, "activation": activation}
    for first, norm, activation in [
        (False, "layer", "relu"),
        (True, "layer", "gelu"),
        (False, "rms", "swiglu"),
        (True, "rms", "swiglu"),
    ]
]


def stack_of(depth: int = 2, **options) -> Stack:
    return made(Stack, layer_of(**options), depth)


def by_name(name: str) -> Stack:
    return stack_of(**KINDS[name])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cross", [False, True])
def test_block_against_numpy(form, cross):
    """The paper's block is the first form without cross-attention: post-norm, LayerNorm, ReLU, elu + 1, biases."""
    block = made(Block, layer_of(**form, cross=cross, memory_width=5, ff_width=20))
    x, memory = tokens(time=7), tokens(time=4, width=5, seed=2)
    want = torch.from_numpy(block_by_numpy(block, array(x), array(memory)))
    assert_close(block(x, memory=memory if cross else None)[0], want)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_encoder_against_torch(norm_first, causal):
    """torch.nn.TransformerEncoder with the same weights, with and without a causal mask."""
    stack = stack_of(attention="softmax", causal=causal, norm_first=norm_first, ff_width=20)
    sizes = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 20, "batch_first": True, "dropout": 0.0}
    theirs: Any = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**sizes, norm_first=norm_first),
        2,
        norm=nn.LayerNorm(WIDTH),
        enable_nested_tensor=False,
    ).double()
    for layer, block in zip(theirs.layers, stack.blocks, strict=True):
        copy_block(layer, block, ["norm1", "norm2"])
    theirs.norm.load_state_dict(stack.norm.state_dict())
    x, mask = tokens(), nn.Transformer.generate_square_subsequent_mask(23, dtype=torch.float64) if causal else None
    assert_close(stack(x)[0], theirs(x, mask=mask))


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_against_torch(norm_first):
    """torch.nn.TransformerDecoderLayer with the same weights: cross-attention stands between the other two."""
    block = made(Block, layer_of(attention="softmax", cross=True, norm_first=norm_first, ff_width=20))
    theirs = nn.TransformerDecoderLayer(WIDTH, 4, 20, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    copy_block(theirs, block, ["norm1", "norm2", "norm3"])
    x, memory = tokens(), tokens(time=9, seed=2)
    mask = nn.Transformer.generate_square_subsequent_mask(23, dtype=torch.float64)
    assert_close(block(x, memory=memory)[0], theirs(x, memory, tgt_mask=mask))


def copy_block(theirs: Any, block: Any, norms: list[str]) -> None:
    pairs = [(theirs.self_attn, block.attention)] + (
        [] if block.cross is None else [(theirs.multihead_attn, block.cross)]
    )
    with torch.no_grad():
        for their, our in pairs:
            parts = [our.query, our.key, our.value]
            their.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
            their.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            their.out_proj.load_state_dict(our.out.state_dict())
    theirs.linear1.load_state_dict(block.ff.enter.state_dict())
    theirs.linear2.load_state_dict(block.ff.leave.state_dict())
    for name, norm in zip(norms, block.norms, strict=True):
        getattr(theirs, name).load_state_dict(norm.state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["linear", "softmax", "after favor"])
def test_pieces_are_the_whole(form, name):
    stack, x = stack_of(**KINDS[name], **form), tokens()
    whole, none = stack(x)
    pieces, state = in_pieces(stack, x, (13, 14, 15), stack.empty_state(2))
    assert_close(pieces, whole, 1e-10)
    assert none is None and state.seen.tolist() == [23, 23] and state.seen.dtype == torch.int64


def test_a_hybrid_is_its_blocks_one_after_the_other():
    layers = [layer_of(**KINDS[name]) for name in ("linear", "softmax", "after favor")]
    stack, x = made(Stack, layers), tokens()
    y = x
    for block in stack.blocks:
        y, _ = block(y)
    assert_close(stack(x)[0], stack.norm(y))
    assert_close(in_pieces(stack, x, (5, 6, 7), stack.empty_state(2))[0], stack.norm(y), 1e-10)


def test_encoder_decoder():
    """Pieces of the decoder are the whole, padded memories too; the memory is given once, then the state has it."""
    encoder, decoder = stack_of(causal=False), stack_of(cross=True, norm_first=True)
    source, x = tokens(time=9, seed=2), tokens()
    memory, _ = encoder(source, lengths=[9, 4])
    whole, _ = decoder(x, memory=memory, memory_lengths=[9, 4])
    first, state = decoder(x[:, :5], decoder.empty_state(2), memory=memory, memory_lengths=[9, 4])
    rest, _ = in_pieces(decoder, x[:, 5:], (1, 2, 3), state)
    assert_close(torch.cat([first, rest], 1), whole, 1e-11)
    alone, _ = encoder(source[1:, :4])
    assert_close(decoder(x[1:], memory=alone)[0], whole[1:], 1e-11)
    encoder_grads = gradients(rest, *encoder.parameters())
    assert all(grad.abs().max() > 1e-8 for grad in encoder_grads[2:]), "the memory's gradient flows through the state"


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_different_lengths(name):
    stack, x, lengths = by_name(name), tokens(3), [23, 0, 9]
    junk = x.clone()
    junk[1:, 9:] = torch.nan
    junk[1] = torch.nan
    y, state = stack(junk.requires_grad_(), stack.empty_state(3), lengths=lengths)
    assert y.isfinite().all() and state.seen.tolist() == lengths
    for row, length in enumerate(lengths):
        alone, own = stack(x[row : row + 1, :length], stack.empty_state(1))
        if length:
            assert_close(y[row : row + 1, :length], alone, 1e-11)
        assert_close(stack(x[:, :2], state)[0][row : row + 1], stack(x[row : row + 1, :2], own)[0], 1e-11)
    real = torch.cat([y[row, :length] for row, length in enumerate(lengths)])
    assert all(grad.isfinite().all() for grad in gradients(real, junk, *stack.parameters()))


@pytest.mark.parametrize("name", KINDS)
def test_rewinding_is_exact_and_forks_stay_apart(name):
    """A kept state is what it was, bit for bit, whatever other sequences have gone on from it."""
    stack, x, other = by_name(name), tokens(), tokens(seed=5)
    with torch.no_grad():
        _, kept = stack(x[:, :9], stack.empty_state(2))
        fork, snapshot = kept.fork(), kept.clone()
        first, _ = in_pieces(stack, x[:, 9:], (1, 2), kept)
        in_pieces(stack, other, range(1, 23), kept)
        in_pieces(stack, other, range(1, 23), fork)
        again, _ = in_pieces(stack, x[:, 9:], (1, 2), kept)
        assert torch.equal(first, again)
        assert_close(in_pieces(stack, x[:, 9:], (1, 2), fork)[0], first)
        assert_same_bits(kept.clone(), snapshot)


@pytest.mark.parametrize("name", KINDS)
def test_states_of_different_lengths_join(name):
    """Rows picked from states after 5 and after 80 tokens go on together, each as it would alone."""
    stack, x = by_name(name), tokens(3, 83)
    with torch.no_grad():
        _, long = stack(x[:, :80], stack.empty_state(3))
        _, short = stack(x[:, :5], stack.empty_state(3))
        joined = StackState.cat([long.select([2]), short.select(torch.tensor([True, False, True])), long.select(1)])
        assert joined.seen.tolist() == [80, 5, 5, 80] and joined.batch == 4
        rows, starts = [2, 0, 2, 1], [80, 5, 5, 80]
        following = torch.stack([x[row, start : start + 3] for row, start in zip(rows, starts, strict=True)])
        y, _ = in_pieces(stack, following, (1, 2), joined)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            _, own = stack(x[row : row + 1, :start], stack.empty_state(1))
            assert_close(y[i : i + 1], in_pieces(stack, following[i : i + 1], (1, 2), own)[0], 1e-11)
    with pytest.raises(ValueError, match="states of one model"):
        StackState.cat([long, stack_of(depth=3, **KINDS[name]).empty_state(1)])


@pytest.mark.parametrize("name", KINDS)
def test_saving_a_state_changes_nothing(name, tmp_path):
    stack, x = by_name(name), tokens()
    with torch.no_grad():
        _, state = stack(x[:, :9], stack.empty_state(2))
        in_pieces(stack, tokens(seed=5), (1, 2), state)  # tokens of a fork, in the same buffers
        state.save(tmp_path / "state.safetensors")
        in_the_file = load_file(tmp_path / "state.safetensors")
        assert not any(x[:, 9:].any() for key, x in in_the_file.items() if key.endswith("memory.k")), "a fork's tokens"
        loaded = StackState.load(tmp_path / "state.safetensors")
        assert_same_bits(loaded, state.clone())
        going, end = in_pieces(stack, x[:, 9:], (1, 2), state)
        resumed, resumed_end = in_pieces(stack, x[:, 9:], (1, 2), loaded)
        assert torch.equal(going, resumed) and torch.equal(end.seen, resumed_end.seen)
    with pytest.raises(ValueError, match="holds a StackState, expected a BlockState"):
        BlockState.load(tmp_path / "state.safetensors")


def test_truncated_gradients_stop_at_detach():
    """Through the state the gradient of the second half reaches the first; after detach() it does not."""
    stack, x = by_name("linear"), tokens().requires_grad_()
    _, state = stack(x[:, :9], stack.empty_state(2))
    through, cut = (gradients(stack(x[:, 9:], s)[0], x)[0][:, :9] for s in (state, state.detach()))
    assert through.abs().max() > 1e-3 and not cut.any()


@pytest.mark.parametrize("name", KINDS)
def test_copies_of_states_share_no_memory(name):
    """What a donated copy overwrites is its own."""
    stack, x = by_name(name), tokens()
    with torch.no_grad():
        _, state = stack(x[:, :9], stack.empty_state(2))
        want, _ = in_pieces(stack, x[:, 9:], (1, 2), state)
        copies = [state.fork(), state.detach(), state.to("cpu"), state.select(slice(None)), state.select([0, 1])]
        for copied in [*copies, StackState.cat([state])]:
            assert not storages(copied) & storages(state)
            assert torch.equal(in_pieces(stack, x[:, 9:], (1, 2), copied, donate=True)[0], want)
            with pytest.raises(ValueError, match="donated"):
                copied.clone()
        assert torch.equal(in_pieces(stack, x[:, 9:], (1, 2), state)[0], want)


def storages(state: StackState) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in state.tensors().values()}


@pytest.mark.parametrize("name", ["linear", "softmax", "after favor"])
def test_bfloat16_stays_close(name):
    """At most three times the error of rounding only weights, inputs and outputs (measured: less than twice)."""
    exact, x = by_name(name), tokens(time=60)
    narrow, rounded = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16().double()
    whole = narrow(x.bfloat16())[0].detach()
    plain = rounded(x.bfloat16().double())[0].detach().bfloat16()
    assert_as_accurate(whole, exact(x)[0].detach(), plain, factor=3)
    assert_close(in_pieces(narrow, x.bfloat16(), range(40, 60), narrow.empty_state(2))[0], whole, 0.02)


def test_dropout_is_of_what_parts_add_and_only_in_training():
    stack = stack_of(depth=1, dropout=0.5, norm_first=True)
    block: Any = stack.blocks[0]
    x = tokens()
    with torch.no_grad():
        block.ff.leave.weight.zero_()
        block.ff.leave.bias.zero_()
        added = block.eval()(x)[0] - x
        torch.manual_seed(0)
        ratio = (block.train()(x)[0] - x) / added
    kept = ratio.abs() > 0.5
    assert_close(ratio[kept], torch.full_like(ratio[kept], 2.0), 1e-9)
    assert 0.4 < kept.double().mean() < 0.6 and ratio[~kept].abs().max() == 0


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_the_same(name):
    stack, x = by_name(name), tokens()
    for twin in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):  # noqa: S301
        assert torch.equal(twin(x)[0], stack(x)[0])
        for p, q in zip(twin.parameters(), stack.parameters(), strict=True):
            assert p is not q


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_compiled_training_is_eager(name):
    stack, x = by_name(name), tokens()
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    got, want = compiled(x)[0], stack(x)[0]
    assert_close(got, want)
    for a, b in zip(*(gradients(y, *stack.parameters()) for y in (got, want)), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_errors_say_what_was_seen(unchecked):
    stack, x = stack_of(), tokens()
    for match, call in {
        r"width 12, got \(2, 23, 5\)": lambda: stack(x[..., :5]),
        "without cross-attention": lambda: stack(x, memory=x),
        "a block without cross": lambda: stack.blocks[0](x, memory=x),
        "3 blocks was given to a stack of 2": lambda: stack(x, stack_of(3).empty_state(2)),
        "another batch": lambda: stack(x, stack.empty_state(1)),
        "no memory to read": lambda: stack_of(cross=True)(x),
        "at least one layer": lambda: Stack(layer_of(), 0),
        "depth .if given.": lambda: Stack([layer_of()], 2),
        r"one width, got \[12, 16\]": lambda: Stack([layer_of(), layer_of(width=16)]),
        "needs at least one value": lambda: StackState.cat([]),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
