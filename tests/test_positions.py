"""Positions against decimal arithmetic of 50 digits, numpy's complex numbers, and the laws they promise."""

from __future__ import annotations

import copy
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from helpers import assert_as_accurate

from linattn.nn.positions import POSITIONS, LearnedPosition, RowColumnChannel, make_position, rotary, sinusoids

OPTIONS: dict[str, dict] = {
    "learned": {"max_length": 60},
    "row_column_channel": {"rows": 4, "columns": 5, "channels": 3},
}
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
FAR = [0, 1, 2, 3071, 999_983, 9_999_991, 2**24 + 1, -5]  # the last but one is no float32


def made(name: str, width: int = 16):
    torch.manual_seed(0)
    return make_position(name, width, **OPTIONS.get(name, {}))


def tokens(rows: int, time: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, time, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def exact_angle(position: int, i: int, width: int, base: int = 10000) -> float:
    """position · base^(-2i / width), less whole turns."""
    with localcontext() as context:
        context.prec = 60
        return float(position * Decimal(base) ** (Decimal(-2 * i) / width) % (2 * PI))


def exact_sinusoids(positions: list[int], width: int) -> torch.Tensor:
    rows = [[exact_angle(p, i, width) for i in range(width // 2)] for p in positions]
    return torch.tensor([[f(a) for a in row for f in (math.sin, math.cos)] for row in rows], dtype=torch.float64)


def test_sinusoids_against_decimals():
    exact = exact_sinusoids(FAR, 32)
    got = sinusoids(torch.tensor(FAR), 32)
    assert got.dtype == torch.float32
    assert (got.double() - exact).abs().max() < 2.0**-24  # half the spacing of float32 below 1, and a little
    wide = sinusoids(torch.tensor(FAR), 32, dtype=torch.float64)
    assert (wide - exact).abs().max() < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", POSITIONS)
def test_a_step_equals_the_parallel_form(name, dtype):
    """Row b begins at start[b]; a table ends early, sines do not."""
    module = made(name).to(dtype)
    start = torch.tensor([0, 7, 40] if name in OPTIONS else [0, 4096, 9_999_990])
    x, positions = tokens(3, 15, module.value_width, dtype), start[:, None] + torch.arange(15)
    whole = module(x, positions)
    steps = torch.cat([module(x[:, t : t + 1], positions[:, t : t + 1]) for t in range(15)], 1)
    assert whole.shape == (3, 15, 16) and whole.dtype == dtype
    assert (whole - steps).abs().max() <= (4e-16 if dtype == torch.float64 else 0)
    assert name == "none" or not torch.equal(whole[0, :, -8:], whole[1, :, -8:])


@pytest.mark.parametrize("name", POSITIONS)
def test_one_row_of_positions_serves_all_rows(name):
    module = made(name)
    x = tokens(3, 15, module.value_width)
    shared, each = torch.arange(15), torch.arange(15).expand(3, 15)
    assert torch.equal(module(x, shared), module(x, each))
    assert torch.equal(module(x, shared.int()[None]), module(x, each))


def test_concatenation_keeps_the_values_and_appends_the_positions():
    module = made("sine_concat", 32)
    x, positions = tokens(2, 9, 16), torch.arange(9)
    y = module(x, positions)
    assert torch.equal(y[..., :16], x)
    assert (y[0, :, 16:].double() - exact_sinusoids(list(range(9)), 16)).abs().max() < 2.0**-24


def test_addition_adds_the_sinusoids():
    x, positions = tokens(2, 9, 16, torch.float64), torch.arange(9)
    added = made("sine_add")(x, positions) - x
    assert (added - exact_sinusoids(list(range(9)), 16)).abs().max() < 1e-14


@pytest.mark.parametrize("name", ["sine_add", "sine_concat"])
def test_bfloat16_rounds_the_position_only_at_the_end(name):
    """A position of its own in bfloat16 would be off by 10⁵ at 10⁷."""
    module = made(name, 32).bfloat16()
    x = torch.zeros(1, len(FAR), module.value_width, dtype=torch.bfloat16)
    width = 32 if name == "sine_add" else 16
    got = module(x, torch.tensor(FAR))[0, :, -width:]
    assert (got.double() - exact_sinusoids(FAR, width)).abs().max() <= 2.0**-9


@pytest.mark.parametrize("name", ["none", "sine_add", "sine_concat"])
def test_no_buffer_grows_with_the_positions(name):
    module = made(name)
    module(torch.zeros(1, 1, module.value_width), torch.tensor([10**7]))
    assert not list(module.parameters()) and not list(module.buffers())


@pytest.mark.parametrize("channels", [1, 3])
def test_row_column_channel_against_loops(channels):
    torch.manual_seed(0)
    module = RowColumnChannel(8, rows=4, columns=5, channels=channels)
    x = tokens(1, 20 * channels, 8)
    row, column, channel = (t.weight.detach() for t in (module.row, module.column, module.channel))
    raster = [(r, c, h) for r in range(4) for c in range(5) for h in range(channels)]
    expected = torch.stack([row[r] + column[c] + channel[h] for r, c, h in raster])
    assert torch.equal(module(x, torch.arange(20 * channels)), x + expected)


def test_places_of_an_image_are_heard_from_the_first_step_on():
    """Value embeddings are N(0, 1), and tables of 0.02 took hundreds of steps to grow."""
    torch.manual_seed(0)
    module = RowColumnChannel(256, rows=28, columns=28, channels=3)
    places = module(torch.zeros(1, 28 * 28 * 3, 256), torch.arange(28 * 28 * 3))
    assert 0.7 < float(places.detach().std()) < 1.0  # √3 · 0.5


def test_learned_positions_look_up_their_own_row():
    module = made("learned")
    assert isinstance(module, LearnedPosition)
    x, positions = torch.zeros(2, 3, 16), torch.tensor([[0, 5, 59], [7, 7, 1]])
    y = module(x, positions)
    assert torch.equal(y, module.table.weight[positions])
    assert 0.015 < module.table.weight.std() < 0.025  # 960 numbers; values are N(0, 1), and first of all heard
    y.sum().backward()
    uses = torch.bincount(positions.flatten(), minlength=60)
    assert module.table.weight.grad is not None
    assert torch.equal(module.table.weight.grad, uses[:, None].expand(60, 16).float())


@pytest.mark.parametrize("width", [None, 4])
def test_rotary_depends_on_the_distance_only(width):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 2, 8, dtype=torch.float64, generator=generator)
    for m, n in ((0, 0), (3, 0), (0, 17), (100, 1)):
        products = []
        for shift in (0, 1, 33, 1000):
            turned_q = rotary(q, torch.tensor([m + shift]), width=width)
            turned_k = rotary(k, torch.tensor([n + shift]), width=width)
            products.append((turned_q * turned_k).sum(-1))
        assert (torch.stack(products) - products[0]).abs().max() < 1e-12
        assert m == n or (products[0] - (q * k).sum(-1)).abs().min() > 1e-3


@pytest.mark.parametrize(("base", "width"), [(1e4, None), (5e5, 6), (100.0, 2)])
def test_rotary_against_complex_numbers(base, width):
    x = tokens(2, len(FAR), 3 * 10, torch.float64).unflatten(-1, (3, 10))
    R = width or 10
    a = np.array([[exact_angle(p, i, R, int(base)) for i in range(R // 2)] for p in FAR])[:, None]
    pairs = (x[..., : R // 2].numpy() + 1j * x[..., R // 2 : R].numpy()) * np.exp(1j * a)
    expected = torch.from_numpy(np.concatenate([pairs.real, pairs.imag, x[..., R:].numpy()], -1))
    got = rotary(x, torch.tensor(FAR), base=base, width=width)
    assert (got - expected).abs().max() < 1e-7
    for dtype in (torch.float32, torch.bfloat16):
        narrow = rotary(x.to(dtype), torch.tensor(FAR), base=base, width=width)
        assert_as_accurate(narrow, expected, expected.to(dtype), factor=4)


def test_rotary_in_bfloat16_rounds_once():
    x = tokens(2, len(FAR), 24, torch.bfloat16).unflatten(-1, (3, 8))
    exact = rotary(x.double(), torch.tensor(FAR))
    error = (rotary(x, torch.tensor(FAR)).double() - exact).abs()
    assert (error <= 1.001 * 2.0**-9 * 2 * exact.abs() + 1e-6).all()  # half the spacing of 8 bits


def test_a_rotary_step_equals_the_parallel_form():
    x, positions = tokens(2, 15, 24).unflatten(-1, (3, 8)), torch.tensor([[0], [9_999_990]]) + torch.arange(15)
    for dtype in (torch.float32, torch.bfloat16):
        whole = rotary(x.to(dtype), positions)
        steps = [rotary(x[:, t : t + 1].to(dtype), positions[:, t : t + 1]) for t in range(15)]
        assert whole.dtype == dtype and torch.equal(whole, torch.cat(steps, 1))
        assert not torch.equal(whole[:, 1:], x[:, 1:].to(dtype))
    assert torch.equal(rotary(x, torch.zeros(15, dtype=torch.int64)), x)


def test_rotary_gradients():
    x = tokens(1, 3, 12, torch.float64).unflatten(-1, (2, 6)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotary(x, torch.tensor([0, 5, 10**6]), width=4), (x,))


@pytest.mark.parametrize("name", POSITIONS)
def test_compiles_and_copies(name, unchecked):
    torch.compiler.reset()
    module = made(name)
    x, positions = tokens(2, 5, module.value_width), torch.arange(3, 8)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, positions), module(x, positions))
    assert torch.equal(copy.deepcopy(module)(x, positions), module(x, positions))


@pytest.mark.parametrize(
    ("name", "positions", "message"),
    [
        ("learned", torch.tensor([0, 1, 60]), "'learned' must lie in 0 … 59, got 60: make it with a max_length"),
        ("learned", torch.tensor([0, -1, 2]), "0 … 59, got -1"),
        ("row_column_channel", torch.tensor([0, 1, 60]), "0 … 59, got 60: it is made for images of 4 rows, 5 columns"),
        ("sine_add", torch.tensor([0.0, 1.0, 2.0]), "must be integers, got torch.float32"),
        ("sine_concat", torch.arange(4), r"\(3,\) or \(B, T\) = \(2, 3\).*got \(4,\)"),
        ("none", torch.zeros(3, 3, dtype=torch.int64), r"got \(3, 3\)"),
    ],
)
def test_wrong_positions_are_named(name, positions, message, unchecked):
    module = made(name)
    with pytest.raises(ValueError, match=message):
        module(torch.zeros(2, 3, module.value_width), positions)


@pytest.mark.parametrize(
    ("name", "width", "options", "message"),
    [
        (
            "sin",
            8,
            {},
            "unknown position 'sin'; the names are none, sine_concat, sine_add, learned, row_column_channel",
        ),
        ("learned", 8, {}, "needs max_length="),
        ("row_column_channel", 8, {"channels": 3}, "needs rows=, columns=; its options are rows, columns, channels"),
        ("none", 8, {"max_length": 3}, "'none' has no option 'max_length'; it has no options"),
        ("sine_add", 8, {"max_length": 3}, "its options are base"),
        ("sine_add", 7, {}, "width must be even.*got 7"),
        ("sine_concat", 6, {}, "multiple of 4, got 6"),
        ("sine_concat", 8, {"base": 0.5}, "base must be more than 1, got 0.5"),
        ("learned", 8, {"max_length": 0}, "max_length must be a positive integer, got 0"),
    ],
)
def test_wrong_options_are_named(name, width, options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        make_position(name, width, **options)


def test_wrong_widths_are_named(unchecked):
    with pytest.raises(ValueError, match="needs value embeddings of width 8, got"):
        made("sine_concat")(torch.zeros(1, 2, 16), torch.arange(2))
    x = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ValueError, match="width=10 is more than the heads have"):
        rotary(x, torch.arange(2), width=10)
    with pytest.raises(ValueError, match=r"the rotated width must be even.*got 3"):
        rotary(x, torch.arange(2), width=3)
