"""Memory on a CPU: freed tiles are kept for the next ones, and large results get large pages.

A page that is written for the first time is cleared by the system, one fault for each 4 KB. For a result of hundreds of
megabytes that is a good part of the time in which it is computed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from typing import Any

import torch

from linattn._typing import Tensor

LARGE = 2**25  # bytes: smaller results come from memory that the process already has
LARGE_PAGE = 2**21


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tiles, which the next tiles need again.

    By default glibc gives it back at every call, and the system clears the same pages anew: up to half of a call's
    time. Once a block of 32 MB has been freed, as in most programs it has, it holds up to 64 MB (mallopt(3),
    M_MMAP_THRESHOLD). The block is never touched, so it costs nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8, device="cpu")


def empty(shape: tuple[int, ...] | torch.Size, like: Tensor) -> Tensor:
    """`torch.empty` of like's dtype and device, on large pages where it is large and the system has them."""
    made = torch.empty(shape, dtype=like.dtype, device=like.device)
    if made.device.type == "cpu" and made.nbytes >= LARGE:
        ask_for_large_pages(made)
    return made


def ask_for_large_pages(x: Tensor) -> None:
    """Linux: advice for the whole large pages of x, before they are written. Where it fails nothing changes."""
    advise = _madvise()
    if advise is None:
        return
    begin = -(-x.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    end = (x.data_ptr() + x.nbytes) // LARGE_PAGE * LARGE_PAGE
    if begin < end:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return getattr(ctypes.CDLL(None), "madvise", None)


keep_freed_memory()
