"""Build hook: compiles csrc/ into one shared library inside the package, where there are sources and a compiler.

The library has a plain C interface, needs no C++ runtime and is loaded with ctypes, so one wheel a platform serves
every Python. Files named *.isa.cpp are compiled once for each instruction set of the machine; the library chooses
between them when it is loaded. Where there is nothing to compile, or nothing to compile it with, the wheel is
py3-none-any and torch alone does the work: an install never fails for lack of a compiler. CXX, CC (which links), CFLAGS
and LDFLAGS are honoured.

LINATTN_TARGET=macos-arm64 (or another of TARGETS) builds the wheel of that platform on any machine, with the compiler
of the Python package ziglang; then a failure is one, since that wheel was asked for.

By hand: python hatch_build.py [LIBRARY [MACHINE]], with LINATTN_TARGET, or with CXX and CC naming a cross compiler.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FOLDER = "linattn/ops"
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
LIBRARY = Path(FOLDER, f"_native{SUFFIX}")
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


ZIG = "ziglang==0.17.0"


class Target(NamedTuple):
    """A platform to build for: zig's name of it, with the oldest system; the machine; the library; the wheel's tag."""

    triple: str
    machine: str
    suffix: str
    tag: str


# glibc 2.17 and macOS 11: no newer than what wheels of torch ask for, so the library never narrows where linattn runs.
# For macOS on x86-64 torch has no wheels any more; who builds torch there finds this one.
TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.17", "x86_64", ".so", "manylinux_2_17_x86_64"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "aarch64", ".so", "manylinux_2_17_aarch64"),
    "macos-x86_64": Target("x86_64-macos.11.0", "x86_64", ".dylib", "macosx_11_0_x86_64"),
    "macos-arm64": Target("aarch64-macos.11.0", "aarch64", ".dylib", "macosx_11_0_arm64"),
    "windows-x86_64": Target("x86_64-windows-gnu", "x86_64", ".dll", "win_amd64"),
}


class NativeLibrary(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return [ZIG] if target() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is packed, or the source tree is installed editable, which gets the library in its place."""
        wanted = target()
        self.scratch = tempfile.TemporaryDirectory()
        name = f"_native{wanted.suffix if wanted else SUFFIX}"
        library = Path(self.root, FOLDER, name) if version == "editable" else Path(self.scratch.name, name)
        library.unlink(missing_ok=True)  # never load what older sources made
        failure = compile_library(Path(self.root, "csrc"), library)
        if failure and wanted:
            raise RuntimeError(f"LINATTN_TARGET={os.environ['LINATTN_TARGET']}: {failure}")
        if library.exists():
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{wanted.tag if wanted else next(platform_tags())}"
            if version != "editable":
                build_data["force_include"][str(library)] = f"{FOLDER}/{name}"
        elif failure:
            self.app.display_warning(f"linattn is installed without its native library: {failure}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.scratch.cleanup()


def target() -> Target | None:
    """The platform that LINATTN_TARGET names; None for this one, with its own compiler."""
    name = os.environ.get("LINATTN_TARGET", "")
    if name and name not in TARGETS:
        raise ValueError(f"LINATTN_TARGET={name!r} is none of {', '.join(TARGETS)}")
    return TARGETS[name] if name else None


def compile_library(sources: Path, library: Path, machine: str = "") -> str:
    """Builds `library`; what went wrong otherwise, in words ("" where there was nothing to build)."""
    if not list(sources.glob("*.cpp")):
        return ""
    wanted = target()
    if wanted and importlib.util.find_spec("ziglang") is None:
        return f"its compiler is missing: pip install {ZIG}"
    for name, compiler in compilers(wanted).items():
        if shutil.which(compiler[0]) is None:
            return f"no compiler ({compiler[0]!r} is not on the PATH; {name} names another)"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, library.name)
        failure = build(units(sources, machine or (wanted.machine if wanted else "")), made, ["-shared"], wanted)
        if not failure:
            # In one go: an interrupted build leaves no half library, and who has the old one open keeps it whole.
            beside = library.with_name(f"{library.name}.{os.getpid()}")
            shutil.copy(made, beside)
            beside.replace(library)
        return failure


def compilers(wanted: Target | None) -> dict[str, list[str]]:
    if wanted:
        zig = [sys.executable, "-m", "ziglang"]
        return {"CXX": [*zig, "c++", "-target", wanted.triple], "CC": [*zig, "cc", "-target", wanted.triple]}
    return {name: shlex.split(os.environ.get(name, usual)) for name, usual in (("CXX", "c++"), ("CC", "cc"))}


def build(sources: list[tuple[Path, str, list[str]]], made: Path, kind: list[str], wanted: Target | None = None) -> str:
    """Compiles each of `units`, links them into `made` (a library, or a program); what went wrong, in words."""
    compiler = compilers(wanted)
    # All code for Windows may lie anywhere: clang refuses to be told.
    general = [flag for flag in FLAGS if not (wanted and wanted.suffix == ".dll" and flag == "-fPIC")]
    commands, objects = [], []
    for source, name, flags in sources:
        objects.append(str(made.with_name(f"{name}.o")))
        language = [*compiler["CC"], "-std=c11", "-O2"] if source.suffix == ".c" else [*compiler["CXX"], *general]
        commands.append([*language, *flags, *option("CFLAGS"), "-c", str(source), "-o", objects[-1]])
    strip = ["-s"] if wanted and wanted.suffix != ".dll" else []  # Windows has its debug symbols in another file
    options = ["-pthread", *strip, *option("CFLAGS"), *option("LDFLAGS")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [failure for failure in pool.map(run, commands) if failure]
    return failures[0] if failures else run([*compiler["CC"], *kind, *options, *objects, "-lm", "-o", str(made)])


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
