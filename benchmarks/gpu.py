"""The operator on a GPU, beside its floor and its rivals.

What    The paper's operator (elu + 1, causal, normalised) in bfloat16, forward and forward + backward, at the sizes of
        training and from 32 to a million tokens. Beside it: the floor, a torch copy of the bytes that any exact
        implementation must move; softmax by flash attention and by cuDNN; flash-linear-attention where it is
        installed, with the normaliser and the map as its users write them, and bare.
Why     Linear attention in linear time is worth little if softmax is faster. Ratios to the floor say how much is left.
How     python -m benchmarks.gpu [--minutes 8]          on one GPU; with --device cpu --tiny it tries itself
        Run `python -m benchmarks.gpu_check` first: a fast wrong kernel is not fast.
Out     A line for each size and pass: milliseconds, ours over the floor, each rival over ours, then eager wall times.
        All of it as JSON in benchmarks/results/ (<date>-<machine>-operator.json).
Times   Kernel times are medians of graph replays with the cache cold (benchmarks/timing.py).
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import elu, scaled_dot_product_attention

from benchmarks.timing import backward_bytes, floor_time, forward_bytes, num_sets, replay_time, wall_time
from benchmarks.workers import Worker
from linattn import linear_attention
from linattn.bench.machine import environment
from linattn.bench.report import heading, save_json

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LONGEST = 0.3  # seconds: a rival that would take longer (4 times the time for twice the tokens) is left out
OURS = "linattn"
Before = dict[tuple[Any, ...], float]


@dataclass(frozen=True)
class Size:
    batch: int
    heads: int
    tokens: int
    width: int


TRAINING = (Size(8, 16, 2048, 64), Size(8, 16, 8192, 64), Size(4, 16, 8192, 128), Size(256, 8, 784, 32))
TRAINING += (Size(16, 8, 3072, 32), Size(1, 16, 65536, 64), Size(1, 8, 65536, 64))
SHORT = tuple(Size(8, 16, n, 64) for n in (32, 64, 128, 256, 512, 1024))
LONG = tuple(Size(1, 16, 2**n, 64) for n in range(12, 21, 2))
TINY = (Size(1, 2, 64, 16), Size(1, 1, 100, 32))


@dataclass(frozen=True)
class Row:
    """What was measured at one size: seconds, by name. `wall` are eager calls with Python's work."""

    size: Size
    mode: str
    floor: float
    seconds: dict[str, float]
    wall: dict[str, float]
    missing: dict[str, str]


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu with TRITON_INTERPRET=1 to try the script")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="Two tiny sizes.")] = False,
    minutes: Annotated[float, typer.Option(help="No new size is begun after so long.")] = 8.0,
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Measure the operator on a GPU."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    about, begin, rows, worker = environment(), time.monotonic(), [], Worker(measure)
    print(heading(about), flush=True)
    before: Before = {}
    for size in TINY if tiny else (*TRAINING, *SHORT, *LONG):
        if time.monotonic() - begin > 60 * minutes:
            print("out of time: the sizes that are left were not measured")
            break
        for mode in ("forward", "forward+backward"):
            job = (size, mode, device, before)
            row, said = worker.ask(job, 90.0) if device == "cuda" else (measure(job), "")
            row = row or Row(size, mode, float("nan"), {}, {}, {OURS: said})
            before |= {before_key(name, row): t for name, t in row.seconds.items()}
            rows.append(row)
            print(line(row), flush=True)
            save_json({"environment": about, "rows": [asdict(row) for row in rows]}, "operator", out)
    worker.end()
    print(f"written: {save_json({'environment': about, 'rows': [asdict(row) for row in rows]}, 'operator', out)}")


def before_key(name: str, row: Row) -> tuple[Any, ...]:
    return name, row.mode, row.size.batch, row.size.heads, row.size.width


def measure(job: tuple[Size, str, str, Before]) -> Row:
    """In a process of its own: a rival or a kernel that loses the device costs its row. The job brings what each rival
    took before, to guess what it would take next."""
    size, mode, device, before = job
    shape, backward = (size.batch, size.heads, size.tokens, size.width), mode != "forward"
    num_bytes = forward_bytes(*shape, itemsize=2) + backward_bytes(*shape, itemsize=2) * backward
    sets = num_sets(forward_bytes(*shape, itemsize=2), device)
    seconds, wall, missing = {}, {}, {}
    for name, attend, heads_first in rivals(device):
        key = (name, mode, size.batch, size.heads, size.width)
        if heads_first and before.get(key, 0.0) > LONGEST / 16:
            missing[name] = f"would take more than {LONGEST} s"
            continue
        try:
            runs = [prepare(attend, size, device, heads_first, backward) for _ in range(sets)]
            seconds[name] = replay_time(runs, device)
            wall[name] = wall_time(runs[0], device, calls=20 if seconds[name] < 0.01 else 3)
        except (RuntimeError, ImportError, ValueError, AssertionError) as error:
            missing[name] = str(error).strip().partition("\n")[0][:200]
            continue
    return Row(size, mode, floor_time(num_bytes, device), seconds, wall, missing)


def rivals(device: str) -> Iterator[tuple[str, Attend, bool]]:
    """(name, attention, whether it wants heads before time)."""
    yield OURS, lambda q, k, v: linear_attention(q, k, v, impl="triton"), False
    if torch.device(device).type != "cuda":
        yield "softmax", lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), True
        return
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: Any = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        yield name, softmax, True
    for name in ("chunk_linear_attn", "fused_chunk_linear_attn"):
        short = "fla " + name.removesuffix("_linear_attn").replace("_", " ")
        yield short, lambda q, k, v, name=name: fla(name)(elu(q) + 1, elu(k) + 1, v, normalize=True)[0], False
        yield short + " bare", lambda q, k, v, name=name: fla(name)(q, k, v, normalize=False)[0], False


def fla(name: str) -> Any:
    return getattr(importlib.import_module("fla.ops.linear_attn"), name)


def prepare(attend: Attend, size: Size, device: str, heads_first: bool, backward: bool) -> Callable[[], Any]:
    """A call on operands of its own."""
    shape = (size.batch, size.tokens, size.heads, size.width)
    shape = (shape[0], shape[2], shape[1], shape[3]) if heads_first else shape
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    if not backward:

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return attend(q, k, v)

        return forward
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


def line(row: Row) -> str:
    size, ours = row.size, row.seconds.get(OURS)
    head = f"{size.batch:4},{size.heads:3},{size.tokens:8},{size.width:4} {row.mode:16} floor {row.floor * 1e3:8.3f} ms"
    if ours is None:
        return f"{head}  {OURS} failed: {row.missing[OURS]}"
    others = "  ".join(f"{name} {t / ours:.2f}x" for name, t in row.seconds.items() if name != OURS)
    walls = "  ".join(f"{name} {t * 1e6:.0f}" for name, t in row.wall.items())
    return f"{head}  ours {ours * 1e3:8.3f} = {ours / row.floor:5.2f} x floor   {others}   wall us: {walls}"


if __name__ == "__main__":
    app()
