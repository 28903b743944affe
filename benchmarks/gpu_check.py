"""Whether the GPU's kernels are right, on the GPU: every row of the launch table against float64, in one call.

What    Outputs, final states and every gradient of every kernel (head widths, dtypes, maps, causal or not, in segments
        or whole, padded, packed, with a state or without), compared with the definition in float64 on the CPU. What may
        be lost is measured: at most twice (float32: eight times) what the plain torch form loses in the same dtype.
        Then what only a GPU can show: two streams, two threads, CUDA graphs, no waiting for the device, another device
        than the first, tensors over 2^31 elements, a small model trained as on the CPU.
Why     The interpreter runs the kernels' source with numpy. Layouts, narrow products, races and the compiler's mistakes
        (Triton 3.4 to 3.7 on Hopper: wrong products of transposed products) exist on the device alone.
How     python -m benchmarks.gpu_check [--seed N] [--workers 12] [--minutes 8] [--width 64] [--dtype bf16]
        TRITON_INTERPRET=1 python -m benchmarks.gpu_check --device cpu --tiny       tries the script
        compute-sanitizer python -m benchmarks.gpu_check --workers 1 --sanitize     out-of-bounds accesses, once a table
        What matters most comes first. A check that crashes its process, or hangs, fails; the others go on.
Out     Its seed, a line for each check, and a table of the largest error over the allowed one (1 is the limit) by
        dtype, width and way. All checks as JSON (--out FILE), written as they end. It ends with 1 if one failed.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.workers import spread

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracle

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTHS = ((64, 64), (32, 32), (128, 128), (16, 16), (24, 40), (48, 100), (100, 64), (256, 256), (192, 256))
# way: (batch, time, heads, key heads, causal, layout)
WAYS: dict[str, tuple[int, int, int, int, bool, dict[str, list[int]]]] = {
    "whole": (8, 100, 6, 3, True, {}),
    "long": (34, 650, 6, 6, True, {}),
    "segments": (1, 1500, 2, 1, True, {}),
    "full": (2, 600, 4, 2, False, {}),
    "padded": (3, 1300, 2, 2, True, {"lengths": [1300, 0, 777]}),
    "packed": (1, 1700, 2, 1, True, {"cu_seqlens": [0, 1, 1, 1100, 1690]}),
    "padded full": (3, 150, 2, 2, False, {"lengths": [150, 0, 33], "q_lengths": [9, 150, 0]}),
    "packed full": (1, 300, 2, 2, False, {"cu_seqlens": [0, 1, 1, 200, 290]}),
}


@dataclass(frozen=True)
class Check:
    """One call of the operator. `seed` makes its numbers."""

    way: str
    width: int
    values: int
    dtype: str
    feature_map: str
    normalize: bool
    stateful: bool
    seed: int


@dataclass(frozen=True)
class Verdict:
    """ratios: of each tensor, its error over what it may be; 1 is the limit."""

    name: str
    ratios: dict[str, float] = field(default_factory=dict)
    said: str = ""
    check: Check | None = None
    curves: dict[str, list[float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.said and all(ratio <= 1 for ratio in self.ratios.values())


@app.command()
def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu with TRITON_INTERPRET=1")] = "cuda",
    seed: Annotated[int | None, typer.Option(help="Default: a fresh one.")] = None,
    workers: Annotated[int, typer.Option(help="Processes, which compile beside each other.")] = 12,
    minutes: Annotated[float, typer.Option(help="No new check is begun after so long.")] = 8.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="A few short calls.")] = False,
    sanitize: Annotated[bool, typer.Option("--sanitize", help="Small, for compute-sanitizer.")] = False,
    width: Annotated[list[int] | None, typer.Option(help="Only heads of so many features.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only these: bf16, fp16, fp32.")] = None,
    special: Annotated[bool, typer.Option(help="Streams, threads, graphs, training too.")] = True,
    out: Annotated[Path | None, typer.Option(help="A .json file.")] = None,
):
    """Check the GPU's kernels against float64."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    print(f"seed {seed}", flush=True)
    until, verdicts, curves = time.monotonic() + 60 * minutes, [], {}
    few = all_checks(seed)[:: 37 if tiny else 3 if sanitize else 1]
    few = [c for c in few if c.width in (width or [c.width]) and c.dtype in (dtype or [c.dtype])]
    jobs: list[Any] = [(check, device, tiny or sanitize) for check in few]
    if special and device == "cuda" and not sanitize:
        jobs += list(SPECIAL)
    for verdict in verdicts_of(jobs, workers if device == "cuda" else 1, until):
        verdicts.append(verdict)
        print(line(verdict), flush=True)
        curves |= verdict.curves
        if out is not None:
            save(out, {"seed": seed, "not_begun": len(jobs) - len(verdicts), "curves": curves}, verdicts)
    print(summary(verdicts))
    failed = sum(not v.passed for v in verdicts)
    print(f"{len(verdicts)} checks, {failed} failed, {len(jobs) - len(verdicts)} not begun, seed {seed}")
    raise typer.Exit(1 if failed else 0)


def save(out: Path, about: dict[str, Any], verdicts: list[Verdict]) -> None:
    from linattn.bench.machine import environment

    made = [asdict(v) | {"passed": v.passed} for v in verdicts]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"environment": environment(), **about, "checks": made}, indent=1) + "\n")


def line(verdict: Verdict) -> str:
    largest = max(verdict.ratios.values(), default=0.0)
    found = verdict.said or (worst(verdict) if not verdict.passed else f"{largest:.2f}" if verdict.ratios else "")
    return f"{'ok    ' if verdict.passed else 'FAILED'} {verdict.name}: {found}"


def all_checks(seed: int) -> list[Check]:
    """Every way at every width in every dtype; map, normaliser and state move on with them."""
    made = []
    for n, ((width, values), dtype, way) in enumerate(itertools.product(WIDTHS, DTYPES, WAYS)):
        name = oracle.ELEMENTWISE[(n + n // len(WAYS)) % len(oracle.ELEMENTWISE)]
        made.append(Check(way, width, values, dtype, name, n % 4 != 1, n % 3 == 0, seed + n))
    order = list(DTYPES)
    return sorted(made, key=lambda c: (order.index(c.dtype) > 0, c.width > 128))  # bfloat16 first, the widest last


def verdicts_of(jobs: list[Any], workers: int, until: float) -> Iterator[Verdict]:
    """In processes of their own, in the order in which they end; in this one where there is but one worker."""
    if workers == 1:
        yield from (run_job(job) for job in jobs if time.monotonic() < until)
        return
    for job, verdict, said in spread(run_job, jobs, workers, seconds=150.0, until=until):
        if verdict is None:
            verdict = Verdict(job, said=said) if isinstance(job, str) else Verdict(named(job[0]), {}, said, job[0])
        yield verdict


def named(check: Check) -> str:
    return f"{check.way} {check.feature_map} D{check.width} M{check.values} {check.dtype} seed {check.seed}"


def run_job(job: tuple[Check, str, bool] | str) -> Verdict:
    if isinstance(job, str):
        return guarded(job, SPECIAL[job])
    check, device, small = job
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return Verdict(named(check), compare(check, device, small), check=check)
    except Exception as error:  # one failure must not hide the others
        return Verdict(named(check), said=f"{type(error).__name__}: {str(error)[:300]}", check=check)


def compare(check: Check, device: str, small: bool) -> dict[str, float]:
    """-> of each tensor the operator makes, its error over the allowed one."""
    options, x = make(check, small)
    got = {n: t.cpu() for n, t in ours({n: t.to(device, copy=True) for n, t in x.items()}, check, options).items()}
    arrays = {n: t.double().numpy() for n, t in x.items()}
    exact = oracle.attend(arrays, check.feature_map, **options)
    plain = {n: torch.from_numpy(a) for n, a in oracle.attend(rounded(arrays), check.feature_map, **options).items()}
    if check.dtype != "fp32":
        plain = narrow(x, check, options)
    factor = 8.0 if check.dtype == "fp32" else 2.0
    return {n: judged(t, torch.from_numpy(exact[n]), plain[n], DTYPES[check.dtype], factor) for n, t in got.items()}


def judged(got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype, factor: float) -> float:
    scale = exact.abs().max().item()
    if scale < 1e-9:
        return 0.0 if got.abs().max().item() < 1e-4 else float("inf")
    allowed = factor * (plain.double() - exact).abs().max().item() + torch.finfo(dtype).eps * scale
    error = (got.double() - exact).abs().max().item()
    return error / min(allowed, 0.1 * scale) if np.isfinite(error) else float("inf")


def rounded(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def make(check: Check, small: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    batch, length, heads, key_heads, causal, layout = WAYS[check.way]
    if small:
        batch, length = min(batch, 3), length if layout else min(length, 130)
    rows = len(layout["cu_seqlens"]) - 1 if "cu_seqlens" in layout else batch
    random, dtype = torch.Generator().manual_seed(check.seed), DTYPES[check.dtype]

    def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    sums = (rows, key_heads, check.width)
    x = {
        "q": normal(batch, length, heads, check.width),
        "k": normal(batch, length, key_heads, check.width),
        "v": normal(batch, length, key_heads, check.values),
        "g": normal(batch, length, heads, check.values),
        "kv": normal(*sums, check.values, dtype=torch.float32) * check.stateful,
        "z": (normal(*sums, dtype=torch.float32).abs() + 0.5) * check.stateful,
        "g_kv": normal(*sums, check.values, dtype=torch.float32),
        "g_z": normal(*sums, dtype=torch.float32) * check.normalize,
    }
    options = {"causal": causal, "normalize": check.normalize, **layout}
    return options | {"eps": 0.5 if check.normalize and check.feature_map == "identity" else None}, x


def ours(x: dict[str, torch.Tensor], check: Check, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    from linattn import State, linear_attention

    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]
    state = None
    if check.stateful:
        leaves += [x[name].requires_grad_() for name in ("kv", "z")[: 1 + check.normalize]]
        state = State(*leaves[3:])
    ends = {name: torch.tensor(cuts, device=x["q"].device) for name, cuts in layout_of(options).items()}
    out, end = linear_attention(
        *leaves[:3], feature_map=check.feature_map, impl="triton", state=state, return_state=True, **(options | ends)
    )
    made = {"out": out, **{name: x for name, x in end.tensors().items() if name in ("kv", "z")}}
    grads = torch.autograd.grad(list(made.values()), leaves, [x[c] for c in ("g", "g_kv", "g_z")[: len(made)]])
    named = zip(("dq", "dk", "dv", "dkv", "dz"), grads, strict=False)
    return {name: t.detach() for name, t in made.items()} | dict(named)


def layout_of(options: dict[str, Any]) -> dict[str, list[int]]:
    return {name: value for name, value in options.items() if isinstance(value, list)}


def narrow(x: dict[str, torch.Tensor], check: Check, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The definition in plain torch, as one would write it: every product of two tensors takes them in the dtype of the
    inputs and adds up in float32."""
    dtype = DTYPES[check.dtype]
    leaves = {name: x[name].float().clone().requires_grad_() for name in ("q", "k", "v", "kv", "z")}
    layout = layout_of(options)
    batch, length = x["q"].shape[:2]
    out = torch.zeros(x["g"].shape)
    kv, z = [], []
    share = x["q"].shape[2] // x["k"].shape[2]
    for span in oracle.spans(batch, length, length, options["causal"], **layout):
        q = phi(leaves["q"][span.row, span.queries].transpose(0, 1), check.feature_map)  # [H, T, D]
        k = phi(leaves["k"][span.row, span.keys].transpose(0, 1), check.feature_map)
        v = leaves["v"][span.row, span.keys].transpose(0, 1)
        s, t = leaves["kv"][span.state], leaves["z"][span.state]
        kv.append(s + product(k.mT, v, dtype))
        z.append(t + k.sum(1))
        k, v, s, t = (a.repeat_interleave(share, 0) for a in (k, v, s, t))
        w = product(q, k.mT, dtype)
        w = w.tril() if options["causal"] else w
        num = product(w, v, dtype) + product(q, s, dtype)
        den = w.sum(-1) + (q * t[:, None]).sum(-1)
        if options["eps"] is not None:
            den = torch.where(den < 0, -1.0, 1.0) * den.abs().clamp_min(options["eps"])
        num = num / torch.where(den == 0, torch.inf, den)[..., None] if options["normalize"] else num
        out = out.index_put((torch.tensor(span.row), torch.arange(length)[span.queries]), num.transpose(0, 1))
    made = {"out": out.to(dtype), "kv": torch.stack(kv), "z": torch.stack(z)}
    loss = sum((made[n].float() * x[c].float()).sum() for n, c in (("out", "g"), ("kv", "g_kv"), ("z", "g_z")))
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    pairs = zip(leaves.items(), grads, strict=True)
    named = {f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in pairs}
    named |= {n: named[n].to(dtype) for n in ("dq", "dk", "dv")}
    return {n: t.detach() for n, t in made.items()} | named


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return a.to(dtype).float() @ b.to(dtype).float()


PHI: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp_max(0).exp()),
    "relu": torch.relu,
    "squared_relu": lambda x: torch.relu(x) ** 2,
    "softplus": torch.nn.functional.softplus,
    "exp": torch.exp,
    "identity": lambda x: x,
}


def phi(x: torch.Tensor, name: str) -> torch.Tensor:
    return PHI[name](x)


def guarded(name: str, special: Callable[[], Any]) -> Verdict:
    try:
        found = special()  # what is wrong, if anything, and losses
        return Verdict(name, said=found) if isinstance(found, str) else Verdict(name, said=found[0], curves=found[1])
    except Exception as error:
        return Verdict(name, said=f"{type(error).__name__}: {str(error)[:300]}")


def tokens(*shape: int, device: str = "cuda", seed: int = 0, grad: bool = True) -> list[torch.Tensor]:
    random = torch.Generator(device).manual_seed(seed)
    made = [torch.randn(*shape, generator=random, device=device, dtype=torch.bfloat16) for _ in range(4)]
    for x in made[:3]:
        x.requires_grad_(grad)
    return made


def both_passes(x: list[torch.Tensor]) -> list[torch.Tensor]:
    from linattn import linear_attention

    out = linear_attention(*x[:3], impl="triton")
    return [out.detach(), *torch.autograd.grad(out, x[:3], x[3])]


def differs(got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    pairs = zip(("out", "dq", "dk", "dv"), got, want, strict=True)
    wrong = [name for name, g, w in pairs if not torch.equal(g.cpu(), w.cpu())]
    return f"{', '.join(wrong)} differ" if wrong else ""


def two_streams() -> str:
    inputs = [tokens(2, 3000, 4, 64, seed=n) for n in range(8)]
    want = [both_passes(x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    got: list[Any] = [None] * len(inputs)
    for n, x in enumerate(inputs):
        with torch.cuda.stream(streams[n % 2]):
            got[n] = both_passes(x)
    torch.cuda.synchronize()
    return "; ".join(filter(None, map(differs, got, want)))


def two_threads() -> str:
    inputs = [tokens(2, 1000 + 10 * n, 4, 32, seed=n) for n in range(8)]
    want = [both_passes(x) for x in inputs]
    got: list[Any] = [None] * len(inputs)

    def work(first: int) -> None:
        for n in range(first, len(inputs), 2):
            got[n] = both_passes(inputs[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    said = ("a thread failed" if g is None else differs(g, w) for g, w in zip(got, want, strict=True))
    return "; ".join(filter(None, said))


def in_a_graph() -> str:
    x = tokens(2, 2500, 4, 64)
    both_passes(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = both_passes(x)
    with torch.no_grad():
        for held, other in zip(x, tokens(2, 2500, 4, 64, seed=1, grad=False), strict=True):
            held.copy_(other)
    graph.replay()
    return differs(made, both_passes(x))


def without_waiting() -> str:
    inputs = [tokens(2, 2000, 4, 64), tokens(1, 2000, 4, 64)]
    cuts, lengths = torch.tensor([0, 5, 1999], device="cuda"), torch.tensor([7, 2000], device="cuda")
    from linattn import linear_attention

    def calls() -> None:
        both_passes(inputs[0])
        linear_attention(*inputs[0][:3], lengths=lengths, impl="triton", return_state=True)
        linear_attention(*inputs[1][:3], cu_seqlens=cuts, impl="triton", return_state=True)

    calls()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def another_device() -> str:
    if torch.cuda.device_count() < 2:  # nothing to check
        return ""
    x = tokens(2, 1500, 4, 64)
    there = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in x]
    return differs(both_passes(there), both_passes(x))


def over_two_to_the_31() -> str:
    """The last tokens of a call whose tensors have more than 2³¹ elements, and those of its second half alone."""
    from linattn import linear_attention

    time_, heads, width = 2**20 + 64, 16, 128  # 4.3 GB each
    q, k, v, _ = tokens(1, time_, heads, width, grad=False)
    out = linear_attention(q, k, v, impl="triton")
    half = time_ // 2
    _, state = linear_attention(q[:, :half], k[:, :half], v[:, :half], impl="triton", return_state=True)
    rest = linear_attention(q[:, half:], k[:, half:], v[:, half:], state=state, impl="triton")
    error = (out[:, -4096:].float() - rest[:, -4096:].float()).abs().max().item()
    scale = rest[:, -4096:].float().abs().max().item()
    return "" if error <= 0.02 * scale and scale > 0 else f"error {error:.2e} on a signal of {scale:.2e}"


def training_as_on_the_cpu() -> tuple[str, dict[str, list[float]]]:
    """A small model, the same seed, 30 steps: the losses stay within bfloat16's noise of each other."""
    from linattn import Layer, Stack

    def losses(device: str, autocast: bool) -> list[float]:
        torch.manual_seed(0)
        model = Stack(Layer(width=64, num_heads=4, attention="linear"), depth=2)
        head = torch.nn.Linear(64, 16)
        data = torch.randint(0, 16, (30, 8, 65))
        table = torch.randn(16, 64)
        model, head, data, table = model.to(device), head.to(device), data.to(device), table.to(device)
        optim = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
        made = []
        for batch in data:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                y = head(model(table[batch[:, :-1]])[0])
                loss = torch.nn.functional.cross_entropy(y.float().flatten(0, 1), batch[:, :-1].flatten())
            optim.zero_grad()
            loss.backward()
            optim.step()
            made.append(loss.item())
        return made

    torch.use_deterministic_algorithms(False)
    exact, got = losses("cpu", autocast=False), losses("cuda", autocast=True)
    worst_step = max(abs(a - b) / a for a, b in zip(exact, got, strict=True))
    curves = {"cpu, float32": exact, "cuda, bfloat16": got}
    if worst_step < 0.03 and exact[-1] < 0.9 * exact[0]:
        return "", curves
    return f"the losses part by {worst_step:.1%} and end at {exact[-1]:.3f} and {got[-1]:.3f}", curves


SPECIAL: dict[str, Callable[[], Any]] = {
    "two streams": two_streams,
    "two threads": two_threads,
    "in a CUDA graph": in_a_graph,
    "without waiting for the device": without_waiting,
    "another device": another_device,
    "over 2^31 elements": over_two_to_the_31,
    "training as on the CPU": training_as_on_the_cpu,
}


def worst(verdict: Verdict) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in verdict.ratios.items() if not ratio <= 1)


def summary(verdicts: list[Verdict]) -> str:
    """The largest ratio of each dtype and width, by way."""
    lines = [f"{'dtype':5} {'D':>4} {'M':>4} " + " ".join(f"{way:>11}" for way in WAYS)]
    table: dict[tuple[str, int, int], dict[str, float]] = {}
    for v in verdicts:
        if v.check is not None:
            row = table.setdefault((v.check.dtype, v.check.width, v.check.values), {})
            row[v.check.way] = max([float("inf")] if v.said else [row.get(v.check.way, 0.0), *v.ratios.values()])
    for (dtype, width, values), row in sorted(table.items()):
        cells = " ".join(f"{row[way]:11.2f}" if way in row else f"{'-':>11}" for way in WAYS)
        lines.append(f"{dtype:5} {width:4} {values:4} {cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    app()
