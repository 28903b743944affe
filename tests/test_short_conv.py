"""The short convolution: against its definition, in pieces, padded; and a block that has one."""

from __future__ import annotations

import nn_cases
import pytest
import torch
from torch import Tensor

from linattn.nn import Layer, Stack
from linattn.nn.short_conv import ShortConv


def tokens(rows: int = 3, time: int = 11, width: int = 6) -> Tensor:
    return torch.randn(rows, time, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def made(taps: int, causal: bool = True) -> ShortConv:
    torch.manual_seed(1)
    return ShortConv(6, taps, causal=causal).double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("taps", [2, 3, 4, 9])
def test_against_the_definition(taps, causal):
    conv, x = made(taps, causal), tokens()
    w, b = conv.conv.weight[:, 0], conv.conv.bias
    assert b is not None
    first = taps - 1 if causal else taps // 2
    expected = torch.zeros_like(x) + b
    for t in range(x.shape[1]):
        for j in range(taps):
            if 0 <= t - first + j < x.shape[1]:
                expected[:, t] += w[:, j] * x[:, t - first + j]
    got, state = conv(x)
    assert state is None and torch.allclose(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("form", [{}, {"norm_first": True}, {"norm": "rms", "attention": "softmax"}])
def test_a_stack_with_it_goes_on_from_anywhere(form):
    torch.manual_seed(0)
    stack = Stack(Layer(width=6, num_heads=2, conv=4, **form), depth=2).double().eval()
    x = tokens()
    whole, _ = stack(x)
    for cut in (1, 3, 7):
        left, state = stack(x[:, :cut], stack.empty_state(3))
        right, _ = stack(x[:, cut:], state)
        assert torch.allclose(torch.cat([left, right], 1), whole, rtol=0, atol=1e-12)
    assert torch.equal(whole[:, :5], stack(torch.cat([x[:, :5], -x[:, 5:]], 1))[0][:, :5]), "it sees the future"


@pytest.mark.parametrize("form", [{}, {"norm_first": True}])
def test_rows_of_different_lengths_go_on_each_from_its_own_end(form):
    torch.manual_seed(0)
    stack = Stack(Layer(width=6, num_heads=2, conv=4, **form), depth=2).double().eval()
    x, lengths = tokens(), [7, 2, 11]
    padded = x.clone()
    for b, n in enumerate(lengths):
        padded[b, n:] = torch.nan
    got, state = stack(padded, stack.empty_state(3), lengths=lengths)
    after, _ = stack(tokens(time=2), state)
    for b, n in enumerate(lengths):
        alone, own = stack(x[b : b + 1, :n], stack.empty_state(1))
        assert torch.allclose(got[b, :n], alone[0], rtol=0, atol=1e-12)
        assert torch.allclose(after[b], stack(tokens(time=2)[b : b + 1], own)[0][0], rtol=0, atol=1e-12)


def test_no_token_leaves_all_as_it_was():
    conv, x = made(3), tokens()
    _, before = conv(x, conv.empty_state(3))
    nothing, after = conv(x[:, :0], before)
    assert nothing.shape == (3, 0, 6) and torch.equal(after, before)


def test_a_state_keeps_no_more_than_it_needs():
    """As a view of what was read it would hold a whole prompt in memory."""
    conv, x = made(4), tokens()
    _, state = conv(x, conv.empty_state(3))
    assert state.untyped_storage().nbytes() == state.numel() * 8


def test_padding_does_not_look_back_into_a_row():
    """A centred convolution sees the tokens behind a row's end, and there a norm's bias is no zero any more."""
    stack = nn_cases.made(Stack, Layer(width=6, num_heads=2, conv=4, causal=False, norm_first=True), depth=2)
    x, lengths = tokens(), [7, 2, 11]
    got, _ = stack(x, lengths=lengths)
    for b, n in enumerate(lengths):
        assert torch.allclose(got[b, :n], stack(x[b : b + 1, :n])[0][0], rtol=0, atol=1e-12)


def test_a_layer_says_what_is_wrong():
    for taps in (1, -2):
        with pytest.raises(ValueError, match="conv must be 0, or at least 2 taps"):
            Layer(width=6, num_heads=2, conv=taps)
