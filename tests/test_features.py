"""Feature maps against their kernels: numpy in float64 where they are exact, the law of large numbers where random."""

import copy
import io
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn.features import (
    DPFP,
    FEATURE_MAPS,
    T2R,
    ElementwiseMap,
    Elu,
    Favor,
    FeatureMap,
    Fourier,
    Hedgehog,
    LearnedElu,
    Polynomial,
    Taylor,
    make,
    resolve,
)
from linattn.features.learned import LearnedMap

NAMES = list(FEATURE_MAPS)
NEED_DIM = ("favor", "fourier", "hedgehog", "t2r", "learned_elu")
POSITIVE = [name for name, cls in FEATURE_MAPS.items() if getattr(cls, "kind", None) == "positive_features"]
DOC = Path(__file__).parents[1] / "docs" / "feature-maps.md"


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dpfp(x, nu=1):
    r = np.maximum(np.concatenate([x, -x], -1), 0)
    width = r.shape[-1]
    return np.stack([r[..., j] * r[..., (j + i) % width] for i in range(1, nu + 1) for j in range(width)], -1)


# What each elementwise map is, and its derivative
ELEMENTWISE = {
    "elu": (lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), lambda x: np.exp(np.minimum(x, 0))),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "squared_relu": (lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0)),
    "softplus": (lambda x: np.logaddexp(0, x), lambda x: np.exp(-np.logaddexp(0, -x))),
    "exp": (lambda x: np.exp(np.minimum(x, 20)), lambda x: np.where(x <= 20, np.exp(np.minimum(x, 20)), 0)),
    "identity": (lambda x: x, np.ones_like),
}
# What the product φ(q)·φ(k) of the others is, given q, k
KERNELS = {
    "softmax": lambda q, k: (softmax(q) * softmax(k)).sum(-1),
    "dpfp": lambda q, k: (dpfp(q) * dpfp(k)).sum(-1),
    "quadratic": lambda q, k: (q * k).sum(-1) ** 2,
    "quadratic_symmetric": lambda q, k: (q * k).sum(-1) ** 2,
    "polynomial": lambda q, k: ((q * k).sum(-1) + 1) ** 2,
    "taylor": lambda q, k: 1 + (q * k).sum(-1) + (q * k).sum(-1) ** 2 / 2,
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def made(name: str, dim: int, num_heads: int = 1, **options: object) -> FeatureMap:
    return make(name, dim, num_heads, torch.Generator().manual_seed(1), **options)


def trained(feature_map: FeatureMap) -> FeatureMap:
    """With weights that are neither the identity nor zero."""
    generator = torch.Generator().manual_seed(2)
    for parameter in feature_map.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return feature_map


def bits(x: Tensor) -> Tensor:
    """Positive bfloat16 numbers, counted."""
    return x.to(torch.bfloat16).view(torch.int16).int()


def all_bfloat16() -> Tensor:
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    return every[every.isfinite()]


def awkward_floats(dtype: torch.dtype) -> Tensor:
    """Zero, subnormals, the extremes, all magnitudes, and the neighbourhood of every bound."""
    info = torch.finfo(dtype)
    exponents = torch.linspace(math.log10(info.tiny) - 7, math.log10(info.max), 400, dtype=torch.float64)
    near = [-745.0, -708.396, -103.0, -87.3365, -40.0, 20.0, 40.0, 88.0]
    around = torch.cat([torch.linspace(b - 2, b + 2, 401, dtype=torch.float64) for b in near])
    extremes = torch.tensor([0.0, info.tiny, info.tiny / 8, info.max, 1e15, 1e4, 1.0], dtype=torch.float64)
    x = torch.cat([(10**exponents).clamp_max(info.max), around, extremes]).to(dtype)
    return torch.cat([x, -x])


@pytest.mark.parametrize("dim", [1, 3, 8, 17])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_against_numpy(name, dim):
    x = torch.cat([normal(64, dim) * 8, torch.zeros(1, dim, dtype=torch.float64)])
    feature_map = resolve(name)
    f, df = ELEMENTWISE[name]
    y = feature_map(x)
    assert isinstance(feature_map, ElementwiseMap)
    assert y.shape == x.shape == (65, feature_map.num_features(dim))
    np.testing.assert_allclose(y, f(x.numpy()), rtol=1e-14)
    np.testing.assert_allclose(feature_map.derivative(x, y), df(x.numpy()), rtol=1e-14)


@pytest.mark.parametrize("dim", [1, 3, 8, 17])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_against_numpy(name, dim):
    q, k = normal(64, dim, seed=1), normal(64, dim, seed=2)
    feature_map = resolve(name)
    got = (feature_map(q) * feature_map(k)).sum(-1)
    assert feature_map(q).shape[-1] == feature_map.num_features(dim)
    allowed = 1e-12 * KERNELS[name](q.abs().numpy(), k.abs().numpy())  # without the signs nothing cancels
    assert np.all(np.abs(got.numpy() - KERNELS[name](q.numpy(), k.numpy())) <= allowed)


@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("constant", [0.0, 0.7])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_polynomial_of_every_degree(degree, constant, dim):
    q, k = normal(32, dim, seed=1), normal(32, dim, seed=2)
    feature_map = Polynomial(degree, constant)
    got, exact = (feature_map(q) * feature_map(k)).sum(-1), ((q * k).sum(-1) + constant) ** degree
    assert feature_map(q).shape[-1] == feature_map.num_features(dim) == math.comb(dim + degree - (not constant), degree)
    assert feature_map.kind == ("nonnegative_kernel" if degree % 2 == 0 else "signed")
    assert torch.all((got - exact).abs() <= 1e-12 * ((q * k).abs().sum(-1) + constant) ** degree)


@pytest.mark.parametrize("nu", [2, 5])
def test_dpfp_with_more_shifts(nu):
    x = normal(32, 3)
    np.testing.assert_allclose(DPFP(nu)(x), dpfp(x.numpy(), nu), rtol=1e-14)
    assert DPFP(nu).num_features(3) == 6 * nu


def test_taylor_is_exp_up_to_third_order():
    """The remainder of exp(s) lies between s³/6 and exp(s) s³/6."""
    s = torch.tensor([-1.0, -0.5, -0.1, -0.02, 0.02, 0.1, 0.5, 1.0], dtype=torch.float64)
    q = torch.stack([s, torch.zeros_like(s)], -1)
    k = torch.tensor([1.0, 5.0], dtype=torch.float64)
    remainder = s.exp() - Taylor()(q) @ Taylor()(k)
    ratio = remainder / (s**3 / 6)
    low, high = torch.minimum(s.exp(), torch.ones(8)), torch.maximum(s.exp(), torch.ones(8))
    assert torch.all((ratio > low - 1e-9) & (ratio < high + 1e-9))


@pytest.mark.parametrize("name", NAMES)
def test_kind_and_width(name):
    feature_map = trained(made(name, 6))
    q, k = normal(200, 6, seed=1) * 3, normal(200, 6, seed=2) * 3
    assert feature_map(q).shape == (200, feature_map.num_features(6))
    if (feature_map(q) > 0).all():
        kind = "positive_features"
    else:
        kind = "signed" if (feature_map(q) @ feature_map(k).mT).min() < -1e-9 else "nonnegative_kernel"
    assert feature_map.kind == kind
    assert feature_map.name == name


@pytest.mark.parametrize("name", [*POSITIVE, "hedgehog exp"])
def test_positive_for_every_input(name):
    name, *form = name.split()
    maps = [made(name, 8, **({"form": form[0]} if form else {})) for _ in range(2)]
    trained(maps[1])
    tests = [all_bfloat16(), awkward_floats(torch.float32), awkward_floats(torch.float64)]
    assert len(tests[0]) == 65_280
    for feature_map in maps:
        for x in tests:
            shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))][: len(x) // 8 * 8]
            for rows in (x[:, None].expand(-1, 8), shuffled.view(-1, 8)):
                y = feature_map(rows)
                assert torch.all(y >= torch.finfo(y.dtype).tiny), f"{y.min()} for {x.dtype}"
                assert torch.all(y.isfinite())


def test_elu_in_bfloat16_is_right_to_one_rounding():
    x = all_bfloat16()
    x = x[x.abs() <= 80]
    exact = torch.from_numpy(ELEMENTWISE["elu"][0](x.double().numpy()))
    apart = (bits(Elu()(x)) - bits(exact)).abs()
    assert apart.max() <= 1
    assert apart.count_nonzero() < 10  # of 34,179: ties, which float32's own rounding moves


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_in_float32(name):
    """Within some roundings of the result, from where exp(x) is a normal number on."""
    x = awkward_floats(torch.float32)
    x = x[(x.abs() < 1e15) & (x > -87)].clone().requires_grad_()
    feature_map = resolve(name)
    assert isinstance(feature_map, ElementwiseMap)
    y = feature_map(x)
    (by_autograd,) = torch.autograd.grad(y.sum(), x)
    by_hand = feature_map.derivative(x.detach(), y.detach())
    f, df = ELEMENTWISE[name]
    wide = x.detach().double().numpy()
    np.testing.assert_allclose(y.detach(), f(wide), rtol=5e-7, atol=2e-38)
    np.testing.assert_allclose(by_autograd, df(wide), rtol=5e-7, atol=2e-38)
    np.testing.assert_allclose(by_hand, df(wide), rtol=5e-7, atol=2e-38)


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_give_finite_outputs_and_gradients(name):
    dim = 8
    feature_map = trained(made(name, dim))
    rows = torch.cat([torch.ones(1, dim), torch.eye(dim), normal(8, dim, dtype=torch.float32)]) * 1e4
    x = torch.cat([rows, -rows]).mul(feature_map.default_scale(dim) ** 0.5).requires_grad_()
    y = feature_map(x)
    gradients = torch.autograd.grad(y.sum(), [x, *feature_map.parameters()])
    assert y.dtype == torch.float32
    assert all(t.isfinite().all() for t in (y, *gradients))


@pytest.mark.parametrize("name", NAMES)
def test_computes_in_float32(name):
    feature_map = trained(made(name, 6, num_heads=2))
    x = normal(5, 4, 6)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = x.to(dtype)
        y, widened = feature_map(narrow), feature_map(narrow.float())
        assert y.dtype == torch.float32
        assert torch.equal(y, widened)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(feature_map(narrow), widened)
        np.testing.assert_allclose(y.detach(), feature_map(narrow.double()).detach(), rtol=2e-5, atol=2e-6)
    assert feature_map(x).dtype == torch.float64


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_second_derivatives(name):
    x = normal(4, 5) * 3
    x = torch.where(x.abs() < 0.1, 1.0, x).requires_grad_()  # finite differences must not step over the kink
    assert torch.autograd.gradgradcheck(resolve(name), (x,))


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    feature_map = trained(made(name, 5, num_heads=2)).double()
    x = normal(2, 4, 5).requires_grad_()
    names, leaves = zip(*feature_map.named_parameters(), strict=True) if list(feature_map.parameters()) else ((), ())

    def call(x, *leaves):
        return torch.func.functional_call(feature_map, dict(zip(names, leaves, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *leaves))


@pytest.mark.parametrize("name", NAMES)
def test_transforms(name, unchecked):
    feature_map = trained(made(name, 5, num_heads=2)).double()
    x = normal(3, 4, 5)
    y = feature_map(x)
    slope = torch.autograd.grad(feature_map(leaf := x.clone().requires_grad_()).sin().sum(), leaf)[0]
    torch.compiler.reset()  # jaxtyping's wrapper is one function to the compiler, which has a limit on versions of each
    compiled = torch.compile(feature_map, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), y)
    torch.testing.assert_close(torch.autograd.grad(compiled(leaf).sin().sum(), leaf)[0], slope)
    torch.testing.assert_close(torch.func.vmap(feature_map)(x), y)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(lambda row: feature_map(row).sin().sum()))(x), slope)


def test_compiled_for_any_width(unchecked):
    """A compiled caller that meets a second width is compiled for all widths."""
    torch.compiler.reset()
    feature_map = Polynomial(3)
    compiled = torch.compile(feature_map, fullgraph=True, backend="aot_eager")
    for dim in (3, 4, 5, 6):
        torch.testing.assert_close(compiled(normal(2, dim)), feature_map(normal(2, dim)))


@pytest.mark.parametrize("name", ["polynomial", "taylor"])
def test_tables_outlive_no_mode(name):
    """Tables of indices are kept between calls; one made in inference mode or of fake tensors serves nobody else."""
    feature_map = resolve(name)
    with FakeTensorMode() as fake:
        faked = feature_map(fake.from_tensor(normal(2, 11)))
    with torch.inference_mode():
        y = feature_map(normal(2, 11))
    x = normal(2, 11).requires_grad_()
    feature_map(x).sum().backward()
    with FakeTensorMode() as fake:
        faked = feature_map(fake.from_tensor(normal(2, 11)))
    assert faked.shape == y.shape
    assert torch.equal(feature_map(x), y)
    assert x.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_on_the_meta_device(name):
    with torch.device("meta"):
        feature_map = make(name, 5, 2)
        assert feature_map(torch.empty(3, 4, 5)).shape == (3, 4, feature_map.num_features(5))


def kernel_samples(cls, dim: int, count: int, *, orthogonal: bool, block: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`count` independent estimates, of `block` samples each, for 12 pairs (q, k); and what they estimate."""
    feature_map = cls(dim, count * block, generator=torch.Generator().manual_seed(seed), orthogonal=orthogonal).double()
    q, k = (torch.nn.functional.normalize(normal(12, dim, seed=s), dim=-1) for s in (11, 12))
    q, k = (
        q * torch.linspace(0.4, 0.7, 12)[:, None],
        k * 0.6,
    )  # not of one length: in one dimension q = -k is a special case
    product = (feature_map(q) * feature_map(k)).unflatten(-1, (-1, count, block))
    exact = (q * k).sum(-1) if cls is Favor else -(q - k).square().sum(-1) / 2
    return product.sum((1, 3)) * count, exact.exp()


@pytest.mark.parametrize("dim", [1, 3, 16])
@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("cls", [Favor, Fourier])
def test_random_maps_are_unbiased(cls, orthogonal, dim):
    got, exact = kernel_samples(cls, dim, 10_000, orthogonal=orthogonal, block=dim)
    standard_error = got.std(1) / math.sqrt(got.shape[1])
    assert torch.all(standard_error < 0.03 * exact)
    assert torch.all((got.mean(1) - exact).abs() < 4 * standard_error)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("cls", [Favor, Fourier])
def test_error_falls_as_one_over_samples(cls, orthogonal):
    dim, widths, errors = 8, [64, 512, 4096], []
    for width in widths:
        got, exact = kernel_samples(cls, dim, 100, orthogonal=orthogonal, block=width, seed=width)
        errors.append(((got - exact[:, None]) / exact[:, None]).square().mean().item())
    slope = np.polyfit(np.log(widths), np.log(errors), 1)[0]
    assert -1.1 < slope < -0.9
    constants = np.array(errors) * widths
    assert constants.max() < 1.3 * constants.min()


@pytest.mark.parametrize("cls", [Favor, Fourier])
def test_orthogonal_directions_vary_less(cls):
    dim = 16
    orthogonal, independent = (
        kernel_samples(cls, dim, 10_000, orthogonal=choice, block=dim)[0].var(1) for choice in (True, False)
    )
    assert torch.all(orthogonal < 0.95 * independent)


def test_directions():
    dim, count = 6, 4000
    w = Favor(dim, count * dim + 2, generator=torch.Generator().manual_seed(0)).projection.double()
    blocks = w[: count * dim].unflatten(0, (count, dim))
    gram = blocks @ blocks.mT
    off = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-5  # orthogonal within blocks
    assert gram.diagonal(dim1=-2, dim2=-1).mean() == pytest.approx(dim, rel=0.02)  # of chi-distributed length
    assert gram.diagonal(dim1=-2, dim2=-1).var() == pytest.approx(2 * dim, rel=0.1)
    assert blocks.mean(0).abs().max() < 5 / math.sqrt(count)  # and no direction preferred
    assert (blocks[:-1] * blocks[1:]).sum(-1).std() == pytest.approx(math.sqrt(dim), rel=0.1)  # blocks independent


@pytest.mark.parametrize("cls", [Favor, Fourier])
def test_redraw(cls):
    feature_map, x = cls(6, 10, generator=torch.Generator().manual_seed(0)), normal(4, 6)
    twin, before, place = copy.deepcopy(feature_map), feature_map(x), feature_map.projection.data_ptr()
    feature_map.redraw(torch.Generator().manual_seed(1))
    assert feature_map.projection.data_ptr() == place
    assert (feature_map(x) - before).abs().max() > 0.1
    assert torch.equal(twin(x), before)  # a copy keeps the draw it was made with
    feature_map.redraw(torch.Generator().manual_seed(0))
    assert torch.equal(feature_map(x), before)
    torch.manual_seed(3)
    feature_map.redraw()
    third = feature_map(x)
    torch.manual_seed(3)
    assert torch.equal(cls(6, 10)(x), third)


@pytest.mark.parametrize("name", NEED_DIM)
def test_a_generator_leaves_the_global_one_alone(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    make(name, 6, 2, torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), before)


ACTIVATIONS = {
    "learned_elu": ELEMENTWISE["elu"][0],
    "t2r": lambda h: np.maximum(h, 0),
    "hedgehog": lambda h: np.concatenate([softmax(h), softmax(-h)], -1),
    "hedgehog exp": lambda h: np.exp(np.concatenate([h, -h], -1)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_heads", [1, 3, 6])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_heads_use_their_own_weights(name, num_heads, bias):
    """Six heads: query head h uses the weights of key head h // (6 / num_heads)."""
    cls, *form = name.split()
    options = {"bias": bias} | ({"form": form[0]} if form else {})
    feature_map = trained(made(cls, 5, num_heads, width=7, **options)).double()
    x = normal(2, 4, 6, 5)
    y = feature_map(x).detach()
    assert isinstance(feature_map, LearnedMap)
    weight = feature_map.weight.detach().numpy()
    offset = np.zeros((num_heads, 7)) if feature_map.bias is None else feature_map.bias.detach().numpy()
    assert (feature_map.bias is not None) == bias
    assert y.shape == (2, 4, 6, feature_map.num_features(5))
    for head in range(6):
        n = head // (6 // num_heads)
        expected = ACTIVATIONS[name](x[:, :, head].numpy() @ weight[n] + offset[n])
        np.testing.assert_allclose(y[:, :, head], expected, rtol=1e-12)


def test_before_training():
    x = normal(3, 2, 4)
    assert torch.equal(LearnedElu(4, num_heads=2)(x), Elu()(x))
    expected = np.concatenate([softmax(x.numpy()), softmax(-x.numpy())], -1)
    np.testing.assert_allclose(Hedgehog(4, num_heads=2)(x).detach(), expected, rtol=1e-12)
    weight = T2R(400, 300, generator=torch.Generator().manual_seed(0)).weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.01)  # He's variance for a ReLU


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_copied(name):
    feature_map, x = trained(made(name, 6)), normal(4, 6)
    y = feature_map(x)
    assert bool(feature_map.state_dict()) == (name in NEED_DIM)
    assert torch.equal(copy.deepcopy(feature_map)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(feature_map))(x), y)  # noqa: S301 (our own bytes)
    file = io.BytesIO()
    torch.save(feature_map.state_dict(), file)
    file.seek(0)
    other = make(name, 6, generator=torch.Generator().manual_seed(99))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), y)


def test_resolve_shares_what_has_no_state():
    for name in NAMES:
        if name not in NEED_DIM:
            assert type(resolve(name)) is FEATURE_MAPS[name]
            assert resolve(name) is resolve(name)
    feature_map = Favor(8)
    assert resolve(feature_map) is feature_map


def test_a_map_of_your_own():
    class Half(Elu):
        """Not the map whose name it would inherit."""

        def forward(self, x):
            return super().forward(x) / 2

    class Kindless(FeatureMap):
        pass

    half = Half()
    assert resolve(half) is half
    assert (half.name, Elu.name) == ("Half", "elu")
    with pytest.raises(ValueError, match=r"Kindless\.kind must be one of positive_features, .* got None"):
        resolve(Kindless())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: resolve("elv"),
            r"unknown feature map 'elv'; did you mean 'elu'\? the names are elu, relu, .*learned_elu",
        ),
        (lambda: resolve("ninety"), r"unknown feature map 'ninety'; the names are elu"),
        (lambda: resolve("favor"), r"'favor' has a draw or weights .* feature_map = linattn\.features\.Favor\(dim\)"),
        (lambda: resolve("t2r"), r"linattn\.features\.T2R\(dim\)"),
        (lambda: resolve(torch.nn.ReLU()), r"a name or a FeatureMap module, got ReLU\(\); the names are elu"),  # type: ignore[arg-type]
        (lambda: resolve(Elu), r"got <class .*Elu'>"),  # type: ignore[arg-type]
        (lambda: make("hedgehogg", 8), r"did you mean 'hedgehog'\?"),
        (
            lambda: make("favor", 8, samples=9),
            r"'favor' has no option 'samples'; its options are num_samples, orthogonal",
        ),
        (lambda: make("elu", 8, alpha=2), r"'elu' has no option 'alpha'; it has no options"),
        (lambda: make("polynomial", 8, degree=9), r"degree must be 1 to 8, got 9"),
        (lambda: make("polynomial", 8, degree=0), r"degree must be a positive integer, got 0"),
        (lambda: make("polynomial", 8, constant=-1.0), r"constant must be nonnegative and finite .* got -1\.0"),
        (lambda: make("favor", 0), r"dim must be a positive integer, got 0"),
        (lambda: make("favor", 8, num_samples=2.5), r"num_samples must be a positive integer, got 2\.5"),
        (lambda: make("t2r", 8, 0), r"num_heads must be a positive integer, got 0"),
        (lambda: make("hedgehog", 8, form="relu"), r"form must be 'softmax' or 'exp', got 'relu'"),
        (lambda: make("dpfp", 2, nu=4)(torch.ones(3, 2)), r"nu must be below twice the width: got nu=4 for width 2"),
        (lambda: Favor(8)(torch.ones(2, 9)), r"this Favor was made for width 8, got width 9; make one with Favor\(9\)"),
        (lambda: Fourier(8).num_features(9), r"this Fourier was made for width 8, got width 9"),
        (lambda: Hedgehog(8).num_features(9), r"this Hedgehog was made for width 8, got width 9"),
        (lambda: T2R(8)(torch.ones(2, 9)), r"this T2R was made for width 8, got width 9"),
        (
            lambda: T2R(8, num_heads=3)(torch.ones(2, 4, 8)),
            r"for 3 heads: .* a multiple of 3, got \(2, 4, 8\); num_heads=1",
        ),
        (lambda: T2R(8, num_heads=3)(torch.ones(8)), r"a multiple of 3, got \(8,\)"),
    ],
)
def test_errors_tell_the_way_out(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_documented_table():
    """Names, kinds, widths and scales in docs/feature-maps.md are those of the code."""
    cells = [[c.strip().strip("`") for c in line.split("|")[1:-1]] for line in DOC.read_text().splitlines()]
    rows = {row[0]: row for row in cells if len(row) == 7 and re.fullmatch(r"[a-z0-9_]+", row[0]) and row[0] != "name"}
    assert list(rows) == NAMES
    for name, (_, _, _, kind, width, scale, _) in rows.items():
        for dim in (3, 8):
            feature_map = make(name, dim)
            assert kind == feature_map.kind
            known = {"__builtins__": {}, "D": dim}
            assert eval(width, known) == feature_map.num_features(dim), name
            assert eval(scale, known) == feature_map.default_scale(dim), name
