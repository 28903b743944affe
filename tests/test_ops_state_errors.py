"""Wrong uses of states, donation, steps and `check`: each is a ValueError that says the way out."""

from __future__ import annotations

import pytest
import torch
from wrong_calls import Wrong, assert_refused, attend, attend_to, packed, state, tokens

from linattn import State, check, linear_attention
from linattn.ops import Step

# The annotations would catch many of these before our own checks do, with messages of their own.
pytestmark = pytest.mark.usefixtures("unchecked")


def used_up() -> State:
    given = state()
    attend(state=given, return_state=True, donate=True)
    return given


def z_with_gradient() -> torch.Tensor:
    return torch.ones(2, 4, 3, requires_grad=True)


WRONG: dict[str, Wrong] = {
    # states
    "a state for another batch": Wrong(lambda: attend(state=state(3)), r"\(3, 4, 3, 3\)", r"\(2, 4, 3, 3\)", "batch"),
    "a state of other heads": Wrong(
        lambda: attend(state=state(heads=2)), r"\(2, 2, 3, 3\)", r"\(2, 4, 3, 3\)", "heads"
    ),
    "a state of another map": Wrong(
        lambda: attend(state=state(features=9)), r"\(2, 4, 9, 3\)", r"\(2, 4, 3, 3\)", "feature map"
    ),
    "a state of other values": Wrong(
        lambda: attend(state=state(values=1)), r"\(2, 4, 3, 1\)", r"\(2, 4, 3, 3\)", "values"
    ),
    "a state of fewer packed sequences": Wrong(
        lambda: packed(cu_seqlens=[0, 2, 5], state=state(1)), r"\(1, 4, 3, 3\)", r"\(2, 4, 3, 3\)", "packed sequences"
    ),
    "a float64 state": Wrong(lambda: attend(state=state(dtype=torch.float64)), "torch.float64", "torch.float32"),
    "a float32 state for float64": Wrong(
        lambda: attend(*[tokens().double()] * 3, state=state()), "torch.float32", "torch.float64"
    ),
    "a state without z": Wrong(lambda: attend(state=state(normalize=False)), "no z", "normalize=True"),
    "a state with z": Wrong(lambda: attend(state=state(), normalize=False), "a z", "normalize=False"),
    "a state whose z has another shape": Wrong(
        lambda: attend(state=State(torch.zeros(2, 4, 3, 3), torch.ones(2, 4, 1))), r"z.*\(2, 4, 1\)", r"\(2, 4, 3\)"
    ),
    "a state whose low part has another shape": Wrong(
        lambda: attend(
            state=State(torch.zeros(2, 4, 3, 3), torch.ones(2, 4, 3), torch.zeros(2, 4, 3, 1), torch.zeros(2, 4, 3))
        ),
        r"kv_low.*\(2, 4, 3, 1\)",
        r"\(2, 4, 3, 3\)",
    ),
    "a bf16 state": Wrong(
        lambda: attend(state=State(torch.zeros(2, 4, 3, 3).bfloat16(), torch.ones(2, 4, 3).bfloat16())),
        "torch.bfloat16",
        "torch.float32",
    ),
    "a state on another device": Wrong(lambda: attend(state=state(device="meta")), "meta.*cpu", "state", r"\.to\("),
    "a tensor for a state": Wrong(lambda: attend(state=torch.zeros(2, 4, 3, 3)), "Tensor", "State"),
    "a pair for a state": Wrong(lambda: attend(state=(torch.zeros(2, 4, 3, 3), None)), "tuple", "State"),
    "an empty state narrower than fp32": Wrong(
        lambda: state(dtype=torch.bfloat16), "torch.bfloat16", "torch.float32 or torch.float64"
    ),
    "a state that was given away": Wrong(lambda: attend(state=used_up()), "donated", "gone", "clone"),
    # reading and donating
    "k without v": Wrong(lambda: linear_attention(tokens(), tokens(), None), "k was given without v", "both", "None"),
    "v without k": Wrong(lambda: linear_attention(tokens(), None, tokens()), "v was given without k", "both", "None"),
    "no q": Wrong(lambda: attend_to(None, tokens(), tokens()), r"q\b.*NoneType", "tensor"),
    "reading with no q": Wrong(
        lambda: attend_to(None, None, None, state=state(), causal=False), r"q\b.*NoneType", "tensor"
    ),
    "reading without a state": Wrong(lambda: linear_attention(tokens(), None, None, causal=False), "None", "state="),
    "reading causally": Wrong(
        lambda: linear_attention(tokens(), None, None, state=state()), "causal=True", "adds no", "causal=False"
    ),
    "reading a state of another batch": Wrong(
        lambda: linear_attention(tokens(), None, None, state=state(3), causal=False),
        r"\(3, 4, 3, 3\)",
        r"\(2, 4, 3, 3\)",
    ),
    "donating nothing": Wrong(lambda: attend(donate=True, return_state=True), "donate=True", "no state", "state="),
    "donating without taking the state back": Wrong(
        lambda: attend(state=state(), donate=True), "donate=True", "return_state", "return_state=True"
    ),
    "donating what gradients need": Wrong(
        lambda: attend(tokens(requires_grad=True), state=state(), return_state=True, donate=True),
        "donate=True",
        "gradients",
        "no_grad|donate=False",
    ),
    "donating a z that gradients need": Wrong(
        lambda: attend(state=State(torch.zeros(2, 4, 3, 3), z_with_gradient()), return_state=True, donate=True),
        "donate=True",
        "gradients",
        "no_grad|donate=False",
    ),
    # the prepared step
    "a step without a state": Wrong(lambda: Step(None), "NoneType", "State"),  # type: ignore[arg-type]
    "a step of an unknown map": Wrong(lambda: Step(state(), "gelu"), "'gelu'", "elu.*taylor", "did you mean"),
    "a step of a signed map without eps": Wrong(lambda: Step(state(), "identity"), "signed", "eps"),
    "a step with two tokens": Wrong(
        lambda: Step(state())(*[tokens(time=2)] * 3), r"\(2, 2, 4, 3\)", "one token", r"\(B, 1, H, D\)"
    ),
    "a step for another batch": Wrong(
        lambda: Step(state(3))(*[tokens(time=1)] * 3), r"\(2, 4, 3, 3\)", r"\(3, 4, 3, 3\)"
    ),
    "a step for other key heads": Wrong(
        lambda: Step(state(heads=2))(*[tokens(time=1)] * 3), r"\(2, 4, 3, 3\)", r"\(2, 2, 3, 3\)"
    ),
    # check, on request
    "checked lengths": Wrong(lambda: check(tokens(), tokens(), tokens(), lengths=[5, 6]), "6", r"\b5\b"),
    "checked cu_seqlens": Wrong(
        lambda: check(*[tokens(1)] * 3, cu_seqlens=torch.tensor([0, 3, 2])), "2 after 3", "decrease"
    ),
    "joined states of two forms": Wrong(lambda: State.cat([state(), state(normalize=False)]), "kv", "one form"),
    "joined states of two shapes": Wrong(
        lambda: State.cat([state(), state(values=2)]), r"\(2, 4, 3, 2\)", "equal shapes"
    ),
    "no states to join": Wrong(lambda: State.cat([]), "empty", "at least one"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_refused(WRONG[name])


def test_a_wrong_call_changes_nothing():
    """A call that is refused must not have consumed the state that it was to donate."""
    given = state()
    with pytest.raises(ValueError, match="same width"):
        attend(k=tokens(width=7), state=given, return_state=True, donate=True)
    out = attend(state=given)
    assert torch.equal(out, torch.ones(2, 5, 4, 3))


def test_check_passes_what_is_right():
    check(tokens(), tokens(), tokens(), lengths=torch.tensor([5, 0]))
    check(tokens(1), tokens(1), tokens(1), cu_seqlens=[0, 0, 5])
