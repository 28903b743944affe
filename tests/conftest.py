"""What makes silence loud: annotations are executed, uninitialised memory is NaN, warnings are errors (pyproject.toml).

Run with OMP_NUM_THREADS=n for another number of threads than two, with JAXTYPING_DISABLE=1 for inert annotations
(is a failure theirs?), and with --hypothesis-profile=explore for random examples, many more than the fixed ones.
"""

import os
import signal

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS asks for it, before CUDA starts

import hypothesis
import jaxtyping
import pytest
import torch

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(2)  # the same sums everywhere, whatever the machine
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # here and in our own processes Ctrl-C is tested
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: kernels run on the CPU

# Before the first import of linattn: its annotations are then jaxtyping's (linattn/_typing.py), checked by beartype.
jaxtyping.install_import_hook("linattn", "beartype.beartype")

hypothesis.settings.register_profile("linattn", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("linattn")


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan():
    """torch.empty gives NaN (the largest integer, True). Set for each test, so that none can leave it switched off."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def unchecked():
    """Inert annotations, as users have them: for torch.compile, and to see our own errors before jaxtyping's."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
