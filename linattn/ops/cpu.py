"""The door to the native CPU library (csrc/): loads it, says whether it can run, and wraps its calls.

The library has a plain C interface and checks nothing: every size and stride is checked here, before the call. ctypes
releases the GIL while a call runs. LINATTN_ISA in the environment forces an instruction set, for tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from linattn._typing import Tensor

ABI_VERSION = 1  # csrc/linattn.h
MAPS = {"elu": 0, "relu": 1, "squared_relu": 2, "softplus": 3, "exp": 4, "identity": 5}  # in the order of its enum
NAMES = ("_native.so", "_native.dylib", "_native.dll")


@functools.cache
def status() -> tuple[bool, str]:
    """Whether the library can run on this machine, and why not (or what it is)."""
    library, reason = _load()
    if library is None:
        return False, reason
    return True, f"native CPU library, {library.linattn_isa().decode()} instructions"


def library() -> ctypes.CDLL:
    """The library, where `status` says that it can run."""
    loaded, reason = _load()
    if loaded is None:
        raise ValueError(f"the native CPU library cannot run here: {reason}")
    return loaded


def feature_map(name: str, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """φ(√scale·x) and its derivative there, as the library computes them (fp32, contiguous): for tests."""
    if name not in MAPS or x.dtype != torch.float32 or not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(f"needs one of {', '.join(MAPS)} and contiguous fp32 on the CPU, got {name!r}, {x.dtype}")
    y, slope = torch.empty_like(x), torch.empty_like(x)
    library().linattn_feature_map(
        MAPS[name], scale**0.5, x.data_ptr(), y.data_ptr(), slope.data_ptr(), x.numel(), torch.get_num_threads()
    )
    return y, slope


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    found = [path for path in (Path(__file__).with_name(name) for name in NAMES) if path.exists()]
    if not found:
        return None, "it was not built: no compiler was found when linattn was installed, and no wheel brought it along"
    try:
        loaded = ctypes.CDLL(str(found[0]))
        version = loaded.linattn_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{found[0].name} could not be loaded ({error}): reinstall linattn"
    if version != ABI_VERSION:
        return None, f"{found[0].name} is of another version ({version}, expected {ABI_VERSION}): reinstall linattn"
    _declare(loaded)
    wanted = os.environ.get("LINATTN_ISA", "")
    if loaded.linattn_choose(wanted.encode()) != 0:
        names = loaded.linattn_available().decode().replace(" ", ", ")
        return None, f"LINATTN_ISA={wanted!r} is not available on this machine: unset it, or choose one of {names}"
    return loaded, ""


def _declare(loaded: ctypes.CDLL) -> None:
    i32, i64, f32, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    loaded.linattn_available.restype = loaded.linattn_isa.restype = ctypes.c_char_p
    loaded.linattn_choose.argtypes = [ctypes.c_char_p]
    loaded.linattn_feature_map.argtypes = [i32, f32, pointer, pointer, pointer, i64, i32]
