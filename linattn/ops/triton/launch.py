"""How kernels are started: with few microseconds of Python, and without compiling anew for another length.

Triton's own launcher looks at every argument of every call. Here nothing that varies is specialised: integers have
fixed types, and whether pointers and strides are multiples of 16 bytes is one of the constants. So the constants, the
dtypes and the device find the compiled kernel, and it is started directly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs

INTERPRETED = knobs.runtime.interpret
COMPILED: dict[tuple[Any, ...], Any] = {}

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
    dtypes = tuple(x.dtype for x in arguments if isinstance(x, torch.Tensor))
    key = (kernel, constants, warps, dtypes, device)
    compiled = COMPILED.get(key)
    if compiled is None:
        compiled = kernel.warmup(*arguments, *constants, grid=(programs,), num_warps=warps)
        compiled._init_handles()
        COMPILED[key] = compiled
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        programs,
        1,
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        None,
        knobs.runtime.launch_enter_hook,
        knobs.runtime.launch_exit_hook,
        *arguments,
        *constants,
    )


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
