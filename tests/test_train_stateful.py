"""Truncated back-propagation through time: what a state carries is learnt to be read beyond the window."""

from __future__ import annotations

import math

import numpy as np
import torch
from train_cases import tiny

from linattn.models import load
from linattn.train import train
from linattn.train.trainer import Trainer

ROWS, LENGTH, WINDOW, LETTERS = 32, 9, 4, 4
QUESTION, BLANK = ord("?"), ord(".")


def write_riddles(path):
    """Rows of 9 bytes: a letter, six blanks, a question, the letter again.

    The training split is the first 90% of a file: exactly the rows, each a stream of its own.
    """
    letters = np.random.default_rng(0).integers(0, LETTERS, ROWS)
    rows = np.full((ROWS, LENGTH), BLANK, np.uint8)
    rows[:, 0] = rows[:, 8] = ord("a") + letters
    rows[:, 7] = QUESTION
    train_bytes = rows.tobytes()
    path.write_bytes(train_bytes + b"." * (-(-len(train_bytes) * 10 // 9) - len(train_bytes)))
    return torch.from_numpy(rows)


def nats_of_the_answer(folder, rows):
    """Of the letter at the end, when the row is read in windows with the state carried: what generation does."""
    model = load(folder)
    state, nats = model.empty_state(ROWS), []
    with torch.no_grad():
        for start in range(0, LENGTH - 1, WINDOW):
            some, state = model.nats(rows[:, start : start + WINDOW + 1].long(), state)  # pyright: ignore
            nats.append(some)
    return float(torch.cat(nats, 1)[:, -1].mean())


def test_a_dependency_longer_than_the_window(tmp_path):
    """8 bytes with a window of 4: with the state carried the answer is known, without it nothing beats guessing."""
    rows = write_riddles(tmp_path / "riddles")
    run = tiny(
        preset="text",
        changes={"width": 32, "num_heads": 2, "depth": 1},
        data=str(tmp_path / "riddles"),
        data_options={},
        window=WINDOW,
        batch=ROWS,
        steps=160,
        optimizer="adamw",
        lr=1e-2,
        schedule="constant",
        log_every=0,
        eval_every=0,
        checkpoint_every=0,
    )
    answers = {}
    for stateful in (True, False):
        folder = tmp_path / str(stateful)
        train(tiny(**{**vars(run), "stateful": stateful}), folder, quiet=True)
        answers[stateful] = nats_of_the_answer(folder, rows)
    assert answers[True] < 0.1 * math.log(LETTERS), answers
    assert answers[False] > 0.9 * math.log(LETTERS), answers


def test_states_are_carried_cut_off_and_dropped_where_a_stream_begins(tmp_path):
    write_riddles(tmp_path / "riddles")
    run = tiny(preset="text", data=str(tmp_path / "riddles"), data_options={}, window=WINDOW, batch=ROWS)
    trainer = Trainer(tiny(**{**vars(run), "stateful": True, "accumulate": 2}), None, tmp_path, quiet=True)
    seen, good = [], trainer.predict

    def predict(values, state):
        seen.append((int(state.seen[0]), len(values), any(x.requires_grad for x in state.tensors().values())))
        return good(values, state)

    trainer.predict = predict
    for _ in range(5):
        trainer.update()
    assert seen[::2] == seen[1::2] == [(0, 16, False), (4, 16, False), (0, 16, False), (4, 16, False), (0, 16, False)]


def test_a_carried_state_is_that_of_the_whole(tmp_path):
    """Without an update in between, losses of window after window are those of the row read at once."""
    rows = write_riddles(tmp_path / "riddles")
    run = tiny(preset="text", data=str(tmp_path / "riddles"), data_options={}, window=WINDOW, batch=ROWS, lr=0.0)
    trainer = Trainer(tiny(**{**vars(run), "stateful": True}), None, tmp_path, quiet=True)
    for x in trainer.model.parameters():
        x.data.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    whole, _ = trainer.model.nats(rows.long())
    parts = []
    for _ in range(2):
        batch = next(trainer.loader)
        parts.append(trainer.backward(batch, batch.data.long()))
    torch.testing.assert_close(torch.stack(parts).mean(), whole.mean().detach(), rtol=1e-5, atol=0)
