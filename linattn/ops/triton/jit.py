"""Two kinds of functions for the GPU: kernels, which Python starts, and device functions, which kernels call.

Both are handed to Triton as they were written. The tests wrap every function of this package to execute its
annotations, and Triton, which reads sources, must not see the wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton

# What differs from call to call, with its type; none of it may lead to another compilation.
TYPES = {f"{x}_{axis}": "i64" for x in ("q", "k", "v", "do", "x", "y") for axis in ("row", "time", "head")}
TYPES |= dict.fromkeys(("T", "rows", "heads", "group", "SEG", "least"), "i32") | {"root": "fp32", "eps": "fp32"}


def kernel(function: Callable[..., Any]) -> Any:
    """A function that is started from Python: its numbers have the types above, whatever their values."""
    function = inspect.unwrap(function)
    varying = [name for name in inspect.signature(function).parameters if name in TYPES]
    function.__annotations__ |= {name: TYPES[name] for name in varying}
    return triton.jit(do_not_specialize=varying)(function)


def device(function: Callable[..., Any]) -> Any:
    """A function that kernels call; it becomes a part of each."""
    return triton.jit(inspect.unwrap(function))
