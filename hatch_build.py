"""Build hook: compiles csrc/ into one shared library inside the package, where there are sources and a compiler.

The library has a plain C interface, needs no C++ runtime and is loaded with ctypes, so one wheel a platform serves
every Python. Files named *.isa.cpp are compiled once for each instruction set of the machine; the library chooses
between them when it is loaded. Where there is nothing to compile, or nothing to compile it with, the wheel is
py3-none-any and torch alone does the work: an install never fails for lack of a compiler. CXX, CC (which links), CFLAGS
and LDFLAGS are honoured.

By hand, for another machine too: python hatch_build.py [LIBRARY [MACHINE]], with CXX and CC naming a cross compiler.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
LIBRARY = Path(f"linattn/ops/_native{SUFFIX}")
# No exceptions, no type information, no guards: nothing that needs a C++ runtime library.
FLAGS = [
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-threadsafe-statics", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
SCALAR = ("scalar", 4, [])
# Instruction sets by machine: name, fp32 lanes of a vector, flags. Plain "scalar" is what every such machine can run.
INSTRUCTION_SETS: dict[str, list[tuple[str, int, list[str]]]] = {
    "x86_64": [("avx512", 16, AVX512), ("avx2", 8, AVX2), SCALAR],
    "aarch64": [("neon", 4, []), SCALAR],
}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class NativeLibrary(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is packed (or installed editable, which wants the library in the source tree too)."""
        root = Path(self.root)
        (root / LIBRARY).unlink(missing_ok=True)  # never ship, nor load, what older sources made
        failure = compile_library(root / "csrc", root / LIBRARY)
        if (root / LIBRARY).exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{next(platform_tags())}"
            build_data["artifacts"].append(str(LIBRARY))
        elif failure:
            self.app.display_warning(f"linattn is installed without its native library: {failure}")


def compile_library(sources: Path, library: Path, machine: str = "") -> str:
    """Builds `library`; what went wrong otherwise, in words ("" where there was nothing to build)."""
    if not list(sources.glob("*.cpp")):
        return ""
    cxx, cc = shlex.split(os.environ.get("CXX", "c++")), shlex.split(os.environ.get("CC", "cc"))
    for name, compiler in (("CXX", cxx), ("CC", cc)):
        if shutil.which(compiler[0]) is None:
            return f"no compiler ({compiler[0]!r} is not on the PATH; {name} names another)"
    with tempfile.TemporaryDirectory() as folder:
        compile_commands, objects = [], []
        for source, name, flags in units(sources, machine):
            objects.append(str(Path(folder) / f"{name}.o"))
            compile_commands.append([*cxx, *FLAGS, *flags, *option("CFLAGS"), "-c", str(source), "-o", objects[-1]])
        made = Path(folder) / library.name
        link = [*cc, "-shared", "-pthread", *option("CFLAGS"), *option("LDFLAGS"), *objects, "-lm", "-o", str(made)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = [failure for failure in pool.map(run, compile_commands) if failure]
        failure = failures[0] if failures else run(link)
        if not failure:
            # In one go: an interrupted build leaves no half library, and who has the old one open keeps it whole.
            beside = library.with_name(f"{library.name}.{os.getpid()}")
            shutil.copy(made, beside)
            beside.replace(library)
        return failure


def units(sources: Path, machine: str = "") -> list[tuple[Path, str, list[str]]]:
    """What is compiled: the source, the object's name, the flags. The longest first, so that none is waited for."""
    machine = (machine or platform.machine()).lower()
    sets = INSTRUCTION_SETS.get(MACHINES.get(machine, machine), [SCALAR])
    made = [
        (source, f"{source.stem}.{isa}", [*flags, f"-DLINATTN_ISA={isa}", f"-DLINATTN_LANES={lanes}"])
        for source in sorted(sources.glob("*.isa.cpp"), key=lambda path: -path.stat().st_size)
        for isa, lanes, flags in sets
    ]
    plain = [path for path in sorted(sources.glob("*.cpp")) if not path.name.endswith(".isa.cpp")]
    return made + [(source, source.stem, []) for source in plain]


def option(name: str) -> list[str]:
    return shlex.split(os.environ.get(name, ""))


def run(command: list[str]) -> str:
    """What a command says where it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{shlex.join(command)} failed:\n{done.stderr}"


if __name__ == "__main__":
    root = Path(__file__).parent
    sys.exit(compile_library(root / "csrc", Path(*sys.argv[1:2] or [root / LIBRARY]), *sys.argv[2:3]) or None)
