"""Triton's interpreter, quicker: the language is patched once for each kernel, not at every call of a device function.

It goes through all members of triton.language each time, which was almost half of what these tests took.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    patch: Any = interpreter._patch_lang
    if getattr(patch, "quick", False):
        return
    patched: set[int] = set()

    def once(fn: Any) -> Any:
        found = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
        if found and found <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(found)
        restore = scope.restore

        def forget() -> None:
            restore()
            patched.clear()

        scope.restore = forget
        return scope

    once.quick = True  # type: ignore[attr-defined]
    interpreter._patch_lang = once
