"""How kernels are started, without a GPU: with a stand-in for what Triton compiled."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not made for this system")
from triton import knobs
from triton.runtime.jit import JITFunction

from linattn.ops.triton import launch as launches

CONSTANTS = (64, True)


class Kernel:
    """What `launch` sees of a kernel; `refuse` is raised when it is started directly."""

    def __init__(self, refuse: Exception | None = None):
        self.warmed, self.direct, self.ordinary, self.refuse = 0, [], [], refuse

    def warmup(self, *arguments: Any, grid: tuple[int, ...], num_warps: int) -> Any:
        self.warmed += 1
        return SimpleNamespace(run=self.run, function=7, packed_metadata=(num_warps, 1, 0))

    def run(self, *arguments: Any) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.direct.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.ordinary.append((grid, arguments, options))


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "COMPILED", {})
    monkeypatch.setattr(launches, "DIRECT", [True])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a tensor on the CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)


def test_a_compiled_kernel_is_started_as_triton_starts_it(on_a_gpu):
    kernel, x = Kernel(), torch.zeros(4)
    for programs in (3, 5):
        launches.launch(kernel, programs, (x, 10 * programs, 0.5), CONSTANTS, 8)
    assert kernel.warmed == 1 and not kernel.ordinary
    assert kernel.direct == [
        (n, 1, 1, 99, 7, (8, 1, 0), None, None, None, x.data_ptr(), 10 * n, 0.5, 64, True) for n in (3, 5)
    ]
    calls = inspect.getsource(JITFunction.run)  # the convention of the Triton that is here
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata" in calls
    )


def test_other_dtypes_and_constants_are_compiled_anew(on_a_gpu):
    kernel = Kernel()
    for x, constants in ((torch.zeros(4), CONSTANTS), (torch.zeros(4).half(), CONSTANTS), (torch.zeros(4), (32, True))):
        launches.launch(kernel, 1, (x,), constants, 4)
    assert kernel.warmed == 3


def test_a_surprise_is_told_once_and_triton_takes_over(on_a_gpu):
    kernel, x = Kernel(TypeError("takes 3 arguments")), torch.zeros(4)
    with pytest.warns(UserWarning, match="takes 3 arguments"):
        launches.launch(kernel, 2, (x, 1), CONSTANTS, 4)
    launches.launch(kernel, 2, (x, 1), CONSTANTS, 4)  # silent: warnings are errors here
    assert kernel.ordinary == 2 * [((2,), (x, 1, *CONSTANTS), {"num_warps": 4})]


def test_an_error_of_the_device_is_not_retried(on_a_gpu):
    kernel = Kernel(RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        launches.launch(kernel, 2, (torch.zeros(4),), CONSTANTS, 4)
    assert not kernel.ordinary


def test_whoever_watches_launches_sees_them(on_a_gpu):
    def hook(metadata: Any) -> None: ...

    kernel, chain = Kernel(), knobs.runtime.launch_enter_hook
    chain.add(hook)
    try:
        launches.launch(kernel, 2, (torch.zeros(4),), CONSTANTS, 4)
    finally:
        chain.remove(hook)
    assert len(kernel.ordinary) == 1 and not kernel.direct
