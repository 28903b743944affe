"""Wrong operands and options: each is a ValueError that says what was seen, what was expected, and the way out."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from wrong_calls import Wrong, assert_refused, attend, packed, tokens

from linattn import FEATURE_MAPS, FeatureMap, backends

# The annotations would catch many of these before our own checks do, with messages of their own.
pytestmark = pytest.mark.usefixtures("unchecked")


class Silent(FeatureMap):
    """A map that does not say what kind it is."""

    def num_features(self, dim: int) -> int:
        return dim

    def forward(self, x: Tensor) -> Tensor:
        return x


WRONG: dict[str, Wrong] = {
    # ranks, shapes
    "q of three axes": Wrong(
        lambda: attend(tokens()[0]), r"q\b.*\(5, 4, 3\)", "batch, time, heads", "4 axes|time comes before"
    ),
    "v of five axes": Wrong(
        lambda: attend(v=tokens()[None]), r"v\b.*\(1, 2, 5, 4, 3\)", "batch, time, heads", "4 axes"
    ),
    "k with another batch": Wrong(lambda: attend(k=tokens(3), v=tokens(3)), r"\(3, 5, 4, 3\)", r"same batch"),
    "v with another batch": Wrong(lambda: attend(v=tokens(3)), r"\(3, 5, 4, 3\)", "agree|same"),
    "v with another time": Wrong(lambda: attend(v=tokens(time=6), causal=False), r"\(2, 6, 4, 3\)", "agree|same"),
    "v with other heads": Wrong(lambda: attend(v=tokens(heads=2)), r"\(2, 5, 2, 3\)", "agree|same"),
    "k of another width": Wrong(lambda: attend(k=tokens(width=7)), r"\(2, 5, 4, 7\)", "same width"),
    "keys longer than causal queries": Wrong(
        lambda: attend(k=tokens(time=6), v=tokens(time=6)), r"\(2, 6, 4, 3\)", "same time", "causal=False"
    ),
    "heads that do not divide": Wrong(
        lambda: attend(k=tokens(heads=3), v=tokens(heads=3)), r"\b4\b.*\b3\b", "multiple|divi"
    ),
    "more key heads than query heads": Wrong(
        lambda: attend(k=tokens(heads=8), v=tokens(heads=8)), r"\b4\b.*\b8\b", "multiple|divi"
    ),
    "no heads": Wrong(
        lambda: attend(tokens(heads=0), tokens(heads=0), tokens(heads=0)), r"\(2, 5, 0, 3\)", "at least 1"
    ),
    "no width": Wrong(lambda: attend(tokens(width=0), tokens(width=0)), r"\(2, 5, 4, 0\)", "at least 1"),
    "no value width": Wrong(lambda: attend(v=tokens(width=0)), r"\(2, 5, 4, 0\)", "at least 1"),
    # types, dtypes, devices
    "a list for q": Wrong(lambda: attend([[1.0]]), "list", "tensor"),
    "a string for v": Wrong(lambda: attend(v="v"), "str", "tensor"),
    "integers": Wrong(lambda: attend(*[tokens(dtype=torch.int64)] * 3), "torch.int64", "float32", "cast"),
    "booleans": Wrong(lambda: attend(*[tokens(dtype=torch.bool)] * 3), "torch.bool", "float32", "cast"),
    "complex numbers": Wrong(
        lambda: attend(*[tokens(dtype=torch.complex64)] * 3), "torch.complex64", "float32", "cast"
    ),
    "mixed dtypes": Wrong(
        lambda: attend(v=tokens().bfloat16()), "torch.float32.*torch.bfloat16", "share a dtype", "cast"
    ),
    "q in float64": Wrong(lambda: attend(tokens().double()), "torch.float64.*torch.float32", "share a dtype", "cast"),
    "mixed devices": Wrong(lambda: attend(tokens(device="meta")), "meta.*cpu", "one device", "move"),
    # maps, implementations, numbers
    "an unknown map": Wrong(lambda: attend(feature_map="gelu"), "'gelu'", "elu.*relu.*taylor", "did you mean 'elu'"),
    "a map of no kind": Wrong(lambda: attend(feature_map=Silent()), "Silent", "positive_features.*signed", "kind"),
    "a function for a map": Wrong(lambda: attend(feature_map=torch.relu), "relu", "name or a FeatureMap", "elu"),
    "a module that is no map": Wrong(lambda: attend(feature_map=nn.ReLU()), "ReLU", "name or a FeatureMap", "elu"),
    "a class for a map": Wrong(lambda: attend(feature_map=FEATURE_MAPS["elu"]), "Elu", "name or a FeatureMap", "elu"),
    "a random map by name": Wrong(lambda: attend(feature_map="favor"), "'favor'", "draw|weights", r"Favor\(dim\)"),
    "a learned map by name": Wrong(
        lambda: attend(feature_map="hedgehog"), "'hedgehog'", "draw|weights", r"Hedgehog\(dim\)"
    ),
    "a signed map without eps": Wrong(
        lambda: attend(feature_map="identity"), "identity.*signed", "eps", "normalize=False"
    ),
    "an unknown implementation": Wrong(lambda: attend(impl="cuda"), "'cuda'", "quadratic.*chunked.*recurrent", "auto"),
    "no implementation": Wrong(lambda: attend(impl=None), "None", "quadratic.*chunked.*recurrent", "auto"),
    "eps of zero": Wrong(lambda: attend(eps=0.0), r"eps.*\b0", "positive"),
    "a negative eps": Wrong(lambda: attend(eps=-1e-3), r"eps.*-0\.001", "positive"),
    "eps that is no number": Wrong(lambda: attend(eps=float("nan")), "eps.*nan", "positive"),
    "a string for eps": Wrong(lambda: attend(eps="1e-3"), "eps.*'1e-3'", "number"),
    "a scale of zero": Wrong(lambda: attend(scale=0.0), r"scale.*\b0", "positive"),
    "a negative scale": Wrong(lambda: attend(scale=-2), "scale.*-2", "positive"),
    "a scale that is no number": Wrong(lambda: attend(scale=float("nan")), "scale.*nan", "positive"),
    "an infinite scale": Wrong(lambda: attend(scale=float("inf")), "scale.*inf", "finite"),
    # lengths
    "a negative length": Wrong(lambda: attend(lengths=[5, -1]), "lengths.*-1", r"between 0 and.*\b5\b"),
    "a length beyond the time": Wrong(
        lambda: attend(lengths=torch.tensor([6, 5])), "lengths.*6", r"between 0 and.*\b5\b"
    ),
    "lengths for too few rows": Wrong(lambda: attend(lengths=[5]), r"lengths.*\(1,\)", r"per row.*\(2,\)"),
    "lengths of two axes": Wrong(lambda: attend(lengths=torch.ones(2, 1).long()), r"lengths.*\(2, 1\)", r"\(2,\)"),
    "nested lengths": Wrong(lambda: attend(lengths=[[5], [5]]), r"lengths.*\[5\]", "int"),
    "a string for lengths": Wrong(lambda: attend(lengths="55"), "lengths.*'55'", "list of ints|integer tensor"),
    "a number for lengths": Wrong(lambda: attend(lengths=5), "lengths.*int 5", "list of ints|integer tensor"),
    "float lengths": Wrong(lambda: attend(lengths=[5.0, 2.0]), r"lengths.*float 5\.0", "int"),
    "a float tensor of lengths": Wrong(
        lambda: attend(lengths=torch.tensor([5.0, 2.0])), "lengths.*torch.float32", "integer tensor", "int64"
    ),
    "bool lengths": Wrong(lambda: attend(lengths=[True, False]), "lengths.*bool True", "int"),
    "a mask for lengths": Wrong(
        lambda: attend(lengths=torch.ones(2, 5).bool()), "lengths.*torch.bool", "integer tensor"
    ),
    "lengths of queries under causal": Wrong(
        lambda: attend(q_lengths=[5, 5]), "q_lengths", "causal=True", "causal=False"
    ),
    "a length of queries beyond their time": Wrong(
        lambda: attend(q_lengths=[5, 9], causal=False), "q_lengths.*9", r"between 0 and.*\b5\b"
    ),
    "lengths and cu_seqlens": Wrong(
        lambda: packed(lengths=[5], cu_seqlens=[0, 5]), "lengths.*cu_seqlens", "both", "pass one"
    ),
    "q_lengths and cu_seqlens": Wrong(
        lambda: packed(q_lengths=[5], cu_seqlens=[0, 5], causal=False), "lengths.*cu_seqlens", "both", "pass one"
    ),
    # packing
    "cu_seqlens over a batch": Wrong(lambda: attend(cu_seqlens=[0, 5]), r"\b2\b", "batch must be 1", "lengths"),
    "cu_seqlens that does not begin with 0": Wrong(lambda: packed(cu_seqlens=[1, 5]), "cu_seqlens.*1", "begin with 0"),
    "cu_seqlens that decreases": Wrong(
        lambda: packed(cu_seqlens=[0, 4, 3, 5]), "cu_seqlens.*3 after 4", "never decrease"
    ),
    "cu_seqlens beyond the tokens": Wrong(lambda: packed(cu_seqlens=[0, 2, 9]), "cu_seqlens.*9", r"\b5\b"),
    "a negative cu_seqlens": Wrong(lambda: packed(cu_seqlens=[-1, 5]), "cu_seqlens.*-1", "begin with 0"),
    "an empty cu_seqlens": Wrong(lambda: packed(cu_seqlens=[]), r"cu_seqlens.*\(0,\)", "begins? with 0"),
    "cu_seqlens of two axes": Wrong(
        lambda: packed(cu_seqlens=torch.tensor([[0, 5]])), r"cu_seqlens.*\(1, 2\)", "one axis"
    ),
    "float cu_seqlens": Wrong(lambda: packed(cu_seqlens=[0, 5.0]), r"cu_seqlens.*float 5\.0", "int"),
    "cu_seqlens_q alone": Wrong(
        lambda: packed(cu_seqlens_q=[0, 5], causal=False), "cu_seqlens_q", "without cu_seqlens", "pass both"
    ),
    "cu_seqlens_q under causal": Wrong(
        lambda: packed(cu_seqlens=[0, 5], cu_seqlens_q=[0, 5]), "cu_seqlens_q", "causal=True", "causal=False"
    ),
    "packed queries and keys that do not pair up": Wrong(
        lambda: packed(cu_seqlens=[0, 2, 5], cu_seqlens_q=[0, 5], causal=False), r"\b2\b.*\b1\b", "pair up"
    ),
    "packed cross-attention without its queries' cuts": Wrong(
        lambda: packed(q=tokens(1, 3), cu_seqlens=[0, 5], causal=False), r"\b3\b.*\b5\b", "needs", "cu_seqlens_q"
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_refused(WRONG[name])


@pytest.mark.parametrize("name", ["native", "triton"])
def test_an_implementation_that_cannot_run_says_why(name):
    available, reason = backends()[name]
    if available:
        assert attend(impl=name).shape == (2, 5, 4, 3)
        return
    with pytest.raises(ValueError, match=re.escape(reason)) as raised:
        attend(impl=name)
    assert re.search("auto.*quadratic.*chunked.*recurrent", str(raised.value), re.DOTALL)
    assert name in str(raised.value)


def test_backends_name_every_implementation():
    assert set(backends()) == {"quadratic", "chunked", "recurrent", "native", "triton"}
    for available, reason in backends().values():
        assert isinstance(available, bool) and reason
    assert all(backends()[name][0] for name in ("quadratic", "chunked", "recurrent"))


def test_a_misspelt_option_is_not_swallowed():
    with pytest.raises(TypeError, match="normalise"):
        attend(normalise=False)
