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

from linattn import backends

ROOT = Path(__file__).parents[1]
PURE = "py3-none-any"
SOURCE = """
#include <math.h>
extern "C" __attribute__((visibility("default"))) double twice_root(double x) { return 2 * sqrt(x); }
"""


# In place of the compiler of that name: writes down what it was asked for, where the object or library should be.
ZIGLANG = """
import sys
from pathlib import Path
Path(sys.argv[sys.argv.index("-o") + 1]).write_text(" ".join(sys.argv[1:]))
sys.exit("not today" if "fail" in Path("csrc/twice.cpp").read_text() else 0)
"""
TARGETS = {  # the name: the wheel's tag, the library, the first word of zig's name
    "linux-x86_64": ("manylinux_2_17_x86_64", "_native.so", "x86_64"),
    "linux-aarch64": ("manylinux_2_17_aarch64", "_native.so", "aarch64"),
    "macos-x86_64": ("macosx_11_0_x86_64", "_native.dylib", "x86_64"),
    "macos-arm64": ("macosx_11_0_arm64", "_native.dylib", "aarch64"),
    "windows-x86_64": ("win_amd64", "_native.dll", "x86_64"),
}


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
    run = try_to_build(project, **environment)
    assert run.returncode == 0, run.stderr
    (wheel,) = (project / "dist").iterdir()
    return wheel.stem.split("-", 2)[2], zipfile.ZipFile(wheel), run.stdout + run.stderr


def try_to_build(project: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    return subprocess.run(
        command, check=False, cwd=project, env=os.environ | environment, capture_output=True, text=True
    )


def write_ziglang(folder: Path) -> str:
    """A PYTHONPATH with the stand-in."""
    (folder / "zig" / "ziglang").mkdir(parents=True)
    (folder / "zig" / "ziglang" / "__init__.py").touch()
    (folder / "zig" / "ziglang" / "__main__.py").write_text(ZIGLANG)
    (folder / "zig" / "ziglang-0.17.0.dist-info").mkdir()
    (folder / "zig" / "ziglang-0.17.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ziglang\nVersion: 0.17.0\n"
    )
    return str(folder / "zig")


def write_source(project: Path, text: str) -> None:
    (project / "csrc").mkdir()
    (project / "csrc" / "twice.cpp").write_text(text)


def test_without_sources_the_wheel_is_for_everyone(project):
    tag, _, said = build(project)
    assert tag == PURE
    assert "native" not in said


def test_weights_and_their_cards_ship(project):
    """Names like `linattn generate digits` work from an installed wheel, offline."""
    shutil.copytree(ROOT / "linattn" / "weights", project / "linattn" / "weights")
    _, wheel, _ = build(project)
    names = {Path(name).name for name in wheel.namelist() if name.startswith("linattn/weights/")}
    assert {"digits.safetensors", "digits.md"} <= names
    assert (
        wheel.read("linattn/weights/digits.safetensors") == (ROOT / "linattn/weights/digits.safetensors").read_bytes()
    )


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


@pytest.mark.parametrize("target", TARGETS)
def test_a_wheel_of_another_platform(project, target):
    """The tag that an installer there takes, the name that ops/cpu.py looks for, and nothing of this machine."""
    write_source(project, SOURCE)
    (project / "linattn" / "ops" / "_native.so").write_text("of this machine")
    tag, wheel, _ = build(project, LINATTN_TARGET=target, PYTHONPATH=write_ziglang(project))
    platform, library, machine = TARGETS[target]
    assert tag == f"py3-none-{platform}"
    assert [name for name in wheel.namelist() if "_native" in name] == [f"linattn/ops/{library}"]
    linked = wheel.read(f"linattn/ops/{library}").decode()
    assert linked.startswith(f"cc -target {machine}-") and "-shared" in linked
    assert (project / "linattn" / "ops" / "_native.so").read_text() == "of this machine"


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [("plan9-mips", SOURCE, "macos-arm64"), ("macos-arm64", "fail", "not today")],
    ids=["unknown", "fails"],
)
def test_a_wheel_that_was_asked_for_is_built_or_fails(project, target, source, said):
    write_source(project, source)
    run = try_to_build(project, LINATTN_TARGET=target, PYTHONPATH=write_ziglang(project))
    assert run.returncode != 0
    assert said in run.stdout + run.stderr
    assert not list(project.glob("dist/*"))


@pytest.mark.skipif(not backends()["native"][0] or not shutil.which("cc"), reason="needs the library and a C compiler")
def test_the_library_from_c(tmp_path):
    """The header is C, and a program without Python gets what the definition in double precision says."""
    (library,) = (ROOT / "linattn" / "ops").glob("_native.*")
    sources = [str(path) for path in sorted((ROOT / "csrc" / "tests").glob("*.c"))]
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Werror", *sources, str(library), "-lm"]
    subprocess.run([*command, "-o", str(tmp_path / "driver")], check=True)
    run = subprocess.run([str(tmp_path / "driver")], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert run.stdout.startswith(backends()["native"][1].split(", ")[1].split()[0])  # the best one first
    assert "\nscalar\n  operator: 18 cases, right\n" in run.stdout
