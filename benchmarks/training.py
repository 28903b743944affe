"""How fast a training step is, where its time goes, and what bytes and products alone would take.

What    Tokens a second of a run's training step, over the updates that fit the budget; the share of time in the
        operator, in matrix products and elsewhere (torch.profiler, over some further updates); how busy the GPU is; and
        the bound: every kernel of a step at the larger of its bytes over the bandwidth and its operations over the rate
        of products, both measured in the same run (docs/performance.md#a-training-step-of-the-papers-mnist-model).
Why     At width 256 a product reads and writes nearly as long as it multiplies, and norms, residuals and dropout only
        read and write. Without the bound "27% of the matrix peak" says nothing.
How     python -m benchmarks.training mnist [key=value …]           on a GPU; the data is synthetic
        python -m benchmarks.training mnist --assume 4.28e12,790e12   the bound alone, for bytes and operations a second
        python -m benchmarks.training mnist compile=true batch=256
        python -m benchmarks.training mnist --tiny                    tries itself on a CPU
Out     A table, and as JSON in benchmarks/results/ (<date>-<machine>-training.json). The last line is JSON.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.profiler import ProfilerActivity, profile

from linattn.bench.machine import environment
from linattn.bench.report import heading, save_json
from linattn.bench.roofline import bandwidth_of_copy, rate_of_products
from linattn.models import ImageConfig, build
from linattn.nn import Layer
from linattn.train import load_run, override
from linattn.train.trainer import Trainer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
TINY = ("width=16", "num_heads=2", "depth=1", "batch=4", "size=6", "precision=fp32")
CHUNK = 64  # tokens of a chunk of the operator
OPERATOR = (
    "_Attention",
    "_AttentionBackward",
    "_Alone",
    "_AloneBackward",
    "linattn::attention",
    "linattn::attention_backward",
)
OPERATOR += ("aten::scaled_dot_product_attention", "ScaledDotProductFlashAttentionBackward0")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::_scaled_mm")
ADAM, AVERAGE, ROUNDING = 7 * 4, 3 * 4, 4 + 2 + 2 * 4  # bytes a parameter: moved, averaged, rounded to bf16, gradients


@dataclass(frozen=True)
class Kernel:
    """One kernel of a layer, as it could be: numbers of a token read and written, and operations on it."""

    name: str
    numbers: int | float
    flops: int | float = 0


@dataclass(frozen=True)
class Rates:
    """Of this machine: bytes a second of a copy, operations a second of a product."""

    bandwidth: float
    products: float


def kernels(layer: Layer, fused: bool = True) -> list[Kernel]:
    """A layer's training step when nothing is read or written twice that need not be.

    Products and the operator are kernels of their own; bias, activation and its derivative are part of a product;
    dropout, residual and norm are one kernel forward and one backward; x̂ is made again from the output of a norm.
    fused=False: each of them, and the sum of each bias's gradient, is a kernel, as torch's own are.
    """
    w, f, heads = layer.width, layer.hidden, layer.num_heads
    own = heads * layer.key_width  # of queries, as of keys; values may differ
    qkv = own + layer.kv_heads * (layer.key_width + layer.values)
    out = heads * layer.values
    pairs = heads * (2 * CHUNK * (layer.key_width + layer.values) + 4 * layer.key_width * layer.values)
    enter = 2 * f if layer.activation == "swiglu" else f
    made = []
    for name, inner, outer in (("qkv", w, qkv), ("out", out, w), ("enter", w, enter), ("leave", f, w)):
        flops = 2 * inner * outer
        made.append(Kernel(f"{name}", inner + outer, flops))
        again = f if name == "leave" and fused else 0  # what the activation read
        made.append(Kernel(f"{name}, input's gradient", inner + outer + again, flops))
        made.append(Kernel(f"{name}, weight's gradient", inner + outer, flops))
    made += [Kernel("operator", qkv + out, pairs), Kernel("operator, gradients", 2 * qkv + out, 2.5 * pairs)]
    if fused:
        return made + 2 * [Kernel("residual and norm", 3 * w), Kernel("residual and norm, gradient", 4 * w)]
    made += 2 * [Kernel(name, 2 * w) for name in ("dropout", "dropout, gradient", "norm")]
    made += 2 * [Kernel(name, 3 * w) for name in ("residual", "residual, gradient", "norm, gradient")]
    made += [Kernel("activation", 2 * enter), Kernel("activation, gradient", 3 * enter)]
    return [*made, Kernel("biases, gradients", qkv + w + enter + w)]


def bound(
    config: ImageConfig, parameters: int, batch: int, itemsize: int, rates: Rates, fused: bool = True
) -> dict[str, float]:
    """Seconds of a step: all of it, and what of it are products, the operator and the rest."""
    tokens = batch * (config.length - 1)
    parts = {"products": 0.0, "operator": 0.0, "elsewhere": 0.0}
    for kernel in kernels(config.layer, fused):
        seconds = max(kernel.numbers * itemsize / rates.bandwidth, kernel.flops / rates.products)
        kind = "operator" if kernel.name.startswith("operator") else "products" if kernel.flops else "elsewhere"
        parts[kind] += config.depth * tokens * seconds
    ends = 4 * config.layer.width * itemsize + 4 * 3 * config.mixtures * 4  # embedding, head and loss, there and back
    parts["elsewhere"] += tokens * ends / rates.bandwidth
    parts["elsewhere"] += parameters * (ADAM + AVERAGE + ROUNDING) / rates.bandwidth
    return {"seconds": sum(parts.values()), **parts}


def flops_of_token(config: ImageConfig) -> float:
    """Of a training step, products and operator."""
    return config.depth * sum(kernel.flops for kernel in kernels(config.layer))


def measured_rates(device: str) -> Rates:
    if device == "cuda":
        return Rates(bandwidth_of_copy(device), rate_of_products(device))
    return Rates(bandwidth_of_copy(device, 2**25), rate_of_products(device, 512, torch.float32))


@app.command()
def main(
    run: Annotated[str, typer.Argument(help="An experiment: mnist or cifar10.")] = "mnist",
    changes: Annotated[list[str] | None, typer.Argument(help="key=value, as `linattn train` takes them.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Of the experiment: paper or best.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds of updates that are timed.")] = 10.0,
    assume: Annotated[str, typer.Option(help="Print the bound for these rates, and run nothing.")] = "",
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model, to try the script on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Measure a training step."""
    if assume:
        bandwidth, products = map(float, assume.split(","))
        print(bound_in_words(run, recipe, changes or [], Rates(bandwidth, products)))
        return
    about = environment()
    print(heading(about), flush=True)
    trainer = begun(run, recipe, [*(TINY if tiny else ()), *(changes or [])])
    found = measure(trainer, budget)
    print(in_words(found))
    data = {"what": f"training-{run}", "environment": about, "run": trainer.run.to_json(), **found}
    print(f"written: {save_json(data, data['what'], out)}")
    print(json.dumps(found))


def begun(name: str, recipe: str | None, changes: list[str]) -> Trainer:
    """The run's trainer over synthetic images of its model's size, which nothing of a step's time depends on."""
    run = load_run(name, recipe)
    config = run.config()
    assert isinstance(config, ImageConfig)
    height, _, channels = config.shape
    chosen = [f"size={height}", f"channels={channels}", f"num_examples={2 * run.batch}", *changes]
    return Trainer(override(run, ["data=synthetic", *chosen]), None, Path(tempfile.gettempdir()), quiet=True)


def measure(trainer: Trainer, budget: float) -> dict[str, Any]:
    """Speed, shares, and the bound."""
    device, config = trainer.device.type, trainer.model.config
    trainer.update()  # compiles
    trainer.update()
    seconds = step_seconds(trainer, budget)
    parts, busy = shares(trainer, seconds)
    rates = measured_rates(device)
    itemsize = 2 if trainer.run.precision == "bf16" else 4
    least = bound(config, trainer.model.num_parameters, trainer.run.batch, itemsize, rates)
    tokens = trainer.run.batch * (config.length - 1)
    return {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "shares": parts,
        "gpu_busy": busy,
        "bound": least,
        "of_the_bound": least["seconds"] / seconds,
        "of_the_product_rate": flops_of_token(config) * tokens / seconds / rates.products,
        "bound_of_the_product_rate": flops_of_token(config) * tokens / least["seconds"] / rates.products,
        "rates": asdict(rates),
    }


def step_seconds(trainer: Trainer, budget: float) -> float:
    """Seconds of an update, over as many as the budget holds and at least three."""
    wait(trainer)
    begin, steps = time.perf_counter(), 0
    while steps < 3 or time.perf_counter() - begin < budget:
        for _ in range(3):
            trainer.update()
        steps += 3
        wait(trainer)
    return (time.perf_counter() - begin) / steps


def wait(trainer: Trainer) -> None:
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def shares(trainer: Trainer, step: float, updates: int = 3) -> tuple[dict[str, float], float | None]:
    """Of the time in the operator, in products, and elsewhere; and of a step, that the GPU worked (CPU: None)."""
    cuda = trainer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(updates):
            trainer.update()
        wait(trainer)
    events = list(profiled.events() or [])
    if cuda:
        whole = sum(event.time_range.elapsed_us() for event in events if event.device_type.name == "CUDA")
    else:
        whole = sum(event.self_cpu_time_total for event in events)
    operator, products = (sum(took(event, cuda) for event in some) for some in outermost(events))
    parts = {"operator": operator / whole, "products": products / whole}
    parts["elsewhere"] = 1 - sum(parts.values())
    return parts, whole / 1e6 / updates / step if cuda else None


def took(event: Any, cuda: bool) -> float:
    return event.device_time_total if cuda else event.cpu_time_total


def outermost(events: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Events of the operator, and products that are not part of it; none of them within another."""
    operator, products = [], []
    for event in events:
        above = {parent.name for parent in parents(event)}
        if above & {*OPERATOR, *PRODUCTS}:
            continue
        if event.name in OPERATOR:
            operator.append(event)
        elif event.name in PRODUCTS:
            products.append(event)
    return operator, products


def parents(event: Any) -> Iterator[Any]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def bound_in_words(name: str, recipe: str | None, changes: list[str], rates: Rates) -> str:
    """The table of kernels: what a token of a layer costs, in bfloat16; then the step."""
    run = override(load_run(name, recipe), changes)
    config = run.config()
    assert isinstance(config, ImageConfig)
    lines = [f"{'a token of a layer':28}{'bytes':>8}{'flops':>10}{'ns':>8}  bound by"]
    for kernel in kernels(config.layer):
        by_bytes, by_flops = 2e9 * kernel.numbers / rates.bandwidth, 1e9 * kernel.flops / rates.products
        what = "bytes" if by_bytes > by_flops else "operations"
        numbers = f"{2 * kernel.numbers:>8,.0f}{kernel.flops:>10,.0f}{max(by_bytes, by_flops):>8.3f}"
        lines.append(f"{kernel.name:28}{numbers}  {what}")
    tokens, size = run.batch * (config.length - 1), build(config).num_parameters
    for title, fused in (("fused", True), ("a kernel each", False)):
        least = bound(config, size, run.batch, 2, rates, fused)
        share = flops_of_token(config) * tokens / least["seconds"] / rates.products
        parts = ", ".join(f"{part} {1e3 * least[part]:.2f}" for part in ("products", "operator", "elsewhere"))
        lines.append(f"{title}: {1e3 * least['seconds']:.2f} ms a step of {run.batch} images ({parts}),")
        lines.append(f"    {tokens / least['seconds'] / 1e6:.1f} million tokens/s, {share:.0%} of the rate of products")
    return "\n".join(lines)


def in_words(found: dict[str, Any]) -> str:
    parts, least = found["shares"], found["bound"]
    busy = "" if found["gpu_busy"] is None else f"; the GPU is busy {found['gpu_busy']:.0%} of the time"
    return (
        f"{found['tokens_per_second']:,.0f} tokens/s, {1e3 * found['step_seconds']:.2f} ms a step{busy}\n"
        f"operator {parts['operator']:.0%}, products {parts['products']:.0%}, elsewhere {parts['elsewhere']:.0%}\n"
        f"bound {1e3 * least['seconds']:.2f} ms (products {1e3 * least['products']:.2f}, operator "
        f"{1e3 * least['operator']:.2f}, elsewhere {1e3 * least['elsewhere']:.2f}): {found['of_the_bound']:.0%} of it\n"
        f"{found['of_the_product_rate']:.1%} of the rate of products; the bound is "
        f"{found['bound_of_the_product_rate']:.0%} of it"
    )


if __name__ == "__main__":
    app()
