"""The operator under torch.compile and torch.export: one opaque op, the same numbers, no compilation per length."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jaxtyping
import pytest
import torch
from cases import IMPLS, Case, assert_agree, assert_same, make_inputs, run_outputs
from layer import Layer, layer_inputs, results_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from linattn import State, linear_attention
from linattn.features import make


@pytest.fixture
def fresh_compiler(unchecked, monkeypatch):
    """No compiled code from other tests, and linattn as users have it, without the wrappers of the import hook.

    Even switched off, jaxtyping's wrappers of methods and constructors hold signatures that the compiler cannot trace.
    Functions inside functions are wrapped whenever they are made: by a decorator that here does nothing.
    """
    monkeypatch.setattr(jaxtyping, "jaxtyped", lambda typechecker: lambda function: function)
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] == "linattn"]
    owners = {item for module in modules for item in vars(module).values() if isinstance(item, type)}
    for owner in [*modules, *(cls for cls in owners if cls.__module__.split(".")[0] == "linattn")]:
        for name, item in list(vars(owner).items()):
            unwrapped = without_hook(item)
            if unwrapped is not item:
                monkeypatch.setattr(owner, name, unwrapped)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def without_hook(item: Any) -> Any:
    if isinstance(item, property):
        return property(without_hook(item.fget), item.fset) if without_hook(item.fget) is not item.fget else item
    if isinstance(item, (staticmethod, classmethod)):
        return type(item)(without_hook(item.__func__)) if without_hook(item.__func__) is not item.__func__ else item
    is_hook = getattr(item, "__code__", None) is not None and item.__code__.co_filename.endswith("_decorator.py")
    return item.__wrapped__ if is_hook and hasattr(item, "__wrapped__") else item


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager(fresh_compiler, backend):
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert_agree(results_of(compiled, layer), results_of(layer, layer))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalize", [True, False])
def test_compiled_options(fresh_compiler, impl, normalize):
    """Every implementation, grouped heads, lengths as a tensor, a state or none."""

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return linear_attention(q, k, v, lengths=lengths, normalize=normalize, feature_map="relu", impl=impl)

    x = make_inputs(Case(2, 20, dtype=torch.float32))
    lengths = torch.tensor([20, 7])
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = (run_outputs(partial(f, lengths=lengths), x) for f in (compiled, call))
    assert_agree(got, want)


@pytest.mark.parametrize("parts", ["none", "sums", "sums and low parts"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compiled_state_has_every_part(fresh_compiler, dtype, normalize, parts):
    case = Case(2, 7, dtype=dtype, normalize=normalize)
    x = make_inputs(case)
    state = State.empty(2, 2, 5, 3, normalize=normalize, dtype=dtype) if parts == "sums and low parts" else None
    if parts == "sums":
        state = State(x["kv"], x["z"] if normalize else None)

    def call(q: Tensor, k: Tensor, v: Tensor, state: State | None) -> State:
        return linear_attention(q, k, v, state=state, return_state=True, normalize=normalize)[1]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = (f(x["q"], x["k"], x["v"], state).tensors() for f in (compiled, call))
    names = ["kv", "z"][: 1 + normalize]
    low = [f"{name}_low" for name in names if dtype == torch.float32]
    assert got.keys() == want.keys() == {*names, *low}
    assert_agree({name: got[name] for name in names}, {name: want[name] for name in names})
    assert all(got[name].shape == want[name].shape for name in low)


def test_lengths_of_time_compile_once(fresh_compiler):
    counter, layer = CompileCounterWithBackend("aot_eager"), Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for time in (33, 2, 100, 257, 64, 15):
        assert_agree(results_of(compiled, layer, time), results_of(layer, layer, time))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dynamic", [True, False])
def test_exported_is_eager(fresh_compiler, dynamic):
    layer, inputs = Layer(), layer_inputs()
    time = torch.export.Dim("time", min=2, max=4096)
    shapes = {"x": {1: time}, "kv": {}, "z": {}} if dynamic else None
    program = torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=True)
    assert any("linattn" in str(node.target) for node in program.graph.nodes), "one opaque op, not its insides"
    for length in (33, 70) if dynamic else (33,):
        x = layer_inputs(length)
        for got, want in zip(program.module()(*x), layer(*x), strict=True):
            assert_same("export", got.detach(), want.detach())


@pytest.mark.parametrize(
    ("wild", "tame"),
    [
        ({"lengths": [99, -3]}, {"lengths": [20, 0]}),
        ({"cu_seqlens": [0, 9, 50]}, {"cu_seqlens": [0, 9, 20]}),
        ({"cu_seqlens": [-4, 9, 5, 20]}, {"cu_seqlens": [0, 9, 9, 20]}),
    ],
    ids=str,
)
def test_compiled_calls_clamp_what_they_cannot_check(fresh_compiler, wild, tame):
    """Values of lengths and cuts are unknown while tracing: nothing out of bounds is read, whatever they are later."""
    x = make_inputs(Case(1 if "cu_seqlens" in wild else 2, 20, dtype=torch.float32))
    tokens = [x[name] for name in ("q", "k", "v")]

    def call(*args: Tensor, **ends: Tensor) -> tuple[Tensor, Tensor]:
        out, state = linear_attention(*args, return_state=True, **ends)
        return out, state.kv

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = compiled(*tokens, **{name: torch.tensor(value) for name, value in wild.items()})
    want = call(*tokens, **tame)
    if wild.get("cu_seqlens", [0])[0] >= 0:
        assert_same("out", got[0], want[0])
        assert_same("kv", got[1], want[1])
    assert got[0].isfinite().all() and got[1].isfinite().all() and got[0].any()


@pytest.mark.parametrize("name", ["hedgehog", "favor", "taylor"])
def test_maps_over_features_compile(fresh_compiler, name):
    feature_map = make(name, 5, generator=torch.Generator().manual_seed(0))
    x = make_inputs(Case(2, 20, dtype=torch.float32))
    compiled = torch.compile(linear_attention, fullgraph=True, backend="aot_eager")
    weights = list(feature_map.parameters())
    got, want = (run_outputs(partial(f, feature_map=feature_map), x, weights) for f in (compiled, linear_attention))
    assert_agree(got, want)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a state in and out": {"state": True, "want_state": True},
    "a state out": {"want_state": True},
    "full, not normalised": {"causal": False, "normalize": False, "state": True, "want_state": True},
    "lengths": {"lengths": [5, 2], "want_state": True},
    "lengths of queries": {"lengths": [5, 2], "q_lengths": [0, 4], "causal": False},
    "float64": {"dtype": torch.float64, "state": True, "want_state": True},
    "bf16, eps": {"dtype": torch.bfloat16, "eps": 0.1, "feature_map": "relu"},
    "packed": {"cu_seqlens": [0, 2, 5], "batch": 1, "want_state": True},
}


def op_arguments(
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    state: bool = False,
    lengths: list[int] | None = None,
    q_lengths: list[int] | None = None,
    cu_seqlens: list[int] | None = None,
    feature_map: str = "elu",
    causal: bool = True,
    normalize: bool = True,
    eps: float | None = None,
    want_state: bool = False,
    impl: str = "chunked",
) -> tuple[Any, ...]:
    """In the order of the op's schema."""
    case = Case(batch, 5, dtype=dtype, normalize=normalize)
    x = make_inputs(case)
    tokens = [x[name].requires_grad_() for name in ("q", "k", "v")]
    sums: list[Tensor | None] = [x["kv"].requires_grad_(), x["z"].requires_grad_() if normalize else None]
    pair = dtype != torch.float64
    sums += [torch.zeros_like(x["kv"]) if pair else None, torch.zeros_like(x["z"]) if pair and normalize else None]
    ends = [None if end is None else torch.tensor(end) for end in (lengths, q_lengths, cu_seqlens, None)]
    options = (feature_map, causal, normalize, 1.0, eps, impl, want_state, True)
    return *tokens, *(sums if state else [None] * 4), *ends, *options


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(fresh_compiler, name, impl):
    """The schema tells the truth, and the fake kernel gives the shapes, strides and dtypes of the real one."""
    call: dict[str, Any] = CALLS[name] | ({"dtype": torch.float32} if (impl, name) == ("native", "float64") else {})
    torch.library.opcheck(torch.ops.linattn.attention.default, op_arguments(impl=impl, **call))
