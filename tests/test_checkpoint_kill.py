"""A training process that is killed at random moments, again and again, ends where an undisturbed one does."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from pathlib import Path

from train_cases import assert_same_weights, lines_of, tiny, without_clock

from linattn.train import checkpoint, train

CHANGES = {"width": 16, "num_heads": 2, "depth": 1, "dropout": 0.1}
RUN = tiny(steps=40, checkpoint_every=1, eval_every=5, changes=CHANGES)


def session(folder: Path) -> None:
    """In the child: begin, or go on."""
    import torch

    from linattn.train.trainer import Trainer

    update = Trainer.update

    def unhurried(self: Trainer) -> None:
        time.sleep(0.02)  # on a busy machine the parent looks late: the run must not be over by then
        update(self)

    torch.set_num_threads(1)
    Trainer.update = unhurried
    begun = (folder / "run.json").exists()
    train(None if begun else RUN, folder, resume=begun, quiet=True)


def newest_step(folder: Path) -> int:
    found = checkpoint.found(folder)
    return int(found[0].stem.rpartition("-")[2]) if found else 0


def test_killed_at_random_moments(tmp_path):
    """SIGKILL, which no process can answer: between steps, while a checkpoint is written, while files are renamed."""
    draw, folder, kills = random.Random(0), tmp_path / "run", 0
    # Children of a server that has imported everything (an optimizer imports torch._dynamo) begin to train at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "rich.progress", "torch._dynamo", "linattn.train"])
    exitcode = None
    while exitcode != 0:
        before = newest_step(folder)
        child = context.Process(target=session, args=(folder,))
        child.start()
        until = before + draw.randint(1, 8)
        while child.is_alive() and newest_step(folder) < until:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        child.kill()
        child.join()
        exitcode = child.exitcode
        assert exitcode in (0, -signal.SIGKILL), f"the training process failed by itself: {exitcode}"
        kills += exitcode != 0
        found, damage = checkpoint.newest(folder)
        assert found is not None and not damage and found.facts["step"] == newest_step(folder) >= min(until, RUN.steps)  # pyright: ignore
    assert kills >= 4
    train(RUN, tmp_path / "whole", quiet=True)
    assert_same_weights(folder, tmp_path / "whole")
    for kind in ("train", "eval"):
        killed, whole = (list(map(without_clock, lines_of(f, kind))) for f in (folder, tmp_path / "whole"))
        assert killed == whole
