"""The operator with every feature map: the definition written with the map's own features, in float64.

The maps themselves are held against their kernels in test_features.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from cases import TORCH_IMPLS, Case, assert_agree, assert_same, make_inputs, run_outputs
from torch import Tensor, nn

from linattn import FEATURE_MAPS, FeatureMap, linear_attention
from linattn.features import Elu, make
from linattn.ops import Step


def make_map(name: str, width: int, num_heads: int = 1) -> FeatureMap:
    return make(name, width, num_heads=num_heads, generator=torch.Generator().manual_seed(5)).double()


def definition(
    q: Tensor, k: Tensor, v: Tensor, *, feature_map: FeatureMap, causal: bool = True, normalize: bool = True
) -> Tensor:
    root = feature_map.default_scale(q.shape[-1]) ** 0.5
    f_q, f_k, share = feature_map(q * root), feature_map(k * root), q.shape[2] // k.shape[2]
    w = torch.einsum("bihc,bjhc->bhij", f_q, f_k.repeat_interleave(share, 2))
    w = w.tril() if causal else w
    w = w / w.sum(-1, keepdim=True) if normalize else w
    return torch.einsum("bhij,bjhm->bihm", w, v.repeat_interleave(share, 2))


@pytest.mark.parametrize("impl", TORCH_IMPLS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_map_by_its_features(name, num_heads, causal, impl):
    """Outputs and all gradients, those of the map's own weights too; grouped heads share their group's weights."""
    feature_map = make_map(name, 6, num_heads)
    x = make_inputs(Case(2, 20, heads=4, kv_heads=2, width=6, stateful=False))
    options = {"feature_map": feature_map, "causal": causal, "normalize": feature_map.kind == "positive_features"}
    weights = list(feature_map.parameters())
    got = run_outputs(partial(linear_attention, impl=impl, **options), x, weights)
    assert_agree(got, run_outputs(partial(definition, **options), x, weights))


class Cosine(FeatureMap):
    """A map of a user's own: (1 + cos x, 1 + sin x)."""

    kind = "positive_features"

    def __init__(self) -> None:
        super().__init__()
        self.frequency = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def num_features(self, dim: int) -> int:
        return 2 * dim

    def forward(self, x: Tensor) -> Tensor:
        x = self.frequency * x.double()
        return torch.cat([2 + x.cos(), 2 + x.sin()], -1)


class TwiceElu(Elu):
    """A subclass of a map that the kernels know must not be taken for it."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) ** 2

    def derivative(self, x: Tensor, y: Tensor) -> Tensor:
        elu = super().forward(x)
        return 4 * elu * super().derivative(x, elu)


@pytest.mark.parametrize("impl", TORCH_IMPLS)
@pytest.mark.parametrize("cls", [Cosine, TwiceElu])
def test_a_map_of_ones_own(cls, impl):
    feature_map = cls()
    x = make_inputs(Case(2, 20, stateful=False))

    weights = list(feature_map.parameters())
    got = run_outputs(partial(linear_attention, feature_map=feature_map, impl=impl), x, weights)
    assert_agree(got, run_outputs(partial(definition, feature_map=feature_map), x, weights))


@pytest.mark.parametrize("name", ["favor", "hedgehog", "learned_elu", "softmax"])
def test_steps_with_a_map_over_features(name):
    feature_map = make_map(name, 5)
    case = Case(time=40, stateful=False)
    x = make_inputs(case)
    q, k, v = (x[name] for name in ("q", "k", "v"))
    _, state = linear_attention(q[:, :1], k[:, :1], v[:, :1], feature_map=feature_map, return_state=True)
    step = Step(state, feature_map)
    got = torch.stack([step(q[:, t], k[:, t], v[:, t]).clone() for t in range(1, 40)], 1)
    assert_same("out", got, definition(q, k, v, feature_map=feature_map)[:, 1:].detach())


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_maps_survive_pickling_and_copying(name):
    feature_map = make_map(name, 5)
    x = make_inputs(Case(2, 9, stateful=False))

    def attend(feature_map: FeatureMap) -> Tensor:
        return linear_attention(x["q"], x["k"], x["v"], feature_map=feature_map, normalize=False)

    for same in (pickle.load(io.BytesIO(pickle.dumps(feature_map))), copy.deepcopy(feature_map)):  # noqa: S301
        assert torch.equal(attend(same), attend(feature_map))
