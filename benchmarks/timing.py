"""How long a call takes on a GPU: replays of a CUDA graph over rotating buffers, with the second-level cache cold.

A graph holds one call for each of several sets of inputs, together several times as large as the cache, so that no
call finds its inputs there; a replay has no launch gaps, and its time over the number of sets is the call's. The floor
is a torch copy that moves as many bytes, timed in the same way. On the CPU, where kernels are interpreted, everything
runs once: that shows that a script works, and its times mean nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

COLD = 4  # times the second-level cache: what rotating buffers hold together
MOST_SETS = 64

Run = Callable[[], Any]


def num_sets(bytes_each: int, device: str) -> int:
    """How many sets of inputs, of so many bytes each, keep the cache cold."""
    if torch.device(device).type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_SETS, max(1, math.ceil(COLD * cache / max(1, bytes_each))))


def replay_time(runs: Sequence[Run], device: str, budget: float = 0.2, least: int = 5) -> float:
    """Seconds of one of `runs` (the same call on different buffers): the median over replays of all of them."""
    if torch.device(device).type != "cuda":
        return wall_time(runs[0], device, calls=1)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compiles, and fills the allocator
        for run in (*runs, *runs):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    samples: list[float] = []
    spent = time.perf_counter()
    while len(samples) < least or time.perf_counter() - spent < budget:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / len(runs))
    del graph
    return statistics.median(samples)


def wall_time(run: Run, device: str, calls: int = 50) -> float:
    """Seconds of one eager call with all of Python's work, over `calls` calls in a row."""
    if torch.device(device).type == "cuda":
        for _ in range(3):
            run()
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / calls


def floor_time(num_bytes: int, device: str) -> float:
    """Seconds in which a copy moves `num_bytes`, those it reads and those it writes together."""
    half = max(16, num_bytes // 2)
    pairs = [torch.empty(2, half, dtype=torch.uint8, device=device) for _ in range(num_sets(2 * half, device))]
    return replay_time([lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs], device)


def forward_bytes(batch: int, heads: int, tokens: int, width: int, itemsize: int) -> int:
    """q, k, v read and the output written: 4s (docs/mathematics.md)."""
    return 4 * batch * heads * tokens * width * itemsize


def backward_bytes(batch: int, heads: int, tokens: int, width: int, itemsize: int) -> int:
    """q, k, v and dout read, three gradients written: 7s."""
    return 7 * batch * heads * tokens * width * itemsize
