"""Everything that is to be done on a GPU, in calls of ten minutes.

What    Call 1: are the kernels of the paper's sizes right, how fast are they as they are, which rows of the launch
        table are the best for heads of 64 and 32, how fast then. Call 2: every kernel in every dtype, streams, graphs,
        the loss of a model beside the CPU's; the other widths of the table. Call 3: the new rows once more, the
        operator beside its rivals at all lengths, generation.
Why     Time on a GPU is short. Each step is a command of its own, with a time of its own: one that fails, hangs or
        crashes leaves the rest theirs, and what it had found is written by then.
How     python -m benchmarks.gpu_all OUT --call 1 [--minutes 9.5]       OUT: a folder for all results
        Between calls put OUT/launch_table.json in the place of linattn/ops/triton/launch_table.json.
        TRITON_INTERPRET=1 python -m benchmarks.gpu_all OUT --call 1 --device cpu --minutes 3     tries the script
Out     In OUT: log.txt, check.json, tune.json, launch_table.json, operator.json, tuned.json, generation.json, as far as
        the call makes them; at the end a line for each step: seconds, exit code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
ROOT = Path(__file__).parents[1]
KEPT = (ROOT / "linattn/ops/triton/launch_table.json", ROOT / "out/tune.json")  # copied to OUT after each step
LATE = 20.0  # seconds that a step has to end in, after its time is over

Step = tuple[str, float, list[str]]  # what it is, its minutes, its command


def steps(call: int, out: Path, device: str) -> list[Step]:
    """{m} in a command: the step's minutes."""
    check = ["benchmarks.gpu_check", "--minutes", "{m}", "--out", str(out / "check.json"), "--device", device]
    bench = ["benchmarks.gpu", "--minutes", "{m}", "--device", device, "--out"]
    tune = ["benchmarks.tune", "--minutes", "{m}", "--log", str(KEPT[1]), "--device", device]
    generate = ["linattn.cli.main", "bench", "generate", "--quick", "--device", device]
    if device == "cpu":
        check, bench, tune = [*check, "--tiny"], [*bench[:-1], "--tiny", "--out"], [*tune, "--tiny", "--no-write"]
    paper = ["--width", "64", "--width", "32"]
    if call == 1:
        return [
            ("check", 1.7, [*check, *paper, "--dtype", "bf16", "--no-special"]),
            ("operator", 1.2, [*bench, str(out / "operator.json")]),
            ("tune", 4.5, [*tune, *paper, "--precision", "bf16"]),
            ("tuned operator", 1.2, [*bench, str(out / "tuned.json")]),
        ]
    if call == 2:
        return [("check", 5.5, check), ("tune", 3.0, [*tune, "--width", "128", "--width", "16", "--width", "256"])]
    return [
        ("check", 1.7, [*check, "--dtype", "bf16"]),
        ("operator", 3.0, [*bench, str(out / "operator.json")]),
        ("generation", 3.7, [*generate, "--out", str(out / "generation.json")]),
    ]


@app.command()
def main(
    out: Annotated[Path, typer.Argument(help="A folder for the results.")],
    call: Annotated[int, typer.Option(min=1, max=3, help="Which of the three.")] = 1,
    minutes: Annotated[float, typer.Option(help="All steps together; each gets its share.")] = 9.5,
    device: Annotated[str, typer.Option(help="cuda, or cpu with TRITON_INTERPRET=1")] = "cuda",
):
    """Check, tune and measure the kernels on this GPU."""
    out.mkdir(parents=True, exist_ok=True)
    begin, todo, said = time.monotonic(), steps(call, out, device), []
    with (out / "log.txt").open("a") as log:
        for n, (name, share, command) in enumerate(todo):
            left = 60 * minutes - (time.monotonic() - begin) - LATE
            mine = left * share / sum(step[1] for step in todo[n:])
            if mine < 15:
                said.append(f"{name}: no time left")
                continue
            words = [sys.executable, "-m", *(w.replace("{m}", f"{mine / 60:.2f}") for w in command)]
            code, seconds = run(words, mine + LATE, log)
            said.append(f"{name}: {seconds:.0f} s of {mine:.0f}, {'ended' if code == 0 else f'exit code {code}'}")
            for file in KEPT:
                if file.exists():
                    shutil.copy(file, out)
        for text in said:
            print(text, flush=True)
            log.write(text + "\n")


def run(command: list[str], seconds: float, log: object) -> tuple[int, float]:
    """Shows and logs what the command says; after its time it is interrupted, then killed with all that it began."""
    begin = time.monotonic()
    print("$", *command[1:], flush=True)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **options)  # type: ignore
    os.set_blocking(process.stdout.fileno(), False)  # type: ignore
    interrupted = False
    while process.poll() is None:
        time.sleep(0.2)
        show(process, log)
        spent = time.monotonic() - begin
        if spent > seconds and not interrupted:
            interrupted = True
            process.send_signal(signal.SIGINT)
        if spent > seconds + LATE / 2:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # workers that were left
    code = process.wait()
    show(process, log)
    return code, time.monotonic() - begin


def show(process: subprocess.Popen[str], log: object) -> None:
    try:
        text = process.stdout.read()  # type: ignore
    except (TypeError, BlockingIOError):  # nothing to read yet
        return
    if text:
        print(text, end="", flush=True)
        log.write(text)  # type: ignore
        log.flush()  # type: ignore


if __name__ == "__main__":
    app()
