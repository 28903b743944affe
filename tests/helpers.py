"""What the tests share: how close is close enough."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_as_accurate(got: Tensor, exact: Tensor, plain: Tensor, factor: float = 2.0) -> None:
    """|got - exact| ≤ factor · |plain - exact| + one rounding of the largest value, each the maximum over all elements.

    `exact` is the truth in float64, `plain` a straightforward computation of the same in got's dtype: the tolerance is
    measured, not chosen. A tolerance that the zero tensor would pass is refused, and so is NaN anywhere.
    """
    assert exact.dtype == torch.float64, f"the truth must be float64, got {exact.dtype}"
    assert got.dtype == plain.dtype, f"`plain` must have the dtype of what it excuses: {plain.dtype} for {got.dtype}"
    assert got.shape == exact.shape == plain.shape, f"{got.shape=}, {exact.shape=}, {plain.shape=}"
    scale = exact.abs().max()
    tolerance = factor * (plain.double() - exact).abs().max() + torch.finfo(got.dtype).eps * scale
    assert tolerance < 0.1 * scale, f"tolerance {tolerance:.1e}: zeros nearly pass (the signal is {scale:.1e})"
    error = (got.double() - exact).abs().max()
    assert error <= tolerance, f"error {error:.2e} > allowed {tolerance:.2e} ({factor} times that of plain {got.dtype})"
