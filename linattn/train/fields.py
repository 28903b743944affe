"""Fields by their names and types: texts to typed values, and errors that list what there is."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

NOTHING = object()
TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def types_of(cls: type) -> dict[str, Any]:
    """The fields of a dataclass and their types."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def keyword_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only arguments of a function and their types."""
    hints = get_type_hints(inspect.unwrap(function))
    named = inspect.signature(function).parameters.values()
    return {p.name: hints[p.name] for p in named if p.kind is p.KEYWORD_ONLY}


def parse(key: str, text: str, kind: Any) -> Any:
    """`text` as a value of the type `kind`: none, bool, int, float, str, tuples with commas, mappings as JSON."""
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in sorted(options, key=lambda option: option is str):  # a text takes anything, "none" as well
        value = _try(text, option)
        if value is not NOTHING:
            return value
    raise ValueError(f"{key} must be {' or '.join(map(_in_words, options))}, got {text!r}")


def _try(text: str, kind: Any) -> Any:
    """`text` as one plain type; NOTHING where it is none."""
    try:
        return _parse_as(text, kind)
    except ValueError:
        return NOTHING


def _parse_as(text: str, kind: Any) -> Any:
    """`text` as one plain type; ValueError where it is none."""
    if kind is type(None):
        if text.lower() not in ("none", "null", ""):
            raise ValueError
        return None
    if kind is bool:
        if text.lower() not in TRUTH:
            raise ValueError
        return TRUTH[text.lower()]
    if kind is int:
        return _integer(text)
    if kind is float:
        return float(text)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(_parse_as(part, inner) for part in text.strip("()[] ").replace(" ", "").split(",") if part)
    if get_origin(kind) is not None and issubclass(get_origin(kind), Mapping):
        value = json.loads(text)  # its error is a ValueError
        if not isinstance(value, dict):
            raise ValueError
        return value
    return text


def _integer(text: str) -> int:
    """1000, 1_000 and 1e3."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():
            raise
        return int(value)


def _in_words(kind: Any) -> str:
    if kind is type(None):
        return "none"
    if get_origin(kind) is tuple:
        return f"{_in_words(get_args(kind)[0]).partition(' ')[2]}s with commas between them"
    if get_origin(kind) is not None:
        return "a JSON object"
    return {int: "an integer", float: "a number", bool: "true or false"}.get(kind, "a text")


def check_key(key: str, known: Iterable[str], what: str) -> None:
    known = list(known)
    if key not in known:
        raise unknown_key(key, {what: known})


def unknown_key(key: str, known: Mapping[str, Iterable[str]]) -> ValueError:
    """What to raise for a key that is none of those that each owner has."""
    everything = [name for names in known.values() for name in names]
    close = difflib.get_close_matches(key, everything, 1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    lists = "".join(f"\n  {what} has {', '.join(sorted(names))}" for what, names in known.items())
    return ValueError(f"unknown key {key!r}{meant}{lists}")
