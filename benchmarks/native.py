"""The operator on the CPU, in the native library: how fast, beside what anyone can install, and beside the machine.

What    Forward and with gradients, float32, causal, D = 64: linattn's native library, its form in plain torch, torch's
        softmax (SDPA), and where `pip install onnxruntime onnx` was done, onnxruntime's LinearAttention (com.microsoft:
        forward only, without map and normaliser). Then a training step of the paper's MNIST model: native, chunked,
        with softmax, and with attention replaced by something free, which is the bound. One head of a long sequence,
        in parts on two threads. A piece of a stream through the speech model, by torch and natively.
Why     The targets: forward 1.5 times the fastest rival to T = 1,024 and twice from 2,048 on, at 40% of this machine's
        own rate of sgemm at least, counting only the 4·D·M flops a token and head that any form needs; with gradients
        2.5 times plain torch; never slower than softmax; a training step at 75% of the bound.
How     python benchmarks/native.py [--quick] [--only operator|training|parts|speech]
Out     A table, and all numbers as JSON in benchmarks/results/ (<date>-<machine>-native.json).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

import linattn.nn.attention as layers
from linattn import ImageModel, SpeechModel, backends, linear_attention
from linattn.bench.machine import environment
from linattn.bench.measure import Effort, Run, race
from linattn.bench.report import heading, save_json, seconds_in_words
from linattn.generate.native import SpeechStep
from linattn.models.presets import preset

SIZES = ((1, 32), (1, 64), (1, 128), (1, 256), (1, 512), (8, 512), (1, 1024), (8, 1024), (1, 2048), (8, 2048))
SIZES += ((1, 4096), (1, 8192), (1, 16_384))
HEADS, WIDTH = 8, 64
OURS, TORCH, SOFTMAX, ONNX = "native", "chunked", "softmax", "onnxruntime"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, short measurements.")] = False,
    only: Annotated[str, typer.Option(help="operator, training, parts, speech, or all of it.")] = "all",
):
    about = environment()
    print(heading(about), "\n", backends()["native"][1], sep="")
    found: dict[str, Any] = {"environment": about, "native": backends()["native"][1], "operator": [], "training": []}
    found |= {"parts": [], "speech": []}
    found["onnxruntime"] = (
        importlib.util.find_spec("onnxruntime") and importlib.import_module("onnxruntime").__version__
    )
    effort = Effort(0.05 if quick else 0.15, least=3, once=1.0)
    if only in ("all", "operator"):
        rate = sgemm_rate(effort)
        found["sgemm_flops"] = rate
        print(f"sgemm {rate / 1e9:.0f} GF/s")
        for row in operator_rows(SIZES[1:9:3] if quick else SIZES, effort, rate):
            found["operator"].append(row)
            print(shown(row), flush=True)
    if only in ("all", "training"):
        for batch in (1,) if quick else (1, 8):
            row = training_row(batch, effort)
            found["training"].append(row)
            print(shown(row), flush=True)
    if only in ("all", "parts"):
        for gradients in (False, True):
            row = parts_row(2048 if quick else 16_384, gradients, effort)
            found["parts"].append(row)
            print(shown(row), flush=True)
    if only in ("all", "speech"):
        for frames in (10,) if quick else (4, 10, 40, 80):
            row = speech_row(frames, effort)
            found["speech"].append(row)
            print(shown(row), flush=True)
    print(f"\nwritten: {save_json(found, 'native-quick' if quick else 'native')}")


def sgemm_rate(effort: Effort) -> float:
    """Flops a second of this machine's own float32 product of matrices."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / race({"sgemm": lambda: a @ a}, effort)["sgemm"].seconds


def operator_rows(sizes: tuple[tuple[int, int], ...], effort: Effort, rate: float) -> Iterator[dict[str, Any]]:
    for batch, time in sizes:
        q, k, v = torch.randn(3, batch, time, HEADS, WIDTH)
        runs: dict[str, Run] = {name: forward_of(name, q, k, v) for name in (OURS, TORCH)}
        if time <= 4096:
            runs[SOFTMAX] = forward_of(SOFTMAX, q, k, v)
        if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
            runs[ONNX] = onnx_run(q, k, v)
        row = {"mode": "forward", "batch": batch, "heads": HEADS, "tokens": time, "width": WIDTH} | timed(runs, effort)
        yield row | {"of_sgemm": 4 * WIDTH**2 * batch * HEADS * time / row["seconds"][OURS] / rate}
        leaves = [x.requires_grad_() for x in (q, k, v)]
        names = (OURS, TORCH, SOFTMAX) if time <= 2048 else (OURS, TORCH)
        runs = {name: with_gradients(forward_of(name, *leaves), leaves, torch.randn_like(v)) for name in names}
        yield {"mode": "gradients", "batch": batch, "heads": HEADS, "tokens": time, "width": WIDTH} | timed(
            runs, effort
        )


def timed(runs: dict[str, Run], effort: Effort) -> dict[str, Any]:
    for run in runs.values():
        run()  # what is loaded at the first call is nobody's time
    seconds = {name: cell.seconds for name, cell in race(runs, effort).items()}
    rivals = {name: value / seconds[OURS] for name, value in seconds.items() if name != OURS}
    return {"seconds": seconds, "times_faster": rivals}


def forward_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    def softmax() -> torch.Tensor:
        of_q, of_k, of_v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(of_q, of_k, of_v, is_causal=True).transpose(1, 2)

    return softmax if name == SOFTMAX else lambda: linear_attention(q, k, v, impl=name)


def with_gradients(run: Run, leaves: list[torch.Tensor], g: torch.Tensor) -> Run:
    return lambda: torch.autograd.grad(run(), leaves, g)


def onnx_run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """onnxruntime's operator on the same numbers, checked once against ours without map and normaliser."""
    import numpy as np
    import onnxruntime  # pyright: ignore[reportMissingImports]
    from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]

    names, shape = ("q", "k", "v"), (*q.shape[:2], q.shape[2] * q.shape[3])
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
    out = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("out", "state")]
    options = {"q_num_heads": q.shape[2], "kv_num_heads": k.shape[2], "update_rule": "linear", "scale": 1.0}
    node = helper.make_node("LinearAttention", names, ["out", "state"], domain="com.microsoft", **options)
    imports = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "attention", given, out), opset_imports=imports, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it would take the next rival's cores
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])
    feeds = {name: x.detach().reshape(shape).numpy() for name, x in zip(names, (q, k, v), strict=True)}
    want = linear_attention(q.detach(), k.detach(), v.detach(), feature_map="identity", normalize=False)
    got = np.asarray(session.run(["out"], feeds)[0]).reshape(want.shape)
    assert np.abs(got - want.numpy()).max() < 1e-4 * want.abs().max().item(), "onnxruntime computes something else"
    return lambda: session.run(["out"], feeds)


def training_row(batch: int, effort: Effort) -> dict[str, Any]:
    """One step of the paper's MNIST model: loss, gradients, RAdam."""
    values = torch.randint(0, 256, (batch, 784))
    effort = dataclasses.replace(effort, budget=4 * effort.budget, once=5.0)
    runs = {name: training_step(name, values) for name in (OURS, TORCH, SOFTMAX, "free")}
    row = timed(runs, effort)
    return {"mode": "training", "batch": batch, "tokens": 784} | row | {"of_bound": row["times_faster"]["free"]}


def training_step(name: str, values: torch.Tensor) -> Run:
    torch.manual_seed(0)
    kind = "softmax" if name == SOFTMAX else "linear"
    config = preset("mnist", attention=kind, dropout=0.0)
    model = ImageModel(config)  # type: ignore[arg-type]
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-4)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        options["impl"] = name
        return v if name == "free" else linear_attention(q, k, v, **options)

    def step():
        before = layers.linear_attention
        layers.linear_attention = attention
        try:
            nats, _ = model.nats(values)
            nats.mean().backward()
        finally:
            layers.linear_attention = before
        optimizer.step()
        optimizer.zero_grad()

    return step


def parts_row(time: int, gradients: bool, effort: Effort) -> dict[str, Any]:
    """One head, which two threads share by cutting the sequence."""
    q, k, v = torch.randn(3, 1, time, 1, WIDTH)
    leaves = [x.requires_grad_(gradients) for x in (q, k, v)]
    run = forward_of(OURS, q, k, v)
    run = with_gradients(run, leaves, torch.randn_like(v)) if gradients else run

    def on(threads: int) -> Run:
        def call() -> Any:
            torch.set_num_threads(threads)
            return run()

        return call

    before = torch.get_num_threads()
    row = timed({OURS: on(2), "one thread": on(1)}, effort)
    torch.set_num_threads(before)
    return {"mode": "parts" + " f+b" * gradients, "batch": 1, "heads": 1, "tokens": time, "width": WIDTH} | row


def speech_row(frames: int, effort: Effort) -> dict[str, Any]:
    """So many frames of 10 ms, one piece of a stream."""
    torch.manual_seed(0)
    model = SpeechModel(preset("transcriber")).eval()  # type: ignore[arg-type]
    x = torch.randn(1, frames, model.config.num_features)

    def stream(step: Any) -> Run:
        state = [model.empty_state(1)]

        @torch.no_grad()
        def call() -> None:
            _, state[0] = step(x, state[0])

        return call

    runs = {OURS: stream(SpeechStep(model)), "torch": stream(lambda x, state: model(x, state, donate=True))}
    return {"mode": "speech", "batch": 1, "tokens": frames} | timed(runs, effort)


def shown(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {seconds_in_words(value)}" for name, value in row["seconds"].items())
    ratios = "  ".join(f"{value:.2f}× {name}" for name, value in row["times_faster"].items())
    of = f"   {row['of_sgemm']:.0%} of sgemm" if "of_sgemm" in row else ""
    return f"{row['mode']:9} B {row['batch']} T {row['tokens']:6,}:  {times}   ours: {ratios}{of}"


if __name__ == "__main__":
    typer.run(main)
