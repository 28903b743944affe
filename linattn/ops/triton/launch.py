"""How kernels are started: with few microseconds of Python, and without compiling anew for another length.

Triton's own launcher looks at every argument of every call. Here nothing that varies is specialised: integers have
fixed types, and whether pointers and strides are multiples of 16 bytes is one of the constants. So the constants, the
dtypes and the device find the compiled kernel, and it is started as Triton's `JITFunction.run` does it (3.6, 3.7),
with addresses in the place of tensors, which spares the launcher a question to the driver for each. Triton's launcher
takes over where somebody watches launches (a profiler's hooks), and for good where a Triton starts kernels differently.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs

INTERPRETED = knobs.runtime.interpret
COMPILED: dict[tuple[Any, ...], Callable[[int, int, Sequence[Any]], None]] = {}
DIRECT = [True]  # whether kernels are started past Triton's launcher

Constants = tuple[Any, ...]


def launch(kernel: Any, programs: int, arguments: Sequence[Any], constants: Constants, warps: int) -> None:
    """Start `programs` programs. `arguments` come first in the kernel's signature, `constants` (the constexprs) after.

    The first argument is a tensor on the device where it runs; every tensor is aligned as the constants say.
    """
    if programs == 0:
        return
    if INTERPRETED:
        kernel[(programs,)](*arguments, *constants)
        return
    device = arguments[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, arguments, constants, warps)
        return
    if DIRECT[0] and not _watched():
        dtypes = tuple(x.dtype for x in arguments if isinstance(x, torch.Tensor))
        key = (kernel, constants, warps, dtypes, device)
        try:
            start = COMPILED.get(key)
            if start is None:
                start = COMPILED[key] = _starter(kernel, arguments, constants, warps)
            start(programs, torch._C._cuda_getCurrentRawStream(device), arguments)
            return
        except (AttributeError, TypeError) as error:  # before anything was started; what CUDA says is a RuntimeError
            DIRECT[0] = False
            warnings.warn(f"kernels take Triton's own, slower launcher: {type(error).__name__}: {error}", stacklevel=2)
    kernel[(programs,)](*arguments, *constants, num_warps=warps)


def _starter(kernel: Any, arguments: Sequence[Any], constants: Constants, warps: int) -> Any:
    """Compiles the kernel, on the current device: (programs, stream, arguments) -> starts it."""
    compiled = kernel.warmup(*arguments, *constants, grid=(1,), num_warps=warps)
    if hasattr(compiled, "result"):  # compiled by another thread
        compiled = compiled.result()
    run = compiled.run  # loads it; `function` is there afterwards
    function, metadata = compiled.function, compiled.packed_metadata

    def start(programs: int, stream: int, arguments: Sequence[Any]) -> None:
        addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        run(programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *constants)

    return start


def _watched() -> bool:
    """Whether anything hangs on the launches of kernels."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(getattr(hook, "calls", hook) for hook in hooks)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; 132 (an H100's or H200's) where kernels are interpreted."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def stand_in(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is passed for a tensor that the constants say is not there."""
    return torch.zeros(16, dtype=dtype, device=device)


def block(width: int) -> int:
    """The power of two that a tile needs for `width` numbers."""
    return max(16, 1 << (width - 1).bit_length())
