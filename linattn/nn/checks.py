"""Checks of values, where reading them costs no synchronisation."""

import torch

from linattn._typing import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def readable(x: Tensor) -> bool:
    """A plain CPU tensor in eager mode: not on a GPU, traced, fake or batched by vmap."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return x.device.type == "cpu" and type(x) is torch.Tensor


def check_integers(name: str, x: Tensor) -> None:
    if x.dtype not in INTEGERS:
        raise ValueError(f"{name} must be integers, got {x.dtype}: use .to(torch.int64)")


def check_range(name: str, x: Tensor, low: int, high: int, way_out: str) -> None:
    """Integers in low … high."""
    check_integers(name, x)
    if readable(x) and x.numel():
        least, most = int(x.min()), int(x.max())
        if least < low or most > high:
            raise ValueError(f"{name} must lie in {low} … {high}, got {least if least < low else most}: {way_out}")
