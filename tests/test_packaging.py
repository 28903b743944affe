"""What an installer gets: a wheel, with the native library where it could be built, and without it everywhere else."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PURE = "py3-none-any"
SOURCE = """
#include <math.h>
extern "C" __attribute__((visibility("default"))) double twice_root(double x) { return 2 * sqrt(x); }
"""


@pytest.fixture
def project(tmp_path):
    """The real build files around a package of one module."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "linattn" / "ops").mkdir(parents=True)
    (tmp_path / "linattn" / "__init__.py").touch()
    return tmp_path


def build(project: Path, **environment: str) -> tuple[str, zipfile.ZipFile, str]:
    """The wheel's tag, the wheel, and what the build said."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    run = subprocess.run(
        command, check=False, cwd=project, env=os.environ | environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = (project / "dist").iterdir()
    return wheel.stem.split("-", 2)[2], zipfile.ZipFile(wheel), run.stdout + run.stderr


def write_source(project: Path, text: str) -> None:
    (project / "csrc").mkdir()
    (project / "csrc" / "twice.cpp").write_text(text)


def test_without_sources_the_wheel_is_for_everyone(project):
    tag, _, said = build(project)
    assert tag == PURE
    assert "native" not in said


def test_the_library_is_built_and_shipped(project, tmp_path):
    write_source(project, SOURCE)
    tag, wheel, _ = build(project)
    assert tag.startswith("py3-none-") and tag != PURE
    library = ctypes.CDLL(wheel.extract("linattn/ops/_native.so", tmp_path / "installed"))
    library.twice_root.restype, library.twice_root.argtypes = ctypes.c_double, [ctypes.c_double]
    assert library.twice_root(9.0) == 6.0


@pytest.mark.parametrize("trouble", ["no compiler", "a failing compiler"])
def test_an_install_never_fails_for_the_compiler(project, trouble):
    write_source(project, "int f(void) { return 1; }\n" if trouble == "no compiler" else "#error not today\n")
    (project / "linattn" / "ops" / "_native.so").write_text("left by an older build")
    tag, wheel, said = build(project, **({"CXX": "no-such-compiler"} if trouble == "no compiler" else {}))
    assert tag == PURE
    assert "linattn/ops/_native.so" not in wheel.namelist()
    assert ("no-such-compiler" if trouble == "no compiler" else "not today") in said
