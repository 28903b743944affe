"""The native library where the test suite does not reach: another processor, and under sanitizers.

    python tools/safety.py driver      csrc/tests on this machine, with each instruction set it has
    python tools/safety.py emulate     the same for aarch64: built by zig (pip install ziglang), run by qemu-aarch64
    python tools/safety.py sanitize    the same with address and undefined-behaviour sanitizers
    python tools/safety.py threads     the same with the thread sanitizer
    python tools/safety.py python      the tests of the library from Python with the sanitizers of `sanitize`

The last but `emulate` need gcc, whose sanitizers they load. Each prints what it ran and saw, and fails if that does.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hatch_build import LIBRARY, Target, build, compile_library, units  # noqa: E402

# -O1: what optimisers do to wrong code hides it. An error of either kind ends the program.
SANITIZED = "-g -O1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize="
AARCH64 = Target("aarch64-linux-musl", "aarch64", "", "")  # static: an emulator needs no libraries of that machine
TESTS = ["tests/test_native.py", "tests/test_generate_native.py", "tests/test_ops_values.py", "tests/test_ops_state.py"]


def driver(flags: str = "", target: Target | None = None, runner: list[str] | None = None) -> int:
    """Builds the driver with the whole library in it, and runs it."""
    os.environ["CFLAGS"] = flags
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "driver")
        sources = units(ROOT / "csrc", target.machine if target else "")
        sources += [(path, f"test_{path.stem}", []) for path in sorted((ROOT / "csrc/tests").glob("*.c"))]
        failure = build(sources, program, ["-static"] if target else [], target)
        if failure:
            print(failure)
            return 1
        return subprocess.run([*(runner or []), str(program)], check=False).returncode


def emulate() -> int:
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not emulator:
        sys.exit("qemu-aarch64 is not on the PATH: apt-get install qemu-user")
    print(subprocess.run([emulator, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0])
    return driver(target=AARCH64, runner=[emulator])


def under_python(tests: list[str]) -> int:
    """A copy of the package with a sanitized library; python itself is not sanitized, so theirs is loaded first."""
    os.environ["CFLAGS"] = f"{SANITIZED}address,undefined"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("linattn", "tests", "csrc"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("_native.*", "__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder)
        failure = compile_library(ROOT / "csrc", Path(folder, LIBRARY))
        if failure:
            print(failure)
            return 1
        wanted = ("libasan.so", "libubsan.so")
        preload = [subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip() for name in wanted]
        environment = os.environ | {
            "PYTHONPATH": folder,
            "LD_PRELOAD": ":".join(preload),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, by the thousand
            "PYTHONMALLOC": "malloc",
            "OMP_NUM_THREADS": "1",  # the tests ask for more where that is their subject
        }
        command = [sys.executable, "-m", "pytest", "-q", "-k", "native", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, check=False, cwd=folder, env=environment).returncode


def main() -> int:
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"{what} on {platform.machine()}, {platform.platform(terse=True)}", flush=True)
    if what == "driver":
        return driver()
    if what == "emulate":
        return emulate()
    if what == "sanitize":
        return driver(f"{SANITIZED}address,undefined")
    if what == "threads":
        return driver(f"{SANITIZED}thread")
    if what == "python":
        return under_python(sys.argv[2:] or TESTS)
    sys.exit(f"choose one of driver, emulate, sanitize, threads and python, got {what!r}:\n{__doc__}")


if __name__ == "__main__":
    sys.exit(main())
