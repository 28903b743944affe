"""The least module around the operator, and what it gives: outputs, final state, all gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import Results
from torch import Tensor, nn

from linattn import State, linear_attention


class Layer(nn.Module):
    """The least module around the operator: one projection in, one out."""

    def __init__(self, impl: str = "auto", width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.impl, self.heads = impl, heads
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.project, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=-2)
        out, state = linear_attention(q, k, v, state=State(kv, z), return_state=True, impl=self.impl)
        return self.join(out.flatten(-2)), state.kv, state.tensors()["z"]


def layer_inputs(time: int = 33, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, kv, z = (torch.randn(*shape, generator=generator) for shape in ((2, time, 8), (2, 2, 4, 4), (2, 2, 4)))
    return x, kv, z.abs() + 0.5


def some_loss(made: tuple[Tensor, ...]) -> Tensor:
    """Every number counts, and each differently."""
    return torch.stack([(x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in made]).sum()


def results_of(function: Callable[..., tuple[Tensor, ...]], layer: Layer, time: int = 33) -> Results:
    """Outputs, final state, and the gradients by inputs, state and weights."""
    leaves = [x.requires_grad_() for x in layer_inputs(time)]
    made = function(*leaves)
    grads = torch.autograd.grad(some_loss(made), [*leaves, *layer.parameters()])
    return {f"result {n}": x.detach() for n, x in enumerate(made)} | {f"grad {n}": x for n, x in enumerate(grads)}
