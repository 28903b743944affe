"""Long and large: a million positions against float64, gradients far from zero mean, index ranges, and peak memory.

The short versions run in `make test`; those marked `long` take a minute each and run in `make test-all`.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from linattn import State, linear_attention
from linattn.ops import Step

# Annotations are not what is tested here, and checking them costs more than a step.
pytestmark = pytest.mark.usefixtures("unchecked")

KINDS = ("random", "constant", "silent")
WIDTH = 8
LAST = 1000


def make_signals(time: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, T, 3, 8), a head each for noise, one token for ever, and a tenth of noise followed by silence."""
    generator = torch.Generator().manual_seed(time)
    heard = (torch.arange(time) < time // 10)[None, :, None]
    made = []
    for mean in (0, 0, 1):  # silence is 0 for v too: what is left of the noise must not be 0 by chance
        x = torch.randn(1, time, WIDTH, generator=generator)
        made.append(torch.stack([x, x[:, :1].expand_as(x), (x + mean) * heard], 2).to(dtype))
    q, k, v = made
    return q, k, v


def elu_plus_one(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def last_outputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last positions of one head (T, 8) in float64: everything before them as one product, then pair by pair."""
    f_q, f_k = (elu_plus_one(x.double().numpy()) for x in (q[-LAST:], k))
    values = v.double().numpy()
    w = np.tril(f_q @ f_k[-LAST:].T)
    num = w @ values[-LAST:] + f_q @ (f_k[:-LAST].T @ values[:-LAST])
    den = w.sum(-1) + f_q @ f_k[:-LAST].sum(0)
    return torch.from_numpy(num / den[:, None])


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def assert_last_outputs(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    for head, kind in enumerate(KINDS):
        want = last_outputs(*(x[0, :, head] for x in (q, k, v)))
        assert relative_error(out[0, -LAST:, head], want) < 1e-3, kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_million_positions_at_once(dtype):
    q, k, v = make_signals(10**6, dtype)
    assert_last_outputs(linear_attention(q, k, v, impl="chunked"), q, k, v)


def step_through(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    """The last outputs, token by token."""
    state, outs = State.empty(1, len(KINDS), WIDTH, WIDTH), []
    step = Step(state) if how == "Step" else None
    for t in range(q.shape[1]):
        token = q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1]
        if step is not None:
            out = step(*token)
        else:
            out, state = linear_attention(*token, state=state, return_state=True)
        if t >= q.shape[1] - LAST:
            outs.append(out.clone())
    return torch.cat(outs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("how", "time"), [("Step", 10_000), ("linear_attention", 3_000)])
def test_token_by_token(how, time, dtype):
    q, k, v = make_signals(time, dtype)
    assert_last_outputs(step_through(q, k, v, how), q, k, v)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_million_positions_token_by_token(dtype):
    q, k, v = make_signals(10**6, dtype)
    assert_last_outputs(step_through(q, k, v, "Step"), q, k, v)


@pytest.mark.parametrize("how", ["Step", "linear_attention", "chunked"])
def test_the_hundred_millionth_token_still_counts(how):
    """After 10⁸ equal tokens a plain fp32 sum has long stalled at 2²⁴ of them: 3,000 further ones add nothing to it."""
    start = State.empty(1, 1, WIDTH, WIDTH)
    for name in ("kv", "z"):
        start.tensors()[name].fill_(1e8)
    zeros, ones = torch.zeros(1, 1, WIDTH), torch.ones(1, 1, WIDTH)
    if how == "Step":
        step = Step(start.clone())
        for _ in range(3000):
            step(zeros, zeros, ones)
        end = step.state()
    elif how == "linear_attention":
        end = start
        for _ in range(3000):
            _, end = linear_attention(zeros[:, None], zeros[:, None], ones[:, None], state=end, return_state=True)
    else:
        many = [x[:, None].expand(1, 3000, 1, WIDTH) for x in (zeros, zeros, ones)]
        _, end = linear_attention(*many, state=start, return_state=True, impl="chunked")
    parts = {name: part.double() for name, part in end.tensors().items()}
    for name in ("kv", "z"):
        assert (parts[name] + parts[f"{name}_low"] == 1e8 + 3000).all(), name


def float64_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """By autograd through plain cumulative sums, (T, C, M) of them."""
    leaves = [x[0, :, 0].double().requires_grad_() for x in (q, k, v)]
    f_q, f_k = (torch.where(x > 0, x + 1, x.clamp_max(0).exp()) for x in leaves[:2])
    kv = (f_k[:, :, None] * leaves[2][:, None]).cumsum(0)
    out = torch.einsum("tc,tcm->tm", f_q, kv) / (f_q * f_k.cumsum(0)).sum(-1, keepdim=True)
    return list(torch.autograd.grad(out, leaves, g[0, :, 0].double()))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_values_far_from_zero(causal):
    """v of mean 10, T = 65,536: the gradient of a normalised output is a small difference of large sums."""
    q, k, v = (x[:, :, :1] for x in make_signals(65_536, torch.float32))
    v = v + 10
    g = torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = linear_attention(*leaves, causal=causal)
    grads = torch.autograd.grad(out, leaves, g)
    wants = float64_gradients(q, k, v, g) if causal else float64_full_gradients(q, k, v, g)
    for name, grad, want in zip("qkv", grads, wants, strict=True):
        for places in (slice(None), slice(-LAST, None)):  # late gradients are small, and lost in a norm of all
            assert relative_error(grad[0, places, 0], want[places]) < 1e-3, f"d{name}, {places}"


def float64_full_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    leaves = [x[0, :, 0].double().requires_grad_() for x in (q, k, v)]
    f_q, f_k = (torch.where(x > 0, x + 1, x.clamp_max(0).exp()) for x in leaves[:2])
    out = f_q @ (f_k.T @ leaves[2]) / (f_q @ f_k.sum(0))[:, None]
    return list(torch.autograd.grad(out, leaves, g[0, :, 0].double()))


@pytest.mark.parametrize("causal", [True, False])
def test_more_numbers_than_an_int32_counts(causal):
    """B·T·H·D = 2³² on the meta device: shapes alone, forward and backward."""
    shape = (4096, 1024, 8, 128)
    q, k, v = (torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out, state = linear_attention(q, k, v, causal=causal, return_state=True)
    assert out.shape == shape and out.dtype == torch.bfloat16 and out.device.type == "meta"
    assert (
        state.kv.shape == (4096, 8, 128, 128)
        and state.tensors()["z"].shape == (4096, 8, 128)
        and state.kv.dtype == torch.float32
    )
    assert all(grad.shape == shape for grad in torch.autograd.grad(out.sum(), (q, k, v)))


MEMORY = """
import torch
from linattn import linear_attention

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

T = LENGTH
torch.set_num_threads(1)
q, k, v, g = (torch.randn(1, T, 1, 32) for _ in range(4))
small = [x[:, :1024].clone().requires_grad_() for x in (q, k, v)]
linear_attention(*small, causal=CAUSAL).backward(g[:, :1024])    # what the first call sets up once is not counted
for x in (q, k, v):
    x.requires_grad_()
before = status("VmRSS")
out = linear_attention(q, k, v, causal=CAUSAL)
out.backward(g)
print((status("VmHWM") - before) / (4 * q.numel() * q.element_size()))
"""


@pytest.mark.parametrize(("causal", "time"), [(True, 2**20), (False, 2**18)])
def test_peak_memory_of_forward_and_backward(causal, time):
    """One head of 32, fp32: at most 2.5 times the bytes of q, k, v and out, out and the gradients included."""
    code = MEMORY.replace("CAUSAL", str(causal)).replace("LENGTH", str(time))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    added = float(done.stdout)
    assert 1.0 <= added <= 2.5, "out and three gradients are themselves 1.0 times: less means the measure is broken"
