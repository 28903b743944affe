"""Finds the rows of the launch table: tile sizes, warps and stages for each kernel, width and precision.

What    For every row a handful of candidates is timed inside the call that starts the kernel; the fastest that gives
        the same numbers is kept. Then widths up to 64 are timed with all gradients in one sweep and in two parts.
Why     The best sizes follow from registers and shared memory in ways that nobody can foresee. They are looked for
        here, once a machine, and never while a program runs. Candidates are few and in the order of their promise:
        what spills least and issues the fewest instructions a token by what the compiler says.
How     python -m benchmarks.tune [--minutes 9] [--workers 12] [--width 64] [--kernel forward]     on a GPU
        It can be stopped and goes on where it was: what was timed is in --log (out/tune.json), a line a candidate.
        All are compiled beside the timing. One that crashes or hangs costs its process, and is no candidate.
        TRITON_INTERPRET=1 python -m benchmarks.tune --device cpu --tiny --no-write      tries the script
Out     linattn/ops/triton/launch_table.json with the machine's name, after each row, and a line for each.
        Then: `make lint test`, `python -m benchmarks.gpu_check`, `python -m benchmarks.gpu`, and commit the table.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.timing import num_sets, replay_time
from benchmarks.workers import Worker, spread
from linattn.ops.triton import table

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
TABLE = Path(table.__file__).with_name("launch_table.json")
KERNELS = ("forward", "sweep", "dq", "dkv", "sums")
WIDTHS = (64, 32, 128, 16, 256)  # what matters most first
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = {
    "forward": (16, 2048, 16),
    "sums": (1, 65536, 16),
    "sweep": (16, 2048, 16),
    "dq": (16, 2048, 16),
    "dkv": (16, 2048, 16),
}


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu with TRITON_INTERPRET=1")] = "cuda",
    minutes: Annotated[float, typer.Option(help="No new candidate is begun after so long.")] = 9.0,
    workers: Annotated[int, typer.Option(help="Processes that compile ahead.")] = 12,
    kernel: Annotated[list[str] | None, typer.Option(help="Only these kernels.")] = None,
    width: Annotated[list[int] | None, typer.Option(help="Only these widths.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="bf16 or fp32")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="One row, short sequences.")] = False,
    write: Annotated[bool, typer.Option(help="Write the table.")] = True,
    log: Annotated[Path, typer.Option(help="What was timed, to go on from.")] = Path("out/tune.json"),
):
    """Tune the launch table on this GPU."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    deadline = time.monotonic() + 60 * minutes
    timed: dict[str, float | str] = json.loads(log.read_text()) if log.exists() else {}
    chosen = [(k, p, w) for p in precision or PRECISIONS for w in width or WIDTHS for k in kernel or KERNELS]
    rows = [row for row in chosen if "sweep" not in row or int(row[2]) <= 64]
    jobs = [(*row, c) for row in (rows[:1] if tiny else rows) for c in candidates(*row)[: 2 if tiny else None]]
    jobs = [job for job in jobs if label(*job) not in timed]
    compiled = compile_beside(device, jobs, workers, deadline)
    timer = Worker(attempt)
    for n, job in enumerate(jobs):
        while time.monotonic() < deadline and not compiled(job):
            time.sleep(0.1)
        if time.monotonic() > deadline:
            print("out of time: call again, and it goes on from here")
            break
        given = (*job, table._table(), device, tiny)
        result, said = timer.ask(given, 60.0) if device == "cuda" else (attempt(given), "")
        timed[label(*job)] = said or result
        print(f"{label(*job):32} {said or told(result)}", flush=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(timed, indent=0))
        if n + 1 == len(jobs) or jobs[n + 1][:3] != job[:3]:
            keep_best(*job[:3], timed)
            choose_sweep(timed)
            if write:
                save(device)
    timer.end()


def told(result: float | str) -> str:
    return result if isinstance(result, str) else f"{result * 1e6:10.1f} us"


NARROW_TILES = {  # (tokens, block, warps, stages) of heads up to 64, in bfloat16
    "forward": [(64, 0, 4, 3), (64, 0, 4, 2), (32, 0, 4, 3), (64, 0, 8, 2), (128, 0, 8, 2), (128, 0, 4, 2)],
    "sums": [(64, 0, 4, 3), (128, 0, 4, 2), (128, 0, 8, 2), (32, 0, 4, 3), (64, 0, 2, 3)],
    "sweep": [(64, 0, 4, 2), (32, 0, 4, 2), (64, 0, 4, 1), (64, 0, 8, 2)],
    "dq": [(64, 0, 4, 2), (64, 0, 4, 1), (64, 0, 8, 2), (32, 0, 4, 2), (128, 0, 8, 1)],
    "dkv": [(64, 0, 4, 2), (64, 0, 4, 1), (64, 0, 8, 2), (32, 0, 4, 2), (128, 0, 8, 1)],
}
TWO_WARPS = [(32, 0, 2, 2), (32, 0, 2, 3), (32, 0, 2, 1), (64, 0, 2, 2)]  # where the whole state fits two warps
WIDE_TILES = [(64, 64, 8, 2), (64, 64, 4, 2), (32, 64, 8, 2), (64, 64, 8, 1), (64, 0, 8, 2), (64, 0, 8, 1)]
WIDEST_TILES = [(32, 64, 8, 1), (64, 64, 8, 1), (32, 32, 8, 1), (32, 32, 4, 1), (16, 64, 8, 1), (64, 32, 4, 1)]
FLOAT_TILES = [(32, 0, 4, 2), (32, 0, 4, 1), (64, 0, 8, 1), (16, 0, 4, 1), (32, 64, 8, 1), (16, 32, 8, 1)]


def candidates(kernel: str, precision: str, width: int) -> list[tuple[int, int, int, int]]:
    """(tokens, block, warps, stages), the row that the table has first."""
    now = tuple(table._table()["tiles"][kernel][precision].get(str(width), ()))
    if precision == "fp32":
        made = [c for c in FLOAT_TILES if (c[1] == 0) == (width <= 64)]
    elif width <= 64:
        made = TWO_WARPS * (width <= 32) + NARROW_TILES[kernel]
    else:
        made = WIDE_TILES if width == 128 else WIDEST_TILES
    return [*([now] if now else []), *(c for c in made if c != now)]  # type: ignore[list-item]


def label(kernel: str, precision: str, width: int, candidate: tuple[int, ...]) -> str:
    return f"{kernel} {precision} {width} {' '.join(map(str, candidate))}"


def put(kernel: str, precision: str, width: int, candidate: tuple[int, ...]) -> None:
    """Into the table that this process uses."""
    from linattn.ops.triton import run

    rows = table._table()
    rows["tiles"][kernel][precision][str(width)] = list(candidate)
    rows["sweep"] = 64 if kernel == "sweep" else 0 if kernel in ("dq", "dkv") else rows["sweep"]
    for cached in (table.tile, table.filling, table.widest_sweep, run.plan):
        cached.cache_clear()


def attempt(job: tuple[str, str, int, tuple[int, ...], dict[str, Any], str, bool]) -> float | str:
    """Seconds of a call, or why there is none. The job brings the table as it is by now."""
    kernel, precision, width, candidate, rows, device, tiny = job
    table._table().update(rows)
    want = call(kernel, precision, width, device, tiny, seed=0)()
    before, sweep = table._table()["tiles"][kernel][precision][str(width)], table._table()["sweep"]
    try:
        put(kernel, precision, width, candidate)
        got = call(kernel, precision, width, device, tiny, seed=0)()
        for g, w in zip(got, want, strict=True):
            error, scale = (g.float() - w.float()).abs().max().item(), w.float().abs().max().item()
            if not error <= 0.03 * scale:
                return f"wrong: error {error:.1e} on a signal of {scale:.1e}"
        sets = num_sets(sum(g.nbytes for g in got) * 2, device)
        return replay_time([call(kernel, precision, width, device, tiny, seed=n) for n in range(sets)], device, 0.05)
    except Exception as error:  # too much shared memory, or the compiler gives up: not a candidate
        return f"{type(error).__name__}: {str(error)[:120]}"
    finally:
        put(kernel, precision, width, tuple(before))
        table._table()["sweep"] = sweep


def call(kernel: str, precision: str, width: int, device: str, tiny: bool, seed: int) -> Callable[[], Any]:
    """A call that starts the kernel. Forward passes for `forward` and `sums`, backward passes for the others."""
    from linattn.features import resolve
    from linattn.ops import gpu
    from linattn.ops.form import Batch, Form

    batch, length, heads = (1, 100, 1) if tiny else SHAPES[kernel]
    torch.manual_seed(seed)
    shape = (batch, length, max(1, heads * 64 // width) if not tiny else 1, width)
    made = torch.randn if device != "cpu" or tiny else torch.empty  # on the CPU it is only compiled
    q, k, v, dout = (made(shape, device=device).to(PRECISIONS[precision]) for _ in range(4))
    form, none = Form(resolve("elu"), 1.0, True, True, None), Batch()
    if kernel in ("forward", "sums"):
        return lambda: gpu.forward(q, k, v, form, None, none, False, False)[:1]
    out, _, kept = gpu.forward(q, k, v, form, None, none, False, True)
    return lambda: gpu.backward(q, k, v, form, None, none, dout, None, None, out, *kept)[:3]


def compile_beside(device: str, jobs: list[Any], workers: int, deadline: float) -> Callable[[Any], bool]:
    """In processes of their own, into Triton's cache on disk, for the device that is here -> whether a job is done."""
    if torch.device(device).type != "cuda" or workers < 2 or not jobs:
        return lambda job: True
    major, minor = torch.cuda.get_device_capability()
    done: set[str] = set()

    def work() -> None:
        for job, _, _ in spread(compile_one, [(10 * major + minor, *job) for job in jobs], workers, 120.0, deadline):
            done.add(label(*job[1:]))

    threading.Thread(target=work, daemon=True).start()
    return lambda job: label(*job) in done


def compile_one(job: tuple[int, str, str, int, tuple[int, ...]]) -> None:
    from triton.runtime import driver

    from benchmarks import compile_table
    from linattn.ops.triton import run

    architecture, kernel, precision, width, candidate = job
    compile_table.TARGET = ("cuda", architecture, 32)
    driver.set_active(compile_table.NoDevice())  # type: ignore[arg-type]

    def compile_only(started: Any, programs: int, arguments: Any, constants: Any, warps: int) -> None:
        if started.fn.__name__.startswith(kernel):
            started.warmup(*arguments, *constants, grid=(programs,), num_warps=warps)

    run.launch = compile_only
    put(kernel, precision, width, candidate)
    try:
        call(kernel, precision, width, "cpu", False, 0)()
    except Exception as error:  # told again, and noted, where the candidate is timed
        print(f"{label(kernel, precision, width, candidate)}: {type(error).__name__}", flush=True)


def measured(
    kernel: str, precision: str, width: int, timed: dict[str, float | str]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    begin = f"{kernel} {precision} {width} "
    for name, seconds in timed.items():
        if name.startswith(begin) and isinstance(seconds, float):
            yield seconds, tuple(int(n) for n in name.removeprefix(begin).split())


def keep_best(kernel: str, precision: str, width: int, timed: dict[str, float | str]) -> None:
    best = min(measured(kernel, precision, width, timed), default=None)
    if best is None:
        print(f"{kernel} {precision} {width}: no candidate ran; the row stays")
        return
    sweep = table._table()["sweep"]
    put(kernel, precision, width, best[1])
    table._table()["sweep"] = sweep
    print(f"{kernel} {precision} {width}: {best[1]}", flush=True)


def choose_sweep(timed: dict[str, float | str]) -> None:
    """One sweep up to the widest heads for which it is faster than both parts (each timed with the other's row)."""
    for width in (64, 32, 16):
        one, two = (min(measured(k, "bf16", width, timed), default=None) for k in ("sweep", "dkv"))
        if one is not None and two is not None:
            faster = one[0] <= two[0]
            table._table()["sweep"] = width if faster else min(table._table()["sweep"], width // 2)
            if faster:
                return


def save(device: str) -> None:
    rows = table._table()
    cuda = torch.device(device).type == "cuda"
    rows["machine"] = torch.cuda.get_device_name() if cuda else "interpreted: these rows mean nothing"
    text = json.dumps(rows, indent=2)
    for _ in range(2):  # a row on one line
        text = text.replace("[\n", "[").replace("\n          ]", "]")
    lines, inside = [], False
    for line in text.splitlines():
        if inside:
            lines[-1] += " " * (not lines[-1].endswith("[")) + line.strip()
        else:
            lines.append(line)
        inside = lines[-1].count("[") > lines[-1].count("]")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app()
