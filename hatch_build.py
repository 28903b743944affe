"""Build hook: compiles csrc/*.c into one shared library inside the package, where there are sources and a C compiler.

The library has a plain C interface and is loaded with ctypes, so one wheel a platform serves every Python. Where there
is nothing to compile, or nothing to compile it with, the wheel is py3-none-any and torch alone does the work: an
install never fails for lack of a compiler. CC and CFLAGS are honoured.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

LIBRARY = Path("linattn/ops/_native.so")
FLAGS = ["-O3", "-std=c11", "-fPIC", "-shared", "-pthread"]


class NativeLibrary(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is packed (or installed editable, which wants the library in the source tree too)."""
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)  # never ship, nor load, what older sources made
        failure = compile_library(sorted(root.glob("csrc/*.c")), root / LIBRARY)
        if (root / LIBRARY).exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{next(platform_tags())}"
            build_data["artifacts"].append(str(LIBRARY))
        elif failure:
            self.app.display_warning(f"linattn is installed without its native library: {failure}")


def compile_library(sources: list[Path], library: Path) -> str:
    """Builds `library`; what went wrong otherwise, in words ("" where there was nothing to build)."""
    if not sources:
        return ""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        return f"no C compiler ({compiler[0]!r} is not on the PATH; CC names another)"
    command = [*compiler, *FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), *map(str, sources), "-lm"]
    run = subprocess.run([*command, "-o", str(library)], check=False, capture_output=True, text=True)
    return "" if run.returncode == 0 else f"{shlex.join(command)} failed:\n{run.stderr}"
