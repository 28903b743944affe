"""What a process of its own does with the native library: `python native_check.py isa|fork|idle` prints what it saw."""

from __future__ import annotations

import multiprocessing
import sys
import time

import torch

from linattn import State, backends, linear_attention
from linattn.ops import cpu

NAMES = ("out", "kv", "z", "dq", "dk", "dv", "dkv", "dz")
# batch, time, heads, key/value heads, D, M: rests of vectors, chunks and register blocks; more than one segment
SHAPES = (
    (2, 1, 2, 1, 5, 3),
    (1, 33, 4, 2, 16, 20),
    (2, 65, 2, 2, 33, 17),
    (1, 130, 2, 1, 64, 64),
    (1, 2100, 1, 1, 64, 48),
)


def results(
    impl: str, dtype: torch.dtype, shape: tuple[int, ...], *, mean: float = 0.0, **options
) -> list[torch.Tensor]:
    """Outputs, state, and all gradients of a call with random numbers, always the same."""
    batch, tokens, heads, kv_heads, width, values = shape
    generator = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).float()

    q, k = normal(batch, tokens, heads, width), normal(batch, tokens, kv_heads, width)
    v, g = normal(batch, tokens, kv_heads, values) + mean, normal(batch, tokens, heads, values)
    kv, z = normal(batch, kv_heads, width, values), normal(batch, kv_heads, width).abs() + 0.5
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, kv, z)]
    state = State(leaves[3], leaves[4])
    out, end = linear_attention(*leaves[:3], state=state, return_state=True, impl=impl, **options)  # type: ignore[misc]
    made = [out, end.kv, end.tensors()["z"]]
    loss = sum((x * y.to(dtype)).sum() for x, y in zip(made, (g, kv, z), strict=True))
    return [x.detach() for x in made] + list(torch.autograd.grad(loss, leaves))  # type: ignore[arg-type]


def worst(shape: tuple[int, ...], **options) -> float:
    """The largest error of the native library, over that of plain torch in float32 (and one rounding)."""
    exact, plain = (results("chunked", dtype, shape, **options) for dtype in (torch.float64, torch.float32))
    got, found = results("native", torch.float32, shape, **options), 0.0
    for name, x, y, truth in zip(NAMES, got, plain, exact, strict=True):
        scale = max(truth.abs().max().item(), 1e-2)
        assert x.isfinite().all(), name
        errors = [(each - truth).abs().max().item() / scale for each in (x, y)]
        found = max(found, errors[0] / (errors[1] + 1.2e-7))
    return found


def isa() -> None:
    found = max(worst(shape, causal=causal, feature_map="softplus") for shape in SHAPES for causal in (True, False))
    assert found < 8, f"{found:.1f} times the error of plain torch"
    print(backends()["native"][1])


def attend(seed: int) -> list[float]:
    x = torch.randn(3, 4, 100, 4, 16, generator=torch.Generator().manual_seed(seed))
    return linear_attention(*x, impl="native").sum((0, 1, 2)).tolist()


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.set_num_threads(2)
        return torch.tensor(attend(index))


def fork() -> None:
    """Children of a process whose pool is at work: by fork, and as workers of a DataLoader."""
    torch.set_num_threads(3)
    want = [attend(seed) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(attend, range(4)) == want
    loaded = list(torch.utils.data.DataLoader(Items(), num_workers=2, batch_size=None, multiprocessing_context="fork"))
    assert torch.stack(loaded).tolist() == torch.tensor(want).tolist()
    assert [attend(seed) for seed in range(4)] == want
    print("forked")


def idle() -> None:
    """Processor time while nothing is asked for: workers that spun would use all of it."""
    x, y = torch.randn(1000), torch.empty(1000)
    torch.set_num_threads(1)  # of torch's own threads none is started
    for _ in range(20):
        cpu.library().linattn_feature_map(0, 1.0, x.data_ptr(), y.data_ptr(), None, 1000, 4)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    print(f"{time.process_time() - before:.3f}")


if __name__ == "__main__":
    {"isa": isa, "fork": fork, "idle": idle}[sys.argv[1]]()
