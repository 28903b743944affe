"""The door to the Triton kernels: whether they can run, and their two passes. Triton is imported at the first call.

Kernels run on CUDA devices; where TRITON_INTERPRET=1 is set they run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch

from linattn._typing import Tensor
from linattn.ops.form import Batch, Form
from linattn.state import State

WIDEST = 256  # features and values of a head


@functools.cache
def status() -> tuple[bool, str]:
    """Whether the kernels can run on this machine, and why not (or what they are)."""
    if find_spec("triton") is None:
        return False, "Triton is not installed (it comes with torch's CUDA builds for Linux)"
    if interpreted():
        return True, "Triton kernels, interpreted on the CPU (TRITON_INTERPRET=1): for tests"
    if not torch.cuda.is_available():
        return False, "no CUDA device was found"
    if torch.cuda.get_device_capability()[0] < 8:
        return False, f"{torch.cuda.get_device_name()} is older than the kernels' bfloat16 and tf32 products need"
    return True, "Triton kernels on a CUDA device"


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def why_not(q: Tensor, v: Tensor) -> str | None:
    """What keeps the kernels from running a call of q features and v; None where nothing does."""
    can_run, reason = status()
    if not can_run:
        return reason
    if q.device.type != ("cpu" if interpreted() else "cuda"):
        return f"its kernels run on CUDA devices, and q is on {q.device}"
    if v.dtype == torch.float64:
        return "its sums are float32, and the inputs are float64"
    if max(q.shape[3], v.shape[3]) > WIDEST:
        return f"heads may have {WIDEST} features and values at most, and these have {q.shape[3]} and {v.shape[3]}"
    if q.numel() == 0 or v.numel() == 0:
        return "there are no tokens"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, form: Form, state: State | None, batch: Batch, want_state: bool, keep: bool
) -> Any:
    """-> out, the state where it is wanted, and with `keep` four tensors (or None) for the backward pass."""
    from linattn.ops.triton import run

    return run.forward(q, k, v, form, state, batch, want_state, keep)


def backward(q: Tensor, k: Tensor, v: Tensor, form: Form, state: State | None, batch: Batch, *rest: Any) -> Any:
    """rest: dout, dkv, dz, the output and what the forward pass kept."""
    from linattn.ops.triton import run

    return run.backward(q, k, v, form, state, batch, *rest)


def kept(q: Tensor, k: Tensor, v: Tensor, form: Form, batch: Batch) -> Any:
    """Blanks of what `forward` keeps: for the compiler."""
    from linattn.ops.triton import run

    return run.kept(q, k, v, form, batch)
