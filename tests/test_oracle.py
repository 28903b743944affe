"""The oracle against itself: its gradients are those of its own loss, and its maps are the kernels they claim to be."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

LAYOUTS = (
    {"causal": True},
    {"causal": False},
    {"causal": True, "lengths": [3, 0]},
    {"causal": False, "lengths": [2, 4], "q_lengths": [4, 1]},
)


def random_arrays(feature_map: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    width, values = 3, 2
    features = oracle.MAPS[feature_map].features(np.zeros(width)).size
    sums = {"kv": (2, 1, features, values), "z": (2, 1, features)}
    shapes = {"q": (2, 4, 2, width), "k": (2, 4, 1, width), "v": (2, 4, 1, values), "g": (2, 4, 2, values)}
    shapes |= sums | {f"g_{name}": shape for name, shape in sums.items()}
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return x | {"z": np.abs(x["z"]) + 3}


def loss(x: dict[str, np.ndarray], feature_map: str, **options) -> float:
    y = oracle.attend(x, feature_map, **options)
    return sum(
        float((y[name] * x[cotangent]).sum()) for name, cotangent in (("out", "g"), ("kv", "g_kv"), ("z", "g_z"))
    )


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("feature_map", oracle.MAPS)
def test_gradients_are_the_slopes_of_the_loss(feature_map, layout, normalize):
    options = layout | {"normalize": normalize, "scale": 0.7, "eps": 1.5 if feature_map == "identity" else None}
    x = random_arrays(feature_map)
    if not normalize:
        x["g_z"][:] = 0
    slopes = oracle.attend(x, feature_map, **options)
    rng, step = np.random.default_rng(4), 1e-6
    for name in ("q", "k", "v", "kv", "z"):
        direction = rng.standard_normal(x[name].shape)
        up, down = (loss(x | {name: x[name] + sign * step * direction}, feature_map, **options) for sign in (1, -1))
        want = (slopes[f"d{name}"] * direction).sum()
        assert abs((up - down) / (2 * step) - want) < 1e-7 * max(1, abs(want)), name


@pytest.mark.parametrize(
    ("feature_map", "kernel"), [("quadratic", lambda s: s**2), ("taylor", lambda s: 1 + s + s**2 / 2)]
)
def test_features_multiply_to_their_kernel(feature_map, kernel):
    a, b = np.random.default_rng(5).standard_normal((2, 50, 7))
    features = oracle.MAPS[feature_map].features
    np.testing.assert_allclose((features(a) * features(b)).sum(-1), kernel((a * b).sum(-1)), rtol=1e-12)


def test_packed_sequences_and_padded_rows_are_the_same_sequences():
    x = random_arrays("elu")
    lengths, packed = [3, 2], dict(x)
    for name in "qkvg":
        packed[name] = np.concatenate([x[name][b, :n] for b, n in enumerate(lengths)])[None]
    padded = oracle.attend(x, "elu", causal=True, normalize=True, lengths=lengths)
    dense = oracle.attend(packed, "elu", causal=True, normalize=True, cu_seqlens=[0, 3, 5])
    for name in ("out", "dq", "dk", "dv"):
        rows = np.concatenate([padded[name][b, :n] for b, n in enumerate(lengths)])[None]
        np.testing.assert_allclose(dense[name], rows, rtol=1e-13, err_msg=name)
        assert not padded[name][0, 3:].any() and not padded[name][1, 2:].any()
    for name in ("kv", "z", "dkv", "dz"):
        np.testing.assert_allclose(dense[name], padded[name], rtol=1e-13, err_msg=name)
