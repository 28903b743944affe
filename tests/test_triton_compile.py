"""The GPU's kernels are compiled for a GPU that is not there: nothing may spill registers into memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not made for this system")
ROOT = Path(__file__).parents[1]


def compiled(*options: str) -> list[list[str]]:
    """The lines of the table, in words. A process of its own: in this one kernels are interpreted."""
    command = [sys.executable, "-m", "benchmarks.compile_table", *options]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    lines = [line.split() for line in run.stdout.splitlines()[1:-1]]
    assert run.returncode == 0, run.stdout + run.stderr
    return lines


def test_sums_of_64_do_not_spill():
    assert len(compiled("--width", "64", "--dtype", "bf16", "--kernel", "sums")) >= 3


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv", "scan"])
def test_narrow_heads_do_not_spill(kernel):
    assert compiled("--width", "16", "--width", "32", "--width", "64", "--dtype", "bf16", "--kernel", kernel)
