"""One call of the operator as a value: its inputs, what the operator makes of them, and what the oracle does.

Every comparison is of the same eight tensors: the outputs, the final state (kv, z), and the gradients of
L = ⟨out, g⟩ + ⟨kv, g_kv⟩ + ⟨z, g_z⟩ by q, k, v and by the state that came in.

Axes:  B batch   T queries   S keys   H heads   G key/value heads   D key width   C features   M value width
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from helpers import assert_as_accurate
from hypothesis import assume
from hypothesis import strategies as st
from oracle import ELEMENTWISE, POSITIVE, attend, conditioning
from torch import Tensor

from linattn import State, linear_attention

Results = dict[str, Tensor]
TORCH_IMPLS = ("quadratic", "chunked", "recurrent")  # which take any dtype
IMPLS = (*TORCH_IMPLS, "native")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    batch: int = 2
    time: int = 15
    keys: int | None = None  # None: as many as queries
    heads: int = 4
    kv_heads: int = 2
    width: int = 5
    values: int = 3
    dtype: torch.dtype = torch.float64
    feature_map: str = "elu"
    impl: str = "chunked"
    causal: bool = True
    normalize: bool = True
    stateful: bool = True
    scale: float | None = None
    layout: dict[str, Any] = field(default_factory=dict)  # lengths, q_lengths, cu_seqlens, cu_seqlens_q
    seed: int = 0

    def __post_init__(self) -> None:
        # The native library sums in fp32: asked for what it does not take, it gets the nearest that it does.
        narrowed = {torch.float64: torch.float32, torch.float16: torch.bfloat16}
        if self.impl == "native" and self.dtype in narrowed:
            object.__setattr__(self, "dtype", narrowed[self.dtype])

    @property
    def num_keys(self) -> int:
        return self.time if self.keys is None else self.keys

    @property
    def sequences(self) -> int:
        return len(self.layout["cu_seqlens"]) - 1 if "cu_seqlens" in self.layout else self.batch

    @property
    def sums(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def eps(self) -> float | None:
        return 0.5 if self.normalize and self.feature_map == "identity" else None

    @property
    def options(self) -> dict[str, Any]:
        given = {"feature_map": self.feature_map, "causal": self.causal, "normalize": self.normalize, "impl": self.impl}
        return given | {"scale": self.scale, "eps": self.eps} | self.layout


def make_inputs(case: Case) -> Results:
    """q, k, v, a state (kv, z) and the cotangents g, g_kv, g_z; without a state kv and z are zeros."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    features = {"quadratic": case.width**2, "taylor": 1 + case.width + case.width**2}.get(case.feature_map, case.width)
    sums = (case.sequences, case.kv_heads, features)
    x = {
        "q": normal(case.batch, case.time, case.heads, case.width),
        "k": normal(case.batch, case.num_keys, case.kv_heads, case.width),
        "v": normal(case.batch, case.num_keys, case.kv_heads, case.values),
        "g": normal(case.batch, case.time, case.heads, case.values),
        "kv": normal(*sums, case.values, dtype=case.sums) * case.stateful,
        "z": (normal(*sums, dtype=case.sums).abs() + 0.5) * case.stateful,
        "g_kv": normal(*sums, case.values, dtype=case.sums),
        "g_z": normal(*sums, dtype=case.sums),
    }
    if case.feature_map not in ELEMENTWISE:
        assert not case.stateful, "the order of the features is the map's own: a state of it cannot be made up here"
        return {name: tensor for name, tensor in x.items() if name in ("q", "k", "v", "g")}
    return x


def run(x: Results, *, stateful: bool = True, watch: Iterable[str] = ("out", "kv", "z"), **options: Any) -> Results:
    """What the operator makes of `x`. `watch` names what the loss reads."""
    leaves = {name: x[name].detach().requires_grad_() for name in ("q", "k", "v")}
    normalize = options.get("normalize", True)
    state = None
    if stateful:
        leaves |= {"kv": x["kv"].detach().requires_grad_()}
        leaves |= {"z": x["z"].detach().requires_grad_()} if normalize else {}
        state = State(leaves["kv"], leaves.get("z"))
    out, final = linear_attention(leaves["q"], leaves["k"], leaves["v"], state=state, return_state=True, **options)
    made = {"out": out} | {name: final.tensors()[name] for name in ("kv", "z")[: 1 + normalize]}
    cotangents = {"out": x["g"], "kv": x.get("g_kv"), "z": x.get("g_z")}
    watched = [(made[name], cotangents[name]) for name in watch if name in made and cotangents[name] is not None]
    loss = [(tensor, cotangent) for tensor, cotangent in watched if tensor.requires_grad]
    grads = torch.autograd.grad([t for t, _ in loss], list(leaves.values()), [g for _, g in loss], allow_unused=True)
    pairs = zip(leaves, grads, strict=True)
    return {name: t.detach() for name, t in made.items()} | {
        f"d{name}": torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in pairs
    }


def run_outputs(call: Callable[..., Tensor], x: Results, weights: Iterable[Tensor] = ()) -> Results:
    """The outputs of `call(q, k, v)`, and the gradients of ⟨out, g⟩ by q, k, v and by a map's weights."""
    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v")]
    out = call(*leaves)
    grads = torch.autograd.grad(out, [*leaves, *weights], x["g"])
    return {"out": out.detach()} | {f"gradient {n}": grad for n, grad in enumerate(grads)}


def run_case(case: Case, x: Results | None = None, **changes: Any) -> Results:
    return run(make_inputs(case) if x is None else x, stateful=case.stateful, **(case.options | changes))


def expected(
    case: Case, x: Results, dtype: type[np.floating[Any]] = np.float64, watch: Iterable[str] = ("out", "kv", "z")
) -> Results:
    """What the oracle makes of the same numbers, computing in `dtype`."""
    arrays = {name: tensor.double().numpy().astype(dtype) for name, tensor in x.items()}
    for name, cotangent in (("out", "g"), ("kv", "g_kv"), ("z", "g_z")):
        if name not in watch or (name == "z" and not case.normalize):
            arrays[cotangent] = np.zeros_like(arrays[cotangent])
    given = {"causal": case.causal, "normalize": case.normalize, "scale": case.scale, "eps": case.eps} | case.layout
    made = {name: torch.from_numpy(array) for name, array in attend(arrays, case.feature_map, **given).items()}
    unused = {"dkv", "dz"} if not case.stateful else set()
    unused |= set() if case.normalize else {"z", "dz"}
    return {name: tensor for name, tensor in made.items() if name not in unused}


def assert_matches_oracle(got: Results, case: Case, x: Results, factor: float = 8.0, **kwargs: Any) -> None:
    """Every tensor of `got` is as accurate as the definition computed in its own precision."""
    exact, plain = expected(case, x, **kwargs), expected(case, x, np.float32, **kwargs)
    assert got.keys() == exact.keys()
    for name, tensor in got.items():
        assert_near(name, tensor, exact[name], plain[name], factor)


def assert_near(name: str, got: Tensor, exact: Tensor, plain: Tensor, factor: float) -> None:
    assert got.shape == exact.shape, f"{name}: {tuple(got.shape)} instead of {tuple(exact.shape)}"
    assert got.isfinite().all(), f"{name} is not finite"
    scale = exact.abs().max().item() if exact.numel() else 0.0
    if scale < 1e-12:  # zero by the mathematics, as dq is when one feature cancels out: only rounding may be left
        left = plain.abs().max().item() if plain.numel() else 0.0
        rounding = 1e-12 if got.dtype == torch.float64 else max(factor * left, 1e-5)
        assert not got.numel() or got.abs().max() <= rounding, f"{name}: {got.abs().max():.1e} instead of zero"
    elif got.dtype == torch.float64:
        error = (got - exact).abs().max().item()
        assert error <= 1e-12 * scale, f"{name}: error {error:.1e} on a signal of {scale:.1e}"
    else:
        # Sums in another order err a few times as much; a narrow result only rounds them, and its neighbour at that.
        assert_as_accurate(got, exact, plain.to(got.dtype), factor=factor if got.dtype == torch.float32 else 2.0)


def assert_agree(got: Results, want: Results, worsened: float = 1.0) -> None:
    """Two ways to the same numbers: equal but for the rounding of the sums (and of narrow outputs)."""
    assert got.keys() == want.keys()
    for name in got:
        assert_same(name, got[name], want[name], worsened)


def assert_same(name: str, got: Tensor, want: Tensor, worsened: float = 1.0) -> None:
    """`worsened`: how much a rounding error of the sums may grow on its way (oracle.conditioning)."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype} instead of {want.dtype}"
    if not want.numel():
        return
    scale = want.abs().max().item()
    sums = (1e-12 if got.dtype == torch.float64 else 1e-5) * worsened * max(scale, 1.0)
    narrow = 2 * torch.finfo(got.dtype).eps * scale if got.dtype.itemsize == 2 else 0.0
    error = (got.double() - want.double()).abs().max().item()
    assert error <= sums + narrow, f"{name}: error {error:.1e} on a signal of {scale:.1e}"


def worsening(case: Case, x: Results) -> float:
    """How much more rounding errors grow with a kernel that is only non-negative: small sums, sums that cancel."""
    if case.feature_map in POSITIVE or not case.normalize:
        return 1.0
    arrays = {name: x[name].double().numpy() for name in ("q", "k")}
    growth = conditioning(arrays, case.feature_map, causal=case.causal, scale=case.scale)
    assume(growth < 1e8)  # beyond it a tolerance would pass anything
    return growth


@st.composite
def any_case(draw: st.DrawFn, **fixed: Any) -> Case:
    """Any call that the laws hold for. Kernels that are only non-negative run in float64: their sums may cancel."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    dtype = draw(st.sampled_from(DTYPES))
    maps = [*POSITIVE] + ["relu", "squared_relu", "taylor"] * (dtype == torch.float64)
    feature_map = draw(st.sampled_from(maps))
    case = Case(
        batch=draw(st.integers(1, 3)),
        time=draw(st.integers(1, 40)),
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        width=draw(st.integers(1, 6)),
        values=draw(st.integers(1, 6)),
        dtype=dtype,
        feature_map=feature_map,
        impl=draw(st.sampled_from([*IMPLS, "auto"])),
        causal=draw(st.booleans()),
        normalize=draw(st.booleans()),
        stateful=feature_map in ELEMENTWISE and draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.5])),
        seed=draw(st.integers(0, 2**16)),
    )
    return replace(case, **fixed)
