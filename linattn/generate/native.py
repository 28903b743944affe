"""A model's step as one call of the native library: weights packed once, states in place, sampling included.

    slice = step.slice(state, pending, uniforms, left)        slice.run(): S tokens of every row, in one call

`Plan` walks a model and writes down its parts as plain structures (csrc/model_step.h) that point to packed weights;
what they cannot express has a reason, and torch does it. Weights are fp32, or narrower to be read faster: bf16, or int8
with a scale for each output. All sums stay fp32. The state is torch's own and holds the same sums (equation 12), so
prompts are read by torch, and a snapshot goes on wherever it is loaded.

Axes:  N rows   S steps   P panels of 64 outputs   I inputs of a product   O outputs
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from linattn._typing import Float, Int, Tensor
from linattn.generate.snapshot import Sampling
from linattn.models import ImageModel, LanguageModel, SequenceModel, SpeechModel
from linattn.models.speech import SpeechState
from linattn.nn.attention import Attention
from linattn.nn.checks import check_range
from linattn.nn.heads import Categorical, CTCHead, MixtureOfLogistics, TokenHead
from linattn.nn.positions import (
    LearnedPosition,
    NoPosition,
    Position,
    RowColumnChannel,
    SinusoidalAdd,
    SinusoidalConcat,
)
from linattn.nn.short_conv import ShortConv
from linattn.nn.transformer import Block, FeedForward, Stack, StackState
from linattn.ops import cpu
from linattn.ops.attention import is_fused
from linattn.ops.autograd import autocast_is_on
from linattn.ops.parts import WEIGHTS, BlockPart, ModelPart, NormPart, ProductPart, RunPart, scales
from linattn.state import State

PANEL = 64  # outputs that lie side by side for each input: csrc/model_step.h
SHARE = 200_000  # products (multiplications) of a step that are worth a thread
ALIGNED = 64  # bytes

KINDS = {"fp32": 0, "bf16": 1, "int8": 2}  # these and the next ones in the order of csrc/model_step.h
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "swiglu": 3}
ROTARY = {"none": 0, "before": 1, "after": 2}
POSITIONS: dict[type, int] = {
    NoPosition: 0,
    SinusoidalConcat: 1,
    SinusoidalAdd: 2,
    LearnedPosition: 3,
    RowColumnChannel: 4,
}
HEADS: dict[type, int] = {CTCHead: 1, Categorical: 2, TokenHead: 2, MixtureOfLogistics: 3}


def why_not(model: SequenceModel | SpeechModel) -> str | None:
    """Why the native step cannot run this model here; None: it can."""
    can_run, reason = cpu.status()
    if not can_run:
        return reason
    return next(_obstacles(model), None)


class Plan:
    """A model's weights as the native step reads them: packed copies, so later changes of the model do not reach it."""

    def __init__(self, model: SequenceModel | SpeechModel, weights: str = "fp32"):
        if weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(map(repr, WEIGHTS))}, got {weights!r}")
        reason = why_not(model)
        if reason is not None:
            raise ValueError(f"the native step cannot run this model: {reason}")
        self.weights, self.values = weights, 0
        self.frame_width = model.subsample.width if isinstance(model, SpeechModel) else 0
        self.num_params = model.head.linear.out_features
        self._position = model.position
        self._shapes = {name: (x.dtype, tuple(x.shape[1:])) for name, x in _stack_state(model).tensors().items()}
        products = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self.multiplications = sum(linear.out_features * linear.in_features for linear in products)
        self._arena = _Arena(sum(_panels(p.out_features) * PANEL * p.in_features + ALIGNED for p in products) * 8)
        self._held: list[object] = []
        with torch.no_grad():
            self._blocks = (BlockPart * len(model.stack.blocks))(*(self._block(b) for b in _blocks(model.stack)))
            self._model = self._whole(model)
        self._run = cpu.library().linattn_model_run

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights: what a step must read."""
        return self._arena.used

    def threads(self, rows: int) -> int:
        """As many as torch has, but no more than the work is worth."""
        return max(1, min(torch.get_num_threads(), self.multiplications * rows // SHARE))

    def check_state(self, state: StackState) -> None:
        """Whether it is a state of this model, as the library reads it."""
        tensors = state.tensors()
        found = {name: (x.dtype, tuple(x.shape[1:])) for name, x in tensors.items()}
        rows = {x.shape[0] for x in tensors.values()}
        in_place = all(x.device.type == "cpu" and x.is_contiguous() for x in tensors.values())
        if found != self._shapes or len(rows) != 1 or not in_place:
            raise ValueError(
                f"the state is not one that this plan's model can write to (see `owned`): it has {found}, "
                f"expected {self._shapes}, contiguous and on the CPU"
            )

    def check_places(self, seen: Tensor, steps: int) -> None:
        """Whether the next tokens' places are ones that the model has."""
        if seen.numel() and isinstance(self._position, (LearnedPosition, RowColumnChannel)):
            self._position(torch.zeros(1, 1, self._position.value_width), seen.max()[None] + steps - 1)

    def call(self, bound: Bound, run: ctypes.Structure) -> None:
        """One call on a state, in place. All that `run` points to has been checked."""
        run.seen, run.num_seen = ctypes.cast(bound.seen, ctypes.c_void_p), len(bound.seen)
        if self._run(ctypes.byref(bound.model), ctypes.byref(run), self.threads(run.rows)) != 0:
            raise MemoryError("no memory for the native step")

    def bind(self, state: StackState) -> Bound:
        """The plan with the addresses of a state, which is checked, and kept alive."""
        self.check_state(state)
        blocks = type(self._blocks).from_buffer_copy(self._blocks)
        for part, block in zip(blocks, state.blocks, strict=True):
            sums, weights = block.own.memory, block.own.weights
            assert isinstance(sums, State)
            z, z_low = (sums.z, sums.z_low) if weights is None else (weights.kv, weights.kv_low)
            part.kv, part.kv_low, part.z, part.z_low = map(_address, (sums.kv, sums.kv_low, z, z_low))
            part.recent = _address(block.conv)
        model = ModelPart.from_buffer_copy(self._model)
        model.blocks = ctypes.cast(blocks, ctypes.c_void_p)
        seen = [state.seen, *(block.own.seen for block in state.blocks if block.own.seen is not None)]
        addresses = (ctypes.c_void_p * len(seen))(*map(_address, seen))
        return Bound(state, state.batch, model, addresses, (blocks, list(state.tensors().values())))

    # --- from modules to parts ----------------------------------------------------------------------------------------

    def _whole(self, model: SequenceModel | SpeechModel) -> ctypes.Structure:
        position = model.position
        made = ModelPart(
            blocks=ctypes.cast(self._blocks, ctypes.c_void_p),
            num_blocks=len(self._blocks),
            width=model.config.layer.width,
            embedded=position.value_width,
            norm=self._norm(model.stack.norm),
            position=POSITIONS[type(position)],
            head_kind=HEADS[type(model.head)],
            columns=1,
            channels=1,
        )
        if isinstance(model, SpeechModel):
            made.enter = self._product([model.enter])
        else:
            made.embedding = self._keep(model.embedding.weight)
        self.values = made.values = getattr(model.head, "num_values", self.num_params)
        made.mixtures = getattr(model.head, "mixtures", 0)
        made.head = self._head(model)
        self._place(made, position)
        layer = model.config.layer
        if layer.rotary != "none":
            made.rotary_angles = self._keep(_angles(layer.key_width, 10000.0))
        return made

    def _place(self, made, position: Position) -> None:
        if isinstance(position, (SinusoidalConcat, SinusoidalAdd)):
            added = 0 if isinstance(position, SinusoidalAdd) else position.value_width
            made.angles = self._keep(_angles(position.width - added, position.base))
        if isinstance(position, LearnedPosition):
            made.tables[0], made.places = self._keep(position.table.weight), position.max_length
        if isinstance(position, RowColumnChannel):
            tables = (position.row, position.column, position.channel)
            for i, table in enumerate(tables):
                made.tables[i] = self._keep(table.weight)
            made.places = position.rows * position.columns * position.channels
            made.columns, made.channels = position.columns, position.channels

    def _block(self, block: Block) -> ctypes.Structure:
        layer, attention, ff = block.layer, block.attention, block.ff
        own = attention.feature_map.default_scale(layer.key_width) if layer.scale is None else float(layer.scale)
        made = BlockPart(
            norm=(NormPart * 2)(*(self._norm(norm) for norm in block.norms[:2])),
            qkv=self._product([attention.query, attention.key, attention.value]),
            out=self._product([attention.out]),
            enter=self._product([ff.enter], ff.activation),
            leave=self._product([ff.leave]),
            heads=layer.num_heads,
            kv_heads=layer.kv_heads,
            key_width=layer.key_width,
            value_width=layer.values,
            map=cpu.MAPS[attention.feature_map.name],
            rotary=ROTARY[layer.rotary],
            norm_first=int(layer.norm_first),
            root_scale=own**0.5,
            eps=0.0 if layer.eps is None else layer.eps,
        )
        if layer.conv:
            conv = block.conv.conv
            assert isinstance(conv, nn.Conv1d) and conv.bias is not None
            made.conv_norm, made.taps = self._norm(block.norms[-1]), layer.conv
            made.conv, made.conv_bias = self._keep(conv.weight[:, 0].T), self._keep(conv.bias)
        return made

    def _norm(self, norm: nn.Module) -> ctypes.Structure:
        assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        kept = None if bias is None else self._keep(bias)
        return NormPart(weight=self._keep(norm.weight), bias=kept, kind=int(isinstance(norm, nn.RMSNorm)), eps=eps)

    def _head(self, model: SequenceModel | SpeechModel) -> ctypes.Structure:
        head = model.head
        weight = head.weight if isinstance(head, TokenHead) else head.linear.weight
        return self._packed(weight, head.linear.bias)

    def _product(self, linears: list[nn.Linear], activation: str = "none") -> ctypes.Structure:
        """Linear layers side by side, that read the same."""
        biases = tuple(linear.bias for linear in linears if linear.bias is not None)
        bias = torch.cat(biases) if biases else None
        return self._packed(torch.cat(tuple(linear.weight for linear in linears)), bias, activation)

    def _packed(self, weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None, activation: str = "none"):
        gates = 2 if activation == "swiglu" else 1
        outputs, inputs = weight.shape[0] // gates, weight.shape[1]
        scale = None
        if self.weights == "int8":
            scale = scales(weight)
            weight = (weight / scale[:, None]).round()
        return ProductPart(
            weight=self._arena.put(_in_panels(weight, gates).transpose(1, 2), WEIGHTS[self.weights]),
            scale=None if scale is None else self._arena.put(_in_panels(scale, gates), torch.float32),
            bias=None if bias is None else self._arena.put(_in_panels(bias, gates), torch.float32),
            inputs=inputs,
            outputs=outputs,
            kind=KINDS[self.weights],
            activation=ACTIVATIONS[activation],
        )

    def _keep(self, x: Tensor) -> int:
        """The address of a copy that lives as long as the plan."""
        self._held.append(kept := x.detach().clone(memory_format=torch.contiguous_format))
        return kept.data_ptr()


@dataclass(frozen=True, eq=False)
class Bound:
    """A plan on its state: structures with the addresses of tensors, and those tensors, which therefore stay."""

    state: StackState
    rows: int
    model: ctypes.Structure
    seen: ctypes.Array
    held: object


class NativeStep:
    """Steps of one plan. They write to the state that they are given: whoever needs the old one passes it `owned`."""

    def __init__(self, plan: Plan, sampling: Sampling):
        self.plan, self.sampling = plan, sampling
        self._bound: Bound | None = None

    def slice(
        self,
        state: StackState,
        pending: Int[Tensor, " N"],
        uniforms: Float[Tensor, "S N"],
        left: Int[Tensor, " N"],
    ) -> Slice:
        """The next S tokens of each row, or as many as it has `left`: checked and laid out, to be run."""
        plan, sampling, rows = self.plan, self.sampling, len(pending)
        bound = self._bound
        if bound is None or bound.state is not state:
            self._bound = bound = plan.bind(state)
        steps = len(uniforms)
        if bound.rows != rows or tuple(left.shape) != (rows,) or tuple(uniforms.shape) != (steps, rows):
            raise ValueError(
                f"a slice needs one state, pending token and count for each row, and uniforms (steps, rows); got "
                f"{bound.rows} states, {rows} tokens, {tuple(left.shape)} counts, {tuple(uniforms.shape)} uniforms"
            )
        check_range("pending tokens", pending, 0, plan.values - 1, "they are values of the model")
        sampling.check(plan.values)
        live = left > 0
        plan.check_places(state.seen[live], int(left.clamp_max(steps).max()) if rows else 0)
        made = Slice(
            plan,
            bound,
            pending.to(torch.int64, copy=True).contiguous(),
            left.to(torch.int64, copy=True).contiguous(),
            uniforms.to(torch.float64).contiguous(),
            torch.full((steps, rows), -1, dtype=torch.int64),
            torch.tensor(sampling.stop, dtype=torch.int64),
        )
        made.part.temperature = sampling.temperature
        made.part.top_k, made.part.top_p = sampling.top_k or 0, sampling.top_p or 1.0
        return made


@dataclass(eq=False)
class Slice:
    """Some steps, before and after they are run. `done` of them have happened whole, and `made` holds their tokens."""

    plan: Plan
    bound: Bound
    pending: Int[Tensor, " N"]
    left: Int[Tensor, " N"]
    uniforms: Float[Tensor, "S N"]
    tokens: Int[Tensor, "S N"]
    stop: Int[Tensor, " stops"]

    def __post_init__(self) -> None:
        steps, rows = self.tokens.shape
        self.part = RunPart(rows=rows, steps=steps, num_stop=len(self.stop), temperature=1.0, top_p=1.0)
        for name, x in {"pending": self.pending, "left": self.left, "stop": self.stop, "made": self.tokens}.items():
            setattr(self.part, name, x.data_ptr())
        self.part.uniforms = self.uniforms.data_ptr()

    def run(self) -> None:
        self.plan.call(self.bound, self.part)

    @property
    def state(self) -> StackState:
        return self.bound.state

    @property
    def done(self) -> int:
        return self.part.done

    @property
    def made(self) -> Int[Tensor, "S N"]:
        """The tokens; -1 where a row has ended."""
        return self.tokens[: self.done]

    @property
    def failure(self) -> str | None:
        """Why the steps ended early, if it was not because all rows had."""
        if not self.part.not_finite:
            return None
        bad, all_of_them = self.part.not_finite, self.plan.num_params * len(self.pending)
        return f"cannot sample: {bad} of {all_of_them} parameters of the distribution are not finite"


@torch.no_grad()
def params_after(
    plan: Plan, state: StackState, inputs: Int[Tensor, " N"] | Float[Tensor, "N F"]
) -> tuple[Float[Tensor, "N O"], StackState]:
    """One token of each row, or one frame, without drawing: what the head says, and the state after it.

    As `model(inputs[:, None], state)`, but that the state is new memory always.
    """
    rows = len(inputs)
    frames = plan.frame_width > 0
    fits = tuple(inputs.shape) == ((rows, plan.frame_width) if frames else (rows,)) and state.batch == rows
    if not fits or inputs.dtype.is_floating_point != frames:
        wanted = f"float frames ({state.batch}, {plan.frame_width})" if frames else f"integers ({state.batch},)"
        raise ValueError(
            f"the step reads {wanted}, one for each row of the state, got {inputs.dtype} {tuple(inputs.shape)}"
        )
    state, params = owned(state), torch.empty(rows, plan.num_params)
    bound = plan.bind(state)
    plan.check_places(state.seen, 1)
    left = torch.ones(rows, dtype=torch.int64)
    run = RunPart(rows=rows, steps=1, left=left.data_ptr(), params=params.data_ptr())
    if frames:
        inputs = inputs.to(torch.float32).contiguous()
        run.frames = inputs.data_ptr()
    else:
        check_range("tokens", inputs, 0, plan.values - 1, "they are values of the model")
        inputs = inputs.to(torch.int64, copy=True).contiguous()
        run.pending = inputs.data_ptr()
    plan.call(bound, run)
    return params, state


class SpeechStep:
    """A recogniser's frames as they come, a few at a time: log_probs, state = step(frames, state), as the model's own.

    Subsampling is torch's; from there on each frame is one native call. The state is given away, as with donate=True.
    """

    def __init__(self, model: SpeechModel):
        self.plan, self.model = Plan(model), model
        self._bound: Bound | None = None

    @torch.no_grad()
    def __call__(
        self, frames: Float[Tensor, "1 T F"], state: SpeechState | StackState
    ) -> tuple[Float[Tensor, "1 U P"], SpeechState | StackState]:
        stack = state.stack if isinstance(state, SpeechState) else state
        assert isinstance(stack, StackState) and len(frames) == stack.batch == 1
        bound = self._bound
        if bound is None or bound.state is not stack:
            self._bound = bound = self.plan.bind(owned(stack))
        pending = state.pending if isinstance(state, SpeechState) else ()
        x, pending = self.model.subsample(frames.to(torch.float32), pending)
        log_probs = self._each(bound, x[0].contiguous())[None]
        if not isinstance(state, SpeechState):
            return log_probs, bound.state
        assert pending is not None
        return log_probs, SpeechState(pending, bound.state, state.seen + frames.shape[1])

    def _each(self, bound: Bound, frames: Float[Tensor, "U W"]) -> Float[Tensor, "U P"]:
        made = torch.empty(len(frames), self.plan.num_params)
        if len(frames):
            self.plan.check_places(bound.state.seen, len(frames))
        for frame, params in zip(frames, made, strict=True):
            left = torch.ones(1, dtype=torch.int64)
            run = RunPart(rows=1, steps=1, left=left.data_ptr(), params=params.data_ptr(), frames=frame.data_ptr())
            self.plan.call(bound, run)
        return made


def owned(state: StackState) -> StackState:
    """A copy that a step may write to."""
    return state.map(lambda x: x.clone(memory_format=torch.contiguous_format))


class _Arena:
    """One block of memory for all weights, on large pages where the system has them: 25 MB are 6,000 small ones."""

    def __init__(self, nbytes: int):
        self._memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE))  # untouched pages cost nothing
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.used = 0

    def put(self, x: Tensor, dtype: torch.dtype) -> int:
        """The address of a contiguous copy in that dtype."""
        size = x.numel() * dtype.itemsize
        place = self._bytes[self.used : self.used + size].view(dtype).view(x.shape)
        place.copy_(x)
        self.used += -(-size // ALIGNED) * ALIGNED
        return place.data_ptr()


def _stack_state(model: SequenceModel | SpeechModel) -> StackState:
    """One row's state before the first token, of the layers: what subsampling remembers is beside it."""
    state = model.empty_state(1)
    stack = state.stack if isinstance(state, SpeechState) else state
    assert isinstance(stack, StackState)
    return stack


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _panels(outputs: int) -> int:
    return -(-outputs // PANEL)


def _in_panels(x: Float[Tensor, "O *rest"], gates: int) -> Float[Tensor, "P panel *rest"]:
    """Outputs in panels, filled up with zeros; gates and values take turns."""
    halves = x.unflatten(0, (gates, -1))
    more = _panels(halves.shape[1]) * PANEL - halves.shape[1]
    padded = F.pad(halves, (*(0, 0) * (x.dim() - 1), 0, more))
    return padded.unflatten(1, (-1, PANEL)).transpose(0, 1).flatten(0, 1)


def _angles(width: int, base: float) -> Float[Tensor, " pairs"]:
    """θ_i in float64, as nn/positions.py takes them."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def _blocks(stack: Stack) -> Iterable[Block]:
    for block in stack.blocks:
        assert isinstance(block, Block)
        yield block


# --- what stands in the way -------------------------------------------------------------------------------------------


def _obstacles(model: SequenceModel | SpeechModel) -> Iterator[str]:
    if type(model) not in (ImageModel, LanguageModel, SpeechModel):
        yield f"a {type(model).__name__} is not one of linattn's own models"
        return
    if next(model.parameters()).device.type != "cpu":
        yield f"the model is on {next(model.parameters()).device}"
    if autocast_is_on("cpu"):
        yield "autocast is on"
    wrong = {str(p.dtype) for p in model.parameters()} - {"torch.float32"}
    if wrong:
        yield f"its weights are {', '.join(sorted(wrong))}, not torch.float32"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"{name or 'the model'} has forward hooks"
    known = (
        nn.Linear,
        nn.Embedding,
        nn.LayerNorm,
        nn.RMSNorm,
        nn.Dropout,
        nn.ModuleList,
        Block,
        Attention,
        FeedForward,
        ShortConv,
        nn.Conv1d,
    )
    yield from _strangers(model.stack, (*known, Stack))
    if isinstance(model, SpeechModel):
        yield from _strangers(model.enter, known)
    for part, kinds in ((model.position, POSITIONS), (model.head, HEADS)):
        if type(part) not in kinds:
            yield f"it knows no {type(part).__name__}"
    yield from _strangers(model.head, (*known, *HEADS))
    yield from _strangers(model.position, (*known, *POSITIONS))
    for block in _blocks(model.stack):
        yield from _obstacles_in(block)


def _strangers(module: nn.Module, known: tuple[type, ...]) -> Iterator[str]:
    """Modules that may compute anything: adapters, quantised layers, parametrisations."""
    for part in module.modules():
        if type(part) not in known and not hasattr(part, "num_features"):  # feature maps are asked by name, below
            yield f"it knows no {type(part).__name__}"


def _obstacles_in(block: Block) -> Iterator[str]:
    layer = block.layer
    if layer.attention != "linear" or block.cross is not None or not layer.causal:
        yield "it runs causal linear self-attention only"
    elif not is_fused(block.attention.feature_map) or block.attention.feature_map.name not in cpu.MAPS:
        yield f"the feature map {layer.feature_map!r} is not elementwise; these are: {', '.join(cpu.MAPS)}"
    if any(getattr(norm, "weight", None) is None for norm in block.norms):
        yield "a norm has no weight"
