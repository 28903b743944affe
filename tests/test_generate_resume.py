"""Generation stopped and resumed is generation that was never stopped: bit for bit, in another process too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from generate_cases import KINDS, image_model, language_model

from linattn.generate import Sampling, Snapshot, generate, stream

TESTS = Path(__file__).parent
PROMPTS = [[3], [5, 1, 5], [2] * 8]


def same(a: Snapshot, b: Snapshot) -> bool:
    """Every tensor bit for bit, and every number. A loaded cache may have less room than one that has grown."""
    assert a.state.tensors().keys() == b.state.tensors().keys()
    ours, others = (replace(x, state=Sampling()) for x in (a, b))
    equal = all(torch.equal(x, y) for x, y in zip(ours.tensors().values(), others.tensors().values(), strict=True))
    return equal and (a.seed, a.length, a.sampling.stop) == (b.seed, b.length, b.sampling.stop)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "reformer"])
def test_longer_later_is_longer_at_once(kind, cache, tmp_path):
    """The rows are complete at different times: those that are must stay where they are, until all go on."""
    model = language_model(kind)
    options = {"seed": 1, "temperature": 0.8, "top_k": 9, "cache": cache}
    whole = generate(model, PROMPTS, length=14, **options)
    half = generate(model, PROMPTS, length=9, **options)
    assert torch.equal(half.tensor, whole.tensor[:, :9])
    if not cache:
        assert torch.equal(half.snapshot.state.tensors()["values"], half.tensor[:, :8])  # all but the last are read
    half.snapshot.save(tmp_path / "half.safetensors")
    again = generate(model, snapshot=half.snapshot, length=14)
    loaded = generate(model, snapshot=Snapshot.load(tmp_path / "half.safetensors"), length=14)
    assert torch.equal(again.tensor, whole.tensor) and torch.equal(loaded.tensor, whole.tensor)
    assert same(again.snapshot, whole.snapshot) and same(loaded.snapshot, whole.snapshot)
    assert again.prompt_lengths.tolist() == [1, 3, 8]
    assert torch.equal(generate(model, snapshot=half.snapshot, length=14).tensor, whole.tensor)  # not used up


@pytest.mark.parametrize("kind", [*KINDS, "reformer"])
def test_a_state_goes_on_bit_for_bit(kind, tmp_path):
    """Not the values alone: all of the state, after a stop at any step, through a file."""
    model = language_model(kind)
    run = stream(model, PROMPTS, seed=1)
    for _ in range(5):
        next(run)
    run.snapshot().save(tmp_path / "half.safetensors")
    other = stream(model, snapshot=Snapshot.load(tmp_path / "half.safetensors"))
    for _ in range(8):
        assert torch.equal(next(run), next(other))
    ours, theirs = run.snapshot(), other.snapshot()
    assert same(ours, theirs)
    for name, x in ours.state.tensors().items():
        y = theirs.state.tensors()[name]
        if name.endswith((".k", ".v")):  # of a cache only what is filled: there may be more room behind it
            x, y = ([z[row, : n - 1] for row, n in enumerate(ours.counts)] for z in (x, y))
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True)), name


def test_images_before_their_first_value_and_after_any():
    model = image_model()
    whole = generate(model, count=3, seed=2)
    for steps in (0, 1, 2, 23, 24):
        run = stream(model, count=3, seed=2)
        begun = [next(run) for _ in range(steps)]
        rest = list(stream(model, snapshot=run.snapshot()))
        assert len(rest) == 24 - steps and torch.equal(torch.stack(begun + rest, 1), whole.tensor)


def test_a_snapshot_stays_as_it_is_while_its_stream_goes_on():
    for kind in ("linear", "softmax"):
        run = stream(language_model(kind), PROMPTS, seed=1)
        next(run)
        taken = run.snapshot()
        before = {name: x.clone() for name, x in taken.tensors().items()}
        for _ in range(60):  # beyond the 64 values that a cache begins with room for
            next(run)
        assert all(torch.equal(x, before[name]) for name, x in taken.tensors().items())
        assert run.counts[0] == taken.counts[0] + 60


def test_rows_of_a_snapshot_go_on_alone():
    model = language_model("softmax")
    whole = generate(model, PROMPTS, length=20, seed=1).tensor
    half = generate(model, PROMPTS, length=9, seed=1).snapshot
    assert torch.equal(generate(model, snapshot=half.select([2, 0]), length=20).tensor, whole[[2, 0]])


@pytest.mark.parametrize("cache", [True, False])
def test_stopped_rows_stay_stopped(cache):
    model, prompts = language_model(), [[3], [5, 1, 5], [2, 2], [1], [8]]
    whole = generate(model, prompts, length=40, seed=8, stop=(5, 9), cache=cache)
    lengths = sorted(len(row) for row in whole.values)
    for middle in (lengths[0], lengths[2], lengths[2] + 1):
        half = generate(model, prompts, length=middle, seed=8, stop=(5, 9), cache=cache)
        again = generate(model, snapshot=half.snapshot, length=40)
        assert [row.tolist() for row in again.values] == [row.tolist() for row in whole.values]
    on = generate(model, snapshot=whole.snapshot, stop=())  # for good: what follows was never in the state
    assert [len(row) for row in on.values] == [len(row) for row in whole.values]


def test_a_prompt_that_ends_in_a_stop_value_has_not_met_it():
    """Not even where its row is complete, while others beside it go on."""
    model = language_model()
    together = generate(model, [[3, 5], [8]], length=2, seed=8, stop=(5,))
    on = generate(model, snapshot=together.snapshot, length=4)
    assert torch.equal(on.values[0], generate(model, [[3, 5]], length=4, seed=8, stop=(5,)).values[0])
    assert len(on.values[0]) > 2


def test_options_change_when_they_are_given():
    model = language_model()
    half = generate(model, [[3]], length=8, seed=1, temperature=0.5, stop=(4,)).snapshot
    assert (half.sampling.temperature, half.sampling.stop) == (0.5, (4,))
    on = generate(model, snapshot=half, length=16, temperature=0.0, stop=())
    greedy = generate(model, on.tensor[:, :8], length=16, temperature=0.0)
    assert torch.equal(on.tensor, greedy.tensor) and on.snapshot.sampling.temperature == 0


class Interrupting:
    """Sends Ctrl-C within a step, behind the first block, whose state has then already changed."""

    def __init__(self, model, step: int, send):
        self.calls = 0
        self.hook = model.stack.blocks[0].register_forward_hook(lambda *_: self.called(step, send))

    def called(self, step: int, send) -> None:
        self.calls += 1
        if self.calls == step:
            send()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def send_signal() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("send", [raise_interrupt, send_signal], ids=["raised", "signal"])
@pytest.mark.parametrize("kind", ["linear", "softmax", "reformer"])
def test_ctrl_c_keeps_what_was_made(kind, send):
    model = language_model(kind)
    whole = generate(model, [[3], [5]], length=20, seed=1)
    interrupt = Interrupting(model, 8, send)
    part = generate(model, [[3], [5]], length=20, seed=1)
    interrupt.hook.remove()
    made = 7 if send is raise_interrupt else 8  # a signal lets the step end
    assert part.interrupted and not part.finished.any() and part.tensor.shape == (2, 1 + made)
    assert torch.equal(part.tensor, whole.tensor[:, : 1 + made])
    rest = generate(model, snapshot=part.snapshot)
    assert torch.equal(rest.tensor, whole.tensor) and same(rest.snapshot, whole.snapshot) and not rest.interrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait():
    model = language_model()
    Interrupting(model, 3, lambda: [send_signal(), send_signal()])
    with pytest.raises(KeyboardInterrupt):
        generate(model, [[3]], length=20)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_are_left_alone():
    """And outside of the main thread there are none."""
    model, seen = language_model(), []
    Interrupting(model, 3, send_signal)
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        made = generate(model, [[3]], length=8, seed=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1] and not made.interrupted
    threaded = []
    thread = threading.Thread(target=lambda: threaded.append(generate(model, [[3]], length=8, seed=1)))
    thread.start()
    thread.join()
    assert torch.equal(threaded[0].tensor, made.tensor)


def test_interrupted_in_another_process_and_resumed_in_this_one(tmp_path):
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from generate_cases import language_model\n"
        "from linattn.generate import generate\n"
        "from test_generate_resume import Interrupting, send_signal\n"
        "model = language_model(); Interrupting(model, 9, send_signal)\n"
        "made = generate(model, [[3], [5, 1]], length=30, seed=2, top_p=0.9)\n"
        "made.snapshot.save(sys.argv[2]); print(made.interrupted, made.snapshot.counts.tolist())\n"
    )
    path = tmp_path / "snapshot.safetensors"
    command = [sys.executable, "-c", script, str(TESTS), str(path)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=TESTS.parent, timeout=600)
    assert run.stdout.split() == ["True", "[9,", "10]"], run.stderr
    whole = generate(language_model(), [[3], [5, 1]], length=30, seed=2, top_p=0.9)
    rest = generate(language_model(), snapshot=Snapshot.load(path))
    assert torch.equal(rest.tensor, whole.tensor) and same(rest.snapshot, whole.snapshot)
