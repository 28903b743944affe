"""What the compiler makes of every row of the launch table, without a GPU.

What    Every kernel that a call of the operator would start is compiled for sm_90a, exactly as it would be there: the
        calls are made with tensors on the CPU, and compiled where they would be launched.
Why     Registers, spills and shared memory decide how many programs a multiprocessor holds, and so the speed. They can
        be read before any time on a GPU is spent, and a row that spills is a row to change.
How     TRITON_INTERPRET=0 python -m benchmarks.compile_table [--kernel sweep] [--width 64] [--dtype bf16] [--out FILE]
        A minute for one width, ten for all of them.
Out     A line for each kernel: registers of a thread, bytes spilled, bytes of shared memory, programs that fit one
        multiprocessor of an H100 or H200, and instructions that all warps of a program issue for a token (of the
        longest innermost loop). A multiprocessor issues at most four a cycle, so memory is not all that takes time.
        With --out also as JSON. It ends with 1 where a kernel spills, or turns the result of a product over on its way
        into another one: Triton 3.4 to 3.7 multiplies that wrongly on Hopper.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

TARGET = ("cuda", 90, 32)
REGISTERS, SHARED, WARPS, PROGRAMS, RESERVED = 65536, 233472, 64, 32, 1024  # of a multiprocessor of compute 9.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
WIDTHS = (16, 32, 64, 128, 256)
TURNED = r"tt\.trans [^\n]*tensor<[^>]*#mma\d*> ->"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Row:
    """One compiled kernel. `call` says which call of the operator starts it."""

    kernel: str
    width: int
    dtype: str
    call: str
    warps: int
    registers: int
    spilled: int
    shared: int
    issued: float
    turned: bool = False

    @property
    def programs(self) -> int:
        """How many programs one multiprocessor holds at a time."""
        registers = -(-self.registers // 8) * 8 * 32  # a warp's, in the granularity in which they are given out
        by_shared = SHARED // (self.shared + RESERVED)
        return min(REGISTERS // registers // self.warps, WARPS // self.warps, by_shared, PROGRAMS)


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)


@app.command()
def main(
    kernel: Annotated[list[str] | None, typer.Option(help="Only these kernels.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Only these widths of a head.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp32 or fp16")] = None,
    call: Annotated[list[str] | None, typer.Option(help='Only these calls of the operator, as "whole mean".')] = None,
    out: Annotated[Path | None, typer.Option(help="A .json file.")] = None,
):
    """Compile the launch table for sm_90a, and print what each kernel needs."""
    names = ("warps", "regs", "spill", "shared", "programs", "issued")
    print(f"{'kernel':8} {'width':>5} {'dtype':5} {'call':20}" + "".join(f" {name:>8}" for name in names))
    rows = []
    for row in compiled_rows(kernel, width or WIDTHS, dtype or ("bf16", "fp32"), call):
        rows.append(row)
        print(
            f"{row.kernel:8} {row.width:5} {row.dtype:5} {row.call:20} {row.warps:8} {row.registers:8} {row.spilled:8} "
            f"{row.shared:8} {row.programs:8} {row.issued:8.0f}",
            flush=True,
        )
    if out is not None:
        import triton

        made = {
            "target": "sm_90a",
            "triton": triton.__version__,
            "rows": [asdict(r) | {"programs": r.programs} for r in rows],
        }
        out.write_text(json.dumps(made, indent=1) + "\n")
    bad, turned = [row for row in rows if row.spilled], [row for row in rows if row.turned]
    for row in turned:
        print(f"{row.kernel} {row.width} {row.dtype} {row.call} turns the result of a product over")
    print(f"{len(rows)} kernels, {len(bad)} of them spill")
    raise typer.Exit(1 if bad or turned else 0)


def compiled_rows(kernels: Any, widths: Any, dtypes: Any, chosen: Any) -> Iterator[Row]:
    """Every kernel once for each set of constants, in the order in which calls start them."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise typer.BadParameter("kernels are interpreted here: set TRITON_INTERPRET=0 to compile them")
    from triton.runtime import driver

    from linattn.ops.triton import run

    driver.set_active(NoDevice())  # type: ignore[arg-type]
    launches: list[tuple[Any, Any, Any, int]] = []
    run.launch = lambda kernel, programs, arguments, constants, warps: launches.append(
        (kernel, arguments, constants, warps)
    )
    seen = set()
    for width in widths:
        for dtype in dtypes:
            for name, call in calls(width, DTYPES[dtype]):
                if chosen and name not in chosen:
                    continue
                launches.clear()
                call()
                for kernel, arguments, constants, warps in launches:
                    key = (
                        kernel,
                        tuple(map(str, constants)),
                        warps,
                        tuple(getattr(a, "dtype", None) for a in arguments),
                    )
                    short = kernel.fn.__name__.removesuffix("_kernel")
                    if key in seen or (kernels and short not in kernels):
                        continue
                    seen.add(key)
                    made = kernel.warmup(*arguments, *constants, grid=(1,), num_warps=warps)
                    registers, spilled, loop = resources(made.asm["ptx"])
                    names = list(kernel.signature.parameters)
                    tokens = constants[names.index("BT") - len(arguments)] if "BT" in names else 1
                    issued = loop * warps / tokens
                    turned = re.search(TURNED, made.asm["ttgir"]) is not None
                    yield Row(
                        short, width, dtype, name, warps, registers, spilled, made.metadata.shared, issued, turned
                    )


def calls(width: int, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Calls of the operator that between them start every kernel in its costly form: (what they are, the call)."""
    from linattn.features import resolve
    from linattn.ops import gpu
    from linattn.ops.form import Batch, Form

    def forward_and_backward(rows: int, time: int, causal: bool, normalize: bool, layout: str) -> None:
        def tokens() -> torch.Tensor:
            return torch.empty(rows, time, 1, width, dtype=dtype)

        q, k, v, dout = (tokens() for _ in range(4))
        form = Form(resolve("elu"), 1.0, causal, normalize, None)
        batch = Batch(lengths=torch.full((rows,), time)) if layout == "padded" else Batch()
        out, _, kept = gpu.forward(q, k, v, form, None, batch, False, True)
        gpu.backward(q, k, v, form, None, batch, dout, None, None, out, *kept)

    for normalize in (True, False):
        what = "mean" if normalize else "sum"
        yield f"whole {what}", lambda n=normalize: forward_and_backward(512, 256, True, n, "plain")
        yield f"segments {what}", lambda n=normalize: forward_and_backward(1, 8192, True, n, "plain")
        yield f"long {what}", lambda n=normalize: forward_and_backward(512, 1024, True, n, "plain")
        yield f"full {what}", lambda n=normalize: forward_and_backward(2, 256, False, n, "plain")
    yield "whole mean, lengths", lambda: forward_and_backward(512, 256, True, True, "padded")


def resources(ptx: str) -> tuple[int, int, int]:
    """(registers of a thread, bytes spilled, instructions of the longest innermost loop), as NVIDIA's tools tell."""
    from triton.backends.nvidia.compiler import get_ptxas

    assembler: Any = get_ptxas(TARGET[1])
    path = Path(getattr(assembler, "path", assembler))
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        said = tell(path, "-v", "--gpu-name=sm_90a", source, "-o", binary).stderr
        listing = tell(path.with_name("nvdisasm"), "-c", binary).stdout
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", said))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return registers, spilled, longest_loop(listing)


def tell(*command: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)


def longest_loop(listing: str) -> int:
    """Instructions between a label and a jump back to it, where no other loop lies between."""
    number, labels, loops = 0, {}, []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = number
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            number += 1
            jump = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            if jump and jump[1] in labels:
                loops.append((labels[jump[1]], number))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max((end - begin for begin, end in inner), default=0)


if __name__ == "__main__":
    sys.exit(app())
