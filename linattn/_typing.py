"""Shape annotations: `Float[Tensor, "B T H D"]` in signatures, executed by the tests, free for everybody else.

The names are jaxtyping's when something has imported jaxtyping before us (tests/conftest.py does), and inert
stand-ins otherwise: `import linattn` never imports jaxtyping itself, installed or not.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int, Shaped
else:

    class _Plain:
        """`Float[Tensor, "B T"]` is then only `Tensor`."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return item[0]

    Bool = Float = Int = Shaped = _Plain

__all__ = ["Bool", "Float", "Int", "Shaped", "Tensor"]
