"""Values made of values: what a layer, a block or a stack remembers.

Each part is selected, joined and copied in its own way: caches of different lengths are joined by padding them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from linattn._typing import Tensor
from linattn.state import Value

NestedT = TypeVar("NestedT", bound="Nested")


class Nested(Value):
    """A value whose fields are tensors, values, tuples of them, or None."""

    def select(self: NestedT, rows: int | slice | Sequence[int] | Tensor) -> NestedT:
        """The given batch rows, copied: an int (kept as a batch of one), a slice, a list, an index or a mask."""
        index: Any = [rows] if isinstance(rows, int) else rows
        return self._each(lambda part: part.select(index), lambda x: x[_index(index, x)].clone())

    @classmethod
    def cat(cls: type[NestedT], values: Sequence[NestedT]) -> NestedT:
        """Join along the batch. All must be states of one model; rows may have seen different numbers of tokens."""
        if not values:
            raise ValueError(f"{cls.__name__}.cat needs at least one value, got an empty list")
        return _joined(cls.__name__, values, parts=True)

    def clone(self: NestedT) -> NestedT:
        return self._each(lambda part: part.clone(), torch.clone)

    fork = clone

    def detach(self: NestedT) -> NestedT:
        """A copy through which no gradient flows: truncated back-propagation through time."""
        return self._each(lambda part: part.detach(), lambda x: x.detach().clone())

    def to(self: NestedT, device: str | torch.device) -> NestedT:
        return self._each(lambda part: part.to(device), lambda x: x.to(device, copy=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        # A copy: the buffers of a cache may hold a newer value's tokens, behind those of this one.
        super(Nested, self.clone()).save(path)

    @classmethod
    def load(cls: type[NestedT], path: str | os.PathLike[str], device: str | torch.device = "cpu") -> NestedT:
        """Read what `save` wrote. A file of another kind of value raises."""
        # A copy: a file's tensors begin anywhere in memory, and where they begin can change the last bit of a product.
        return super().load(path, device).clone()

    def _each(self: NestedT, of_value: Callable[[Any], Any], of_tensor: Callable[[Tensor], Tensor]) -> NestedT:
        def apply(item: Any) -> Any:
            if isinstance(item, Value):
                return of_value(item)
            if isinstance(item, tuple):
                return tuple(map(apply, item))
            return of_tensor(item) if isinstance(item, torch.Tensor) else item

        return type(self)(**{name: apply(item) for name, item in _fields(self).items()})


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _joined(name: str, items: Sequence[Any], parts: bool = False) -> Any:
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in items))
        raise ValueError(f"cat joins states of one model: {name} is {kinds}. Has only one of them read its memory?")
    if isinstance(first, Value) and not parts:
        return type(first).cat(items)
    if isinstance(first, Value):
        columns = {field: [getattr(item, field) for item in items] for field in _fields(first)}
        return type(first)(**{field: _joined(f"{name}.{field}", column) for field, column in columns.items()})
    if isinstance(first, tuple):
        if len({len(item) for item in items}) > 1:
            raise ValueError(f"cat joins states of one model: {name} has {[len(item) for item in items]} parts")
        return tuple(_joined(f"{name}.{i}", column) for i, column in enumerate(zip(*items, strict=True)))
    return torch.cat(list(items)) if isinstance(first, torch.Tensor) else first


def _index(rows: Any, x: Tensor) -> Any:
    return rows if isinstance(rows, slice) else torch.as_tensor(rows, device=x.device)
