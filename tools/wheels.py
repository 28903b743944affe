"""Wheels of every platform, built on this one: what they hold, what they ask of a system, how they install.

    python tools/wheels.py build [TARGET...]     into dist/: all of hatch_build.TARGETS; needs ziglang and readelf
    python tools/wheels.py try                   the wheel for this machine, and the sdist, where there is no compiler

`try` makes a fresh venv for each and gives it a PATH with nothing but the venv; torch and the other dependencies come
from the environment that runs this, the build back end for the sdist too.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
sys.path.insert(0, str(ROOT))

from hatch_build import TARGETS, ZIG  # noqa: E402

# What a library is, by where its header names the machine, and by that name: ELF, Mach-O, PE.
FORMATS = {
    b"\x7fELF": ("ELF", {62: "x86-64", 183: "aarch64"}),
    b"\xcf\xfa\xed\xfe": ("Mach-O", {0x01000007: "x86-64", 0x0100000C: "arm64"}),
    b"MZ": ("PE", {0x8664: "x86-64"}),
}
CALL = """
import sys, torch, linattn
print("  from", linattn.__file__)
print("  backends()['native'] =", linattn.backends()["native"])
q, k, v = torch.randn(3, 2, 300, 4, 32)
exact = linattn.linear_attention(q.double(), k.double(), v.double(), impl="quadratic")
if linattn.backends()["native"][0]:
    error = (linattn.linear_attention(q, k, v, impl="native") - exact).abs().max().item()
else:
    error = (linattn.linear_attention(q, k, v) - exact).abs().max().item()
print(f"  a call is within {error:.1e} of the definition in float64")
sys.exit(error > 1e-5)
"""


def machine_of(library: bytes) -> str:
    for magic, (name, machines) in FORMATS.items():
        if library.startswith(magic):
            where = struct.unpack_from("<I", library, 0x3C)[0] + 4 if name == "PE" else {"ELF": 18, "Mach-O": 4}[name]
            (machine,) = struct.unpack_from("<I" if name == "Mach-O" else "<H", library, where)
            return f"{name} {machines.get(machine, machine)}"
    return "no library"


def needs_of(library: Path) -> str:
    """The shared libraries that an ELF file asks for, and the newest glibc among its symbols' versions."""
    text = subprocess.run(
        ["readelf", "-W", "-d", "-V", str(library)], check=True, capture_output=True, text=True
    ).stdout
    versions = {tuple(int(part) for part in found.split(".")) for found in re.findall(r"GLIBC_([\d.]+)", text)}
    needed = ", ".join(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
    return f"needs {needed}; glibc {'.'.join(map(str, max(versions, default=(0,))))} or newer"


def build(names: list[str]) -> int:
    for name in names or list(TARGETS):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(DIST)],
            check=True,
            cwd=ROOT,
            env=os.environ | {"LINATTN_TARGET": name},
            stdout=subprocess.DEVNULL,
        )
        (wheel,) = DIST.glob(f"*-py3-none-{TARGETS[name].tag}.whl")
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
            (inside,) = [each for each in archive.namelist() if "/_native." in each]
            library = Path(archive.extract(inside, folder))
            data = library.read_bytes()
            needs = f"; {needs_of(library)}" if data.startswith(b"\x7fELF") else ""
            print(f"{wheel.name} ({wheel.stat().st_size:,} bytes)")
            print(f"  {inside}: {machine_of(data)}, {len(data):,} bytes{needs}", flush=True)
    return 0


def installed(what: Path, *options: str) -> int:
    """Installs into a fresh venv that sees no compiler, and calls the operator there."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python, environment = Path(folder, "bin", "python"), {"PATH": str(Path(folder, "bin")), "HOME": folder}
        (site,) = Path(folder, "lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])  # its own .pth files are not read
        command = [str(python), "-m", "pip", "install", "--no-index", "--no-deps", *options, str(what)]
        print(f"PATH={environment['PATH']}\n$ pip {' '.join(command[3:])}", flush=True)
        done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
        print(*(f"  {line}" for line in done.stdout.splitlines()[-1:]), sep="\n", flush=True)
        if done.returncode:
            print(done.stderr)
            return done.returncode
        return subprocess.run([str(python), "-c", CALL], check=False, cwd=folder, env=environment).returncode


def try_them() -> int:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    tag = TARGETS[f"{sys.platform}-{machine}"].tag
    (wheel,) = DIST.glob(f"*-py3-none-{tag}.whl")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST)],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    (sdist,) = DIST.glob("linattn-*.tar.gz")
    return installed(wheel) or installed(sdist, "--no-build-isolation")


def main() -> int:
    if sys.argv[1:2] == ["build"]:
        return build(sys.argv[2:])
    if sys.argv[1:] == ["try"]:
        return try_them()
    sys.exit(f"choose build or try (the compiler of `build` is {ZIG}):\n{__doc__}")


if __name__ == "__main__":
    sys.exit(main())
