"""What a layer remembers, as a value.

A linear layer remembers two sums over the keys it has seen (equation 3 of docs/mathematics.md):

    kv = Σ_j φ(k_j) v_jᵀ        z = Σ_j φ(k_j)

Token by token, a plain fp32 sum drifts (1.4% after 10⁶ equal terms) and stalls beyond 10⁷. So each sum is a pair: the
sum itself and `..._low`, what rounding took from it (equation 12). True sum = kv + kv_low.

Axes:  B batch rows   H key/value heads   C features   M value width
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from typing_extensions import dataclass_transform

from linattn._typing import Tensor

ValueT = TypeVar("ValueT", bound="Value")
KINDS: dict[str, type[Value]] = {}


class Value:
    """A dataclass of tensors (or None, or further values) whose tensors all have the batch as first axis.

    Every operation returns a new value that shares no memory with the old one; nothing is written in place.
    Subclasses are `@value` dataclasses. Registered as pytrees, they pass through torch.compile, export and vmap.
    """

    def map(self: ValueT, function: Callable[[Tensor], Tensor]) -> ValueT:
        """A new value with `function` applied to every tensor, also those in nested values."""
        return _rebuild(type(self), [_map_item(item, function) for item in _items(self)])

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its dotted name: the form in which a value is saved."""
        return dict(_walk(self, ""))

    def select(self: ValueT, rows: int | slice | Sequence[int] | Tensor) -> ValueT:
        """The given batch rows, copied: an int (kept as a batch of one), a slice, a list, an index or a mask."""
        if isinstance(rows, int):
            rows = [rows]
        return self.map(lambda x: x[_row_index(rows, x)].clone())

    @classmethod
    def cat(cls: type[ValueT], values: Sequence[ValueT]) -> ValueT:
        """Join along the batch. All must have the same fields, shapes (but the batch) and dtypes."""
        if not values:
            raise ValueError(f"{cls.__name__}.cat needs at least one value, got an empty list")
        parts = [value.tensors() for value in values]
        for part in parts[1:]:
            _check_same_form(cls.__name__, parts[0], part)
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return _replace_tensors(values[0], joined)

    def clone(self: ValueT) -> ValueT:
        return self.map(torch.clone)

    fork = clone

    def detach(self: ValueT) -> ValueT:
        """A copy through which no gradient flows: truncated back-propagation through time."""
        return self.map(lambda x: x.detach().clone())

    def to(self: ValueT, device: str | torch.device) -> ValueT:
        return self.map(lambda x: x.to(device, copy=True))

    def consume(self) -> None:
        """Give the tensors away: whoever uses this value again is told so."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if field.name in self.__dict__:  # not __dict__.pop, which torch 2.11 cannot compile
                delattr(self, field.name)

    def __getattr__(self, name: str) -> Any:
        names = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if name in names and name not in self.__dict__:
            raise ValueError(
                "this state was donated (donate=True, or to a Step) and is gone: use the state that call returned, "
                "or pass state.clone() where the old one is still needed"
            )
        raise AttributeError(f"'{type(self).__name__}' has no attribute {name!r}")

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    @property
    def batch(self) -> int:
        return next(iter(self.tensors().values())).shape[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        from safetensors.torch import save

        form = json.dumps(_form(self))
        tensors = {name: x.detach().contiguous() for name, x in self.tensors().items()}
        write_atomically(path, save(tensors, metadata={"linattn_value": form}))

    @classmethod
    def load(cls: type[ValueT], path: str | os.PathLike[str], device: str | torch.device = "cpu") -> ValueT:
        """Read what `save` wrote. A file of another kind of value raises."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
                form = json.loads((file.metadata() or {}).get("linattn_value", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error})") from error
        if form is None:
            raise ValueError(f"{path} holds no state (no 'linattn_value' entry): was it written by `save`?")
        value = _from_form(form, tensors, "")
        if not isinstance(value, cls):
            raise ValueError(f"{path} holds a {type(value).__name__}, expected a {cls.__name__}")
        return value


@dataclass_transform(eq_default=False)
def value(cls: type[ValueT]) -> type[ValueT]:
    """Make a class a dataclass value: registered by name (for load) and as a pytree."""
    cls = dataclasses.dataclass(eq=False)(cls)
    KINDS[cls.__name__] = cls
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def present(v: Any) -> dict[str, Any]:  # None is no leaf: tree_map and vmap would choke on it
        return {name: item for name, item in zip(names, _items(v), strict=True) if item is not None}

    def with_keys(v: Any) -> Any:
        return [(pytree.GetAttrKey(name), item) for name, item in present(v).items()], list(present(v))

    def unflatten(children: Any, found: Any) -> Any:
        items = dict(zip(found, children, strict=True))
        return _rebuild(cls, [items.get(name) for name in names])

    pytree.register_pytree_node(
        cls,
        lambda v: (list(present(v).values()), list(present(v))),
        unflatten,
        serialized_type_name=f"linattn.{cls.__name__}",
        flatten_with_keys_fn=with_keys,
    )
    return cls


@value
class State(Value):
    """The two sums of a linear attention layer, each with its low-order part (fp32 only; float64 needs none).

    `z` is None where the layer does not normalise. Gradients flow through `kv` and `z`; the low parts are constants.
    """

    kv: Tensor
    z: Tensor | None
    # default_factory: a plain default would live on in the class and answer for a consumed state
    kv_low: Tensor | None = dataclasses.field(default_factory=lambda: None)
    z_low: Tensor | None = dataclasses.field(default_factory=lambda: None)

    @staticmethod
    def empty(
        batch: int,
        num_heads: int,
        features: int,
        values: int,
        *,
        normalize: bool = True,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
    ) -> State:
        """The state before any token: zeros."""
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a state's dtype is torch.float32 or torch.float64, got {dtype}: sums are never narrower")

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, num_heads, features, *shape, dtype=dtype, device=device)

        pair = dtype == torch.float32
        z, z_low = (zeros() if normalize else None), (zeros() if normalize and pair else None)
        return State(zeros(values), z, zeros(values) if pair else None, z_low)

    def plus(self, kv: Tensor, z: Tensor | None) -> State:
        """This state with `kv` and `z` added to its sums."""
        kv_sum, kv_low = add_exactly(self.kv, self.kv_low, kv)
        if self.z is None or z is None:
            return State(kv_sum, None, kv_low, None)
        z_sum, z_low = add_exactly(self.z, self.z_low, z)
        return State(kv_sum, z_sum, kv_low, z_low)

    def with_low_parts(self) -> State:
        """This state, its low parts zeros where it has none and needs some."""
        if self.kv.dtype != torch.float32:
            return self
        kv_low = torch.zeros_like(self.kv) if self.kv_low is None else self.kv_low
        z_low = torch.zeros_like(self.z) if self.z_low is None and self.z is not None else self.z_low
        return State(self.kv, self.z, kv_low, z_low)


def add_exactly(high: Tensor, low: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(high, low) + x, where `low` collects what rounding takes from `high` (Kahan 1965; equation 12)."""
    if low is None:
        return high + x, None
    x = low + x
    total = high + x
    return total, x - (total - high)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write next to `path` and rename: a reader sees the old file or the new one, never half of it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as any new file
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _items(v: Value) -> list[Any]:
    return [getattr(v, field.name) for field in dataclasses.fields(v)]  # type: ignore[arg-type]


def _rebuild(cls: type[ValueT], items: list[Any]) -> ValueT:
    # Not through __init__: pytrees put placeholders of any type where the tensors were.
    made = object.__new__(cls)
    for field, item in zip(dataclasses.fields(cls), items, strict=True):  # type: ignore[arg-type]
        object.__setattr__(made, field.name, item)
    return made


def _map_item(item: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, Value):
        return item.map(function)
    if isinstance(item, (tuple, list)):
        return type(item)(_map_item(part, function) for part in item)
    return item


def _walk(item: Any, name: str):
    if isinstance(item, torch.Tensor):
        yield name, item
    elif isinstance(item, Value):
        for field, part in zip(dataclasses.fields(item), _items(item), strict=True):  # type: ignore[arg-type]
            yield from _walk(part, f"{name}.{field.name}" if name else field.name)
    elif isinstance(item, (tuple, list)):
        for i, part in enumerate(item):
            yield from _walk(part, f"{name}.{i}" if name else str(i))


def _replace_tensors(v: ValueT, tensors: dict[str, Tensor]) -> ValueT:
    queue = iter(tensors.values())
    return v.map(lambda _: next(queue))


def _form(item: Any) -> Any:
    """The value without its tensors, as plain JSON."""
    if isinstance(item, torch.Tensor):
        return "tensor"
    if isinstance(item, Value):
        names = [field.name for field in dataclasses.fields(item)]  # type: ignore[arg-type]
        return {"kind": type(item).__name__, "fields": dict(zip(names, map(_form, _items(item)), strict=True))}
    if isinstance(item, (tuple, list)):
        return [_form(part) for part in item]
    if item is None or isinstance(item, (int, float)):
        return {"plain": item}
    raise ValueError(f"a state cannot hold a {type(item).__name__}: tensors, numbers, None and values only")


def _from_form(form: Any, tensors: dict[str, Tensor], name: str) -> Any:
    if form == "tensor":
        if name not in tensors:
            raise ValueError(f"the file is damaged: its tensor {name!r} is missing")
        return tensors[name]
    if isinstance(form, list):
        return tuple(_from_form(part, tensors, f"{name}.{i}" if name else str(i)) for i, part in enumerate(form))
    if "plain" in form:
        return form["plain"]
    if form["kind"] not in KINDS:
        raise ValueError(f"the file holds a value of unknown kind {form['kind']!r}; known: {', '.join(KINDS)}")
    fields = {key: _from_form(part, tensors, f"{name}.{key}" if name else key) for key, part in form["fields"].items()}
    return KINDS[form["kind"]](**fields)


def _row_index(rows: Any, x: Tensor) -> Any:
    return rows if isinstance(rows, slice) else torch.as_tensor(rows, device=x.device)


def _check_same_form(kind: str, first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    if first.keys() != other.keys():
        raise ValueError(f"{kind}.cat joins values of one form: found fields {list(first)} and {list(other)}")
    for name, x in first.items():
        y = other[name]
        if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
            raise ValueError(
                f"{kind}.cat needs equal shapes and dtypes but for the batch: {name} is "
                f"{tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
            )
