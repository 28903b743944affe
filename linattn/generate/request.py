"""From what a caller asks for to where generation starts: a `Snapshot` with the prompts read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from linattn._typing import Int, Tensor
from linattn.generate.graph import is_growing, with_room
from linattn.generate.native import WEIGHTS, Plan, why_not
from linattn.generate.prompts import Prompt, padded, read_prompts
from linattn.generate.snapshot import Sampling, Snapshot
from linattn.generate.steps import Prefix, evaluated, read
from linattn.models import Model, SequenceModel
from linattn.state import Value

SEEDS = 2**64


@dataclass(frozen=True)
class Request:
    """The arguments of `stream` and `generate`, which say what they mean."""

    prompt: Prompt | None = None
    count: int = 1
    length: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop: Sequence[int] | None = None
    first_row: int = 0
    snapshot: Snapshot | None = None
    cache: bool = True
    graph: bool | str = "auto"
    impl: str = "auto"
    weights: str = "fp32"

    def sampling(self, base: Sampling, num_values: int) -> Sampling:
        """The options that were given; the others as in `base`."""
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        given["stop"] = None if self.stop is None else tuple(self.stop)  # type: ignore[assignment]
        made = replace(base, **{name: x for name, x in given.items() if x is not None})
        made.check(num_values)
        return made


def start(model: SequenceModel, request: Request) -> Snapshot:
    """Where generation begins: after the prompts, before the first value, or where a snapshot was taken."""
    if not isinstance(request.snapshot, (Snapshot, type(None))):
        found = type(request.snapshot).__name__
        raise ValueError(f"snapshot must be a Snapshot, got {found}: load one with Snapshot.load(path)")
    graph = wants_graph(model, request)
    if request.snapshot is not None:
        return _resumed(model, request, request.snapshot, graph)
    _check_count("count", request.count, 1)
    _check_count("first_row", request.first_row, 0)
    sampling = request.sampling(Sampling(), model.head.num_values)
    prompts = [] if request.prompt is None else read_prompts(request.prompt, model.head.num_values)
    length = _length(model, request.length, max(map(len, prompts), default=0), "the prompt")
    seed = _seed(request.seed)
    state, values, counts = _after_prompts(model, prompts, request, length, graph)
    last = (counts - 1).clamp_min(0).to(values.device).unsqueeze(1)
    pending = values.gather(1, last).squeeze(1) if prompts else counts.to(values.device)
    rows = request.first_row + torch.arange(len(counts))
    ended = torch.zeros_like(counts, dtype=torch.bool)
    return Snapshot(counts, counts.clone(), ended, rows, pending, values, state, seed, length, sampling)


def generating(model: Model | SequenceModel) -> SequenceModel:
    """The model, which must be one that generates."""
    if not isinstance(model, SequenceModel):
        raise ValueError(f"image and language models generate, got a {type(model).__name__}")
    return model


def wants_graph(model: SequenceModel, request: Request) -> bool:
    """Whether the step is to be a CUDA graph, if the state allows it."""
    if request.graph not in ("auto", True, False):
        raise ValueError(f"graph must be 'auto', True or False, got {request.graph!r}")
    on_gpu = model.device.type == "cuda"
    cached = request.cache and not (request.snapshot is not None and isinstance(request.snapshot.state, Prefix))
    if request.graph is True and not (on_gpu and cached):
        why = "without a cache no two steps are alike" if on_gpu else f"the model is on {str(model.device)!r}"
        raise ValueError(f"graph=True makes the step a CUDA graph, and {why}: pass graph='auto'")
    return on_gpu and cached and request.graph is not False


def wants_native(model: SequenceModel, request: Request, state: Value) -> Plan | None:
    """The plan of the native step, where it is to make the values."""
    if request.impl not in ("auto", "torch", "native"):
        raise ValueError(f"impl must be 'auto', 'torch' or 'native', got {request.impl!r}")
    if request.weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(map(repr, WEIGHTS))}, got {request.weights!r}")
    reason = "without a cache there is no state to step from" if isinstance(state, Prefix) else why_not(model)
    if request.impl == "torch":
        reason = "impl='torch' was asked for"
    if reason is None:
        return Plan(model, request.weights)
    if request.impl == "native":
        raise ValueError(f"impl='native' cannot run here: {reason}. Pass impl='auto' or impl='torch'")
    if request.weights != "fp32":
        raise ValueError(f"weights={request.weights!r} are for the native step, which cannot run here: {reason}")
    return None


def _after_prompts(
    model: SequenceModel, prompts: list[Tensor], request: Request, length: int | None, graph: bool
) -> tuple[Value, Int[Tensor, "N T"], Int[Tensor, " N"]]:
    """The state that has read all of each prompt but its last value; the prompts; and how many values each has.

    A prompt that is continued `count` times is read once.
    """
    values, counts = padded(prompts or [torch.zeros(0, dtype=torch.int64)] * request.count)
    values = values.to(model.device)
    unread = (counts - 1).clamp_min(0)
    before = values[:, : int(unread.max())]
    lengths = None if bool((unread == unread[0]).all()) else unread.to(model.device)
    if request.cache:
        room = {} if length is None else {"capacity": length, "static": graph}
        with torch.no_grad(), evaluated(model):
            state = read(model, model.empty_state(len(counts), **room), before, lengths)  # type: ignore[arg-type]
    else:
        state = Prefix(before, unread.to(model.device))
    if prompts and request.count > 1:
        copies = torch.arange(len(prompts)).repeat_interleave(request.count)
        return state.select(copies), values[copies.to(values.device)], counts[copies]
    return state, values, counts


def _resumed(model: SequenceModel, request: Request, snapshot: Snapshot, graph: bool) -> Snapshot:
    fresh = Request()
    given = [name for name in ("prompt", "count", "seed", "first_row", "cache") if _differs(request, fresh, name)]
    if given:
        raise ValueError(f"{given[0]} was given beside a snapshot, which holds its own: leave out {', '.join(given)}")
    _check_fit(model, snapshot)
    sampling = request.sampling(snapshot.sampling, model.head.num_values)
    length = snapshot.length if request.length is None else request.length
    length = _length(model, length, int(snapshot.counts.max()), "the longest row of the snapshot")
    static = graph and length is not None
    state = snapshot.state
    if static or not is_growing(state):
        state = with_room(state, length or 0, static)
    elif graph:
        state = state.clone()  # the step writes to it, and the snapshot is the caller's
    return replace(snapshot, state=state, length=length, sampling=sampling)


def _differs(request: Request, other: Request, name: str) -> bool:
    value = getattr(request, name)
    return value is not None if name == "prompt" else value != getattr(other, name)


def _check_fit(model: SequenceModel, snapshot: Snapshot) -> None:
    """Whether a state of this form, on this device, is one of this model."""
    if snapshot.pending.device != model.device:
        raise ValueError(
            f"the snapshot is on {snapshot.pending.device} and the model on {model.device}: "
            f"use snapshot.to({str(model.device)!r})"
        )
    if isinstance(snapshot.state, Prefix):
        return
    held, wanted = (
        {name: (x.dtype, tuple(x.shape[2:])) for name, x in state.tensors().items()}
        for state in (snapshot.state, model.empty_state(1))
    )
    if held != wanted:
        name = next(name for name in [*held, *wanted] if held.get(name) != wanted.get(name))
        raise ValueError(
            f"the snapshot is not of this model: its state has {name} = {held.get(name)}, "
            f"the model's {wanted.get(name)} (dtype and last axes)"
        )


def _length(model: SequenceModel, given: int | None, least: int, what: str) -> int | None:
    """The values of a complete row: those of an image, or as told; None without end."""
    image = getattr(model.config, "length", None)
    places = getattr(model.position, "max_length", None)
    most = image if image is not None else None if places is None else places + 1  # the last value is never read
    length = image if given is None else given
    if length is None:
        return None
    _check_count("length", length, 1)
    if most is not None and length > most:
        raise ValueError(f"length {length} is more than the {most} values that this model can make")
    if least > length:
        raise ValueError(f"{what} has {least} values, more than length = {length}, which counts them too")
    return length


def _seed(given: int | None) -> int:
    if given is None:
        return int(torch.randint(2**63 - 1, ()))  # follows torch.manual_seed
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < SEEDS:
        raise ValueError(f"seed must be an integer in 0 … 2⁶⁴ - 1, got {given!r}")
    return given


def _check_count(name: str, given: int, least: int) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise ValueError(f"{name} must be an integer, at least {least}, got {given!r}")
