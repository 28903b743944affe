"""Small files of trained weights: a matrix as int8 with one float32 scale a row, or as bfloat16; the rest as it is.

    int8    w_ij ≈ s_i · c_ij,   s_i = max_j |w_ij| / 127,   c_ij in -127 … 127        error at most s_i / 2
    bf16    w_ij rounded to 8 bits of mantissa

Vectors and small matrices (`SMALL`) stay float32: they are a hundredth of the file, and the head's are what every
probability hangs on. `unpacked` gives float32 weights again, so a packed model is used like any other.

Axes:  R rows   I inputs of a row
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from linattn._typing import Float, Tensor
from linattn.ops.parts import scales

FORMS = ("int8", "bf16")
SMALL = 8_192  # numbers: a matrix of fewer is not rounded
SCALE = "scale of "  # before the name of a matrix: no name of a module has a blank


def packed(tensors: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """The tensors of a model, its large matrices in `form`."""
    if form not in FORMS:
        raise ValueError(f"weights are packed as {' or '.join(FORMS)}, got {form!r}")
    made: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if not x.is_floating_point() or x.dim() != 2 or x.numel() < SMALL:
            made[name] = x.contiguous()
        elif form == "bf16":
            made[name] = x.bfloat16()
        else:
            made[name], made[SCALE + name] = rounded_rows(x)
    return made


def rounded_rows(x: Float[Tensor, "R I"]) -> tuple[Tensor, Float[Tensor, "R 1"]]:
    """int8 codes (R, I), and the scale of each row."""
    x = x.detach().float()
    scale = scales(x)[:, None]
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What was packed, in float32."""
    made = {}
    for name, x in tensors.items():
        if not name.startswith(SCALE):
            scale = tensors.get(SCALE + name)
            wide = x.float() if x.dtype in (torch.int8, torch.bfloat16) else x
            made[name] = wide if scale is None else wide * scale
    return made
