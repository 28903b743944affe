"""The attention layer: its three kinds against their definitions, and one call for training, prompts and steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import assert_as_accurate
from nn_cases import (
    KINDS,
    LINEAR,
    RECURRENT,
    REFORMER,
    SOFTMAX,
    array,
    assert_close,
    assert_same_bits,
    attention_by_loops,
    gradients,
    in_pieces,
    layer_of,
    made,
    tokens,
)

from linattn.nn import Attention, AttentionState

EVERY = RECURRENT | REFORMER
DEFINED = ("linear", "grouped", "values", "unnormalised", "before", "after", "after unnormalised", *SOFTMAX)
RANDOM = ("favor", "fourier", "after favor")


def attention(name: str, **options) -> Attention:
    return made(Attention, layer_of(**EVERY[name], **options))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", DEFINED)
def test_against_loops(name, causal):
    module, x = attention(name, causal=causal), tokens(time=7)
    assert_close(module(x)[0], torch.from_numpy(attention_by_loops(module, array(x))))


@pytest.mark.parametrize("name", ["linear", "values", "softmax", "softmax grouped"])
def test_cross_attention_against_loops(name):
    module = made(Attention, layer_of(**EVERY[name], memory_width=5), cross=True)
    x, memory = tokens(time=7), tokens(time=4, width=5, seed=2)
    want = torch.from_numpy(attention_by_loops(module, array(x), array(memory)))
    assert_close(module(x, memory=memory)[0], want)


@pytest.mark.parametrize("name", RECURRENT)
def test_pieces_are_the_whole_gradients_too(name):
    """A prompt, three steps and the rest: outputs, and the gradients that flow through the states in between."""
    module, x = attention(name), tokens().requires_grad_()
    whole, none = module(x)
    pieces, state = in_pieces(module, x, (13, 14, 15, 16), module.empty_state(2))
    assert none is None and isinstance(state, AttentionState)
    assert_close(pieces, whole, 1e-11)
    leaves = [x, *module.parameters()]
    key_bias = None if module.kind == "linear" or module.key.bias is None else module.key.bias
    for leaf, got, want in zip(leaves, gradients(pieces, *leaves), gradients(whole, *leaves), strict=True):
        if leaf is key_bias and module.rotary == "none":  # the same for all keys, so it cancels in the softmax
            assert max(got.abs().max(), want.abs().max()) < 1e-12
        else:
            assert_close(got, want, 1e-10)


@pytest.mark.parametrize("name", ["linear", "grouped", "favor", "before", "after", "softmax rotary"])
def test_steps_in_float32(name):
    """As accurate as the parallel form is in float32."""
    exact, x = attention(name), tokens(time=60)
    plain = copy.deepcopy(exact).float()
    steps, _ = in_pieces(plain, x.float(), range(20, 60), plain.empty_state(2))
    assert_as_accurate(steps.detach(), exact(x)[0].detach(), plain(x.float())[0].detach(), factor=4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", REFORMER)
def test_a_reformer_step_is_the_last_row_of_the_prefix(name, causal):
    module, x = attention(name, causal=causal), tokens()
    _, state = module(x[:, :9], module.empty_state(2))
    for end in range(10, 24):
        y, state = module(x[:, end - 1 : end], state)
        assert_close(y, module(x[:, :end])[0][:, -1:], 1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_padded_rows_are_each_alone(name, causal):
    """NaN in the padding reaches neither outputs, states nor gradients; each row then goes on from its own place."""
    module, x, lengths = attention(name, causal=causal), tokens(3), [23, 0, 9]
    junk = x.clone()
    for row, length in enumerate(lengths):
        junk[row, length:] = torch.nan
    junk.requires_grad_()
    y, state = module(junk, module.empty_state(3), lengths=lengths)
    stateless, _ = module(junk, lengths=torch.tensor(lengths))
    after, _ = module(x[:, :2], state)
    for row, length in enumerate(lengths):
        alone, own = module(x[row : row + 1, :length], module.empty_state(1))
        if length:
            assert_close(y[row : row + 1, :length], alone, 1e-11)
            assert_close(stateless[row : row + 1, :length], alone, 1e-11)
        assert_close(after[row : row + 1], module(x[row : row + 1, :2], own)[0], 1e-11)
    assert y.isfinite().all(), "padding is no NaN afterwards either"
    real = torch.cat([y[row, :length] for row, length in enumerate(lengths)])
    for grad in gradients(real, junk, *module.parameters()):
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["softmax", "favor", "linear"])
def test_memories_of_different_lengths(name):
    module = made(Attention, layer_of(**EVERY[name], memory_width=5), cross=True)
    x, memory, lengths = tokens(2, 6), tokens(2, 9, 5, seed=2), [9, 4]
    junk = memory.clone()
    junk[1, 4:] = torch.nan
    read, state = module(x, module.empty_state(2), memory=junk, memory_lengths=lengths, lengths=[6, 3])
    later, _ = module(x, state)
    for row, length in enumerate(lengths):
        alone, _ = module(x[row : row + 1], memory=memory[row : row + 1, :length])
        real = 6 if row == 0 else 3
        assert_close(read[row : row + 1, :real], alone[:, :real])
        assert_close(later[row : row + 1], alone)
    for grad in gradients(later, *module.parameters()):
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["linear", "favor", "softmax"])
def test_a_memory_is_projected_once(name):
    module = made(Attention, layer_of(**EVERY[name]), cross=True)
    x, memory, calls = tokens(2, 6), tokens(2, 9, seed=2), []
    module.key.register_forward_hook(lambda *_: calls.append("key"))
    module.value.register_forward_hook(lambda *_: calls.append("value"))
    steps, state = in_pieces(module, x, range(1, 6), module.empty_state(2), memory=memory)
    assert calls == ["key", "value"]
    again, _ = module(x, state)
    assert calls == ["key", "value"]
    whole, _ = module(x, memory=memory)
    assert_close(steps, whole)
    assert_close(again, whole)


@pytest.mark.parametrize("name", ["after", "softmax rotary"])
def test_rotary_weights_depend_on_distances_alone(name):
    """So nothing changes where counting begins at 1000. "before" a map they do not, and something does."""
    x = tokens()

    def difference(name: str) -> float:
        module = attention(name)
        state = module.empty_state(2)
        late = AttentionState(state.memory, state.weights, torch.full((2,), 1000), state.draw)
        return (module(x, late)[0] - module(x)[0]).abs().max().item()

    assert difference(name) < 1e-9
    assert difference("before") > 1e-3


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("name", RANDOM)
def test_a_state_goes_on_with_its_own_draw(name, cross):
    """After a redraw an old state gives what the old layer gave, a new one uses the new draw; both share a batch."""
    before = made(Attention, layer_of(**EVERY[name]), cross=cross)
    x, memory = tokens(2, 12), {"memory": tokens(2, 5, seed=2)} if cross else {}
    after: Any = copy.deepcopy(before)
    _, state = after(x[:, :8], after.empty_state(2), **memory)
    after.feature_map.redraw(torch.Generator().manual_seed(9))
    old, new = before(x, **memory)[0][:, 8:], after(x, **memory)[0][:, 8:]
    assert (old - new).abs().max() > 1e-3, "the draw makes no difference, and nothing was tested"
    _, fresh = after(x[:, :8], after.empty_state(2), **memory)
    assert_close(in_pieces(after, x[:, 8:], (1, 2), state)[0], old)
    assert_close(in_pieces(after, x[:, 8:], (1, 2), fresh)[0], new)
    mixed = AttentionState.cat([state.select(0), fresh.select(1)])
    assert_close(after(x[:, 8:], mixed)[0], torch.stack([old[0], new[1]]))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_memory_never_grows(name):
    module = attention(name)
    _, short = module(tokens(1, 10), module.empty_state(1))
    _, long = module(tokens(1, 1000), short)
    assert short.nbytes == long.nbytes == module.empty_state(1).nbytes > 0
    _, softmax = attention("softmax")(tokens(1, 1000), attention("softmax").empty_state(1))
    assert softmax.nbytes >= 1000 * 2 * 4 * 3 * 8


@pytest.mark.parametrize("name", KINDS)
def test_donating_gives_the_same_and_consumes(name):
    module, x = attention(name), tokens()
    with torch.no_grad():
        kept, state = in_pieces(module, x, range(3, 23), module.empty_state(2))
        given, given_state = in_pieces(module, x, range(3, 23), module.empty_state(2), donate=True)
        assert torch.equal(kept, given)
        assert_same_bits(state, given_state)
        module(x, given_state, donate=True)
        with pytest.raises(ValueError, match="donated"):
            module(x, given_state)
    with pytest.raises(ValueError, match="gradients"):
        module(x, state, donate=True)


@pytest.mark.parametrize("name", KINDS)
def test_autocast_reads_and_steps(name):
    """Caches keep what the layers make under autocast, sums stay float32, and pieces are still the whole."""
    module, x = attention(name).float(), tokens().float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        whole, _ = module(x)
        pieces, _ = in_pieces(module, x[:, :20], (10, 11), module.empty_state(2))
        last, state = in_pieces(module, x, (19, 20, 21, 22), module.empty_state(2))
    assert whole.dtype == torch.bfloat16 and isinstance(state, AttentionState)
    exact = module(x)[0].detach()
    assert (whole - exact).abs().max() < 0.03 * exact.abs().max()
    assert_close(last[:, 22:], whole[:, 22:], 0.02)
    if name != "reformer":
        assert_close(pieces, whole[:, :20], 0.02)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_autocast_leaves_float64_alone(name):
    """Its products stay float64 under autocast, and so must what a state keeps of them."""
    module, x = attention(name), tokens()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        pieces, _ = in_pieces(module, x, (10, 11), module.empty_state(2))
    assert_close(pieces, module(x)[0].detach(), 1e-11)


def test_errors_say_what_was_seen(unchecked):
    linear, cross, x = attention("linear"), made(Attention, layer_of(), cross=True), tokens()
    for match, call in {
        r"width 12, got \(2, 23, 5\)": lambda: linear(x[..., :5]),
        r"width 12, got \(23, 12\)": lambda: linear(x[0]),
        "cross=True": lambda: linear(x, memory=x),
        "memory=": lambda: cross(x),
        r"memory must be .* got \(2, 23, 5\)": lambda: cross(x, memory=x[..., :5]),
        "State, got KVCache": lambda: linear(x, attention("softmax").empty_state(2)),
        "another batch": lambda: linear(x, linear.empty_state(3)),
        r"lengths must hold one length per row, shape \(2,\)": lambda: linear(x, lengths=[3, 4, 5]),
        "got 24": lambda: linear(x, lengths=[3, 24]),
        "only one of them read its memory": lambda: AttentionState.cat(
            [cross.empty_state(2), cross(x, cross.empty_state(2), memory=x)[1]]
        ),
        "signed, so its layer needs eps=": lambda: Attention(layer_of(feature_map="fourier")),
        "takes no eps": lambda: Attention(layer_of(rotary="after", eps=1e-3)),
        "odd number": lambda: Attention(layer_of(rotary="after", feature_map="taylor")),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_layers_say_what_they_can_be(unchecked):
    for match, options in {
        "attention must be one of linear, softmax, reformer, got 'soft'": {"attention": "soft"},
        "feature_map must be one of elu,": {"feature_map": "elo"},
        "width 13 does not divide into 4 heads": {"width": 13},
        "multiple of num_kv_heads 3": {"num_kv_heads": 3},
        "num_heads must be a positive integer, got 0": {"num_heads": 0},
        "num_heads must be a positive integer, got True": {"num_heads": True},
        "chunk_length must be a positive integer, got 1.5": {"chunk_length": 1.5},
        "scale must be positive and finite, got -1": {"scale": -1.0},
        r"dropout must lie in \[0, 1\)": {"dropout": 1.0},
        "head_width must be even, got 3": {"rotary": "before", "head_width": 3},
        "no cross-attention": {"attention": "reformer", "cross": True},
        "its own scale": {"attention": "reformer", "scale": 2.0},
    }.items():
        with pytest.raises(ValueError, match=match):
            layer_of(**options)
