"""What a call of a rival must look like, beyond what it shares with the operator, and who follows it.

Axes:  B batch   T time   N capacity   K key/value heads   D key width   M value width
"""

from __future__ import annotations

import torch

from linattn._typing import Bool, Tensor
from linattn.ops.buffers import TokenCache


def check_cache(state: TokenCache, kind: type[TokenCache], k: Tensor | None = None, v: Tensor | None = None) -> None:
    """Whether `state` is a cache of the right kind, and fits these keys and values."""
    if not isinstance(state, kind):
        raise ValueError(f"state must be a {kind.__name__}, got {type(state).__name__}")
    for name, held, x in (("k", state.k, k), ("v", state.v, v)):
        if x is None:
            continue
        fits = (x.shape[0], state.capacity, *x.shape[2:])
        if tuple(held.shape) != fits:
            raise ValueError(
                f"state.{name} must be (batch, capacity, key/value heads, width) = {fits} for these operands, "
                f"got {tuple(held.shape)}: was the cache made for another batch, or by another layer?"
            )
        if held.dtype != x.dtype:
            raise ValueError(f"state.{name} is {held.dtype} and the new tokens are {x.dtype}: a cache keeps one dtype")
        if held.device != x.device:
            raise ValueError(f"state is on {held.device} and {name} on {x.device}: use state.to({str(x.device)!r})")
    if state.lengths.shape != state.k.shape[:1]:
        raise ValueError(
            f"state.lengths must hold one length per row, ({state.batch},), got {tuple(state.lengths.shape)}"
        )


def check_donation(state: TokenCache | None, return_state: bool, *operands: Tensor) -> None:
    if state is None:
        raise ValueError("donate=True gives state= away, but there is no state")
    if not return_state:
        raise ValueError("donate=True without return_state=True would lose the state: pass return_state=True")
    if has_gradient(*operands, state.k, state.v):
        raise ValueError("donate=True writes into the state, which gradients need: use torch.no_grad() or donate=False")


def has_gradient(*operands: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


def is_transformed() -> bool:
    """Whether this call is traced by a compiler or runs under torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def is_plain(*operands: Tensor) -> bool:
    """Whether nobody follows this call, so that memory may be written in place."""
    return not has_gradient(*operands) and not is_transformed()


def masked(x: Tensor, real: Bool[Tensor, "B T_or_1"] | None) -> Tensor:
    return x if real is None else torch.where(real[..., None, None], x, 0)
