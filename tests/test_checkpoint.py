"""Checkpoints: whole or refused, and nothing overwritten by what goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from train_cases import TINY, assert_same_weights, lines_of, tiny, weights_of, without_clock

from linattn.train import checkpoint, train
from linattn.train.checkpoint import Damaged
from linattn.train.run_folder import alone
from linattn.train.trainer import Trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that went through, with checkpoints of steps 9 and 12."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(TINY, folder, quiet=True)
    return folder


@pytest.fixture
def halted(tmp_path, finished):
    """The same run as it stood after step 9, by its files."""
    shutil.copytree(finished, tmp_path / "halted")
    (tmp_path / "halted" / "checkpoint-00000012.safetensors").unlink()
    return tmp_path / "halted"


@pytest.fixture
def two(tmp_path, finished):
    """The finished run again, to be damaged."""
    shutil.copytree(finished, tmp_path / "two")
    return tmp_path / "two"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_what_is_saved_is_read_again(tmp_path):
    tensors = {"a.b": torch.randn(3, 4).mT, "c": torch.arange(5), "d": torch.tensor(2.5), "e": torch.empty(0, 2)}
    facts = {"step": 7, "place": {"epoch": 1}, "best": None, "seconds": 0.1 + 0.2}
    made = checkpoint.read(checkpoint.save(tmp_path, tensors, facts))
    assert made.facts == facts
    assert made.tensors.keys() == tensors.keys()
    assert all(made.tensors[name].equal(x) and made.tensors[name].dtype == x.dtype for name, x in tensors.items())


def test_the_newest_two_are_kept(tmp_path):
    for step in (3, 20, 100):
        checkpoint.save(tmp_path, {"x": torch.ones(1)}, {"step": step})
    assert [path.name for path in checkpoint.found(tmp_path)] == [
        "checkpoint-00000100.safetensors",
        "checkpoint-00000020.safetensors",
    ]


DROPOUT = {**TINY.changes, "dropout": 0.2}
RUNS = {
    "plain": {},
    "adamw": {"optimizer": "adamw"},
    "average": {"ema": 0.9},
    "dropout": {"changes": DROPOUT},
    "plateau": {"schedule": "plateau", "patience": 1, "lr": 0.3},
    "bf16": {"precision": "bf16"},
    "log lines across": {"log_every": 4, "eval_every": 12},
    "stateful": {"preset": "text", "stateful": True, "window": 5, "accumulate": 2},
    "drawn anew": {"preset": "copy", "data": "copy", "data_options": {"length": 8, "num_examples": 16}},
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_resumed_is_uninterrupted(tmp_path, changes):
    """Bit for bit: weights and metrics, after a stop at each checkpoint."""
    if changes.get("stateful"):
        (tmp_path / "text").write_bytes(bytes(torch.randint(97, 123, (400,)).tolist()))
        changes = {**changes, "data": str(tmp_path / "text"), "data_options": {}}
    run = tiny(**changes)
    train(run, tmp_path / "whole", quiet=True)
    folder = tmp_path / "parts"
    for stop in (3, 6, 9, None):
        part(run, folder, stop)
    assert_same_weights(tmp_path / "whole", folder)
    for kind in ("train", "eval"):
        whole, parts = (list(map(without_clock, lines_of(f, kind))) for f in (tmp_path / "whole", folder))
        assert whole == parts and whole


def part(run, folder, stop):
    """Train on until `stop`, and lose all that came after the checkpoint before it."""
    good = Trainer.do

    def do(self, event):
        good(self, event)
        if event == "checkpoint" and self.step == stop:
            raise ZeroDivisionError("the machine fails")

    Trainer.do = do
    try:
        train(run, folder, resume=folder.exists(), quiet=True)
    except ZeroDivisionError:
        pass
    finally:
        Trainer.do = good


@pytest.mark.parametrize("left", [0, 1, 7, 8, 100, 0.5, -1])
def test_a_truncated_checkpoint_is_passed_over(two, finished, left, capsys):
    newest = two / "checkpoint-00000012.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(len(whole) * left) if isinstance(left, float) else left])
    with pytest.raises(Damaged, match="damaged or cut off"):
        checkpoint.read(newest)
    result = train(None, two, resume=True)
    assert result.step == 12
    assert "going on from an older checkpoint, of step 9" in capsys.readouterr().err
    assert_same_weights(two, finished)


@pytest.mark.parametrize("part", [0.05, 0.3, 0.5, 0.7, 0.99])
def test_one_flipped_bit_is_seen(two, part):
    newest = two / "checkpoint-00000012.safetensors"
    data = bytearray(newest.read_bytes())
    data[int(len(data) * part)] ^= 1
    newest.write_bytes(data)
    with pytest.raises(Damaged, match="damaged"):
        checkpoint.read(newest)


def test_without_a_whole_checkpoint_nothing_is_touched(two):
    for path in checkpoint.found(two):
        path.write_bytes(path.read_bytes()[:-10])
    before = contents(two)
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read.*\n.*00012.*\n.*00009"):
        train(None, two, resume=True, quiet=True)
    assert contents(two) == before


def test_a_file_that_is_no_checkpoint(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "checkpoint-00000005.safetensors")
    with pytest.raises(Damaged, match="holds no checkpoint of linattn"):
        checkpoint.read(tmp_path / "checkpoint-00000005.safetensors")
    (tmp_path / "checkpoint-00000005.safetensors").write_text("hello")
    with pytest.raises(Damaged, match="damaged or cut off"):
        checkpoint.read(tmp_path / "checkpoint-00000005.safetensors")


def test_weights_of_another_model(halted, tmp_path):
    """A checkpoint of a wider model among this run's: refused, and nothing overwritten."""
    train(tiny(changes={**TINY.changes, "width": 24}, steps=20, checkpoint_every=20), tmp_path / "other", quiet=True)
    shutil.copy(tmp_path / "other" / "checkpoint-00000020.safetensors", halted)
    before = contents(halted)
    with pytest.raises(ValueError, match=r"checkpoint of step 20 in .* of another model: .* is \(.*24.*there and .*16"):
        train(None, halted, resume=True, quiet=True)
    assert contents(halted) == before


def test_data_that_changed(halted):
    form = json.loads((halted / "run.json").read_text())
    form["run"]["data_options"]["num_examples"] = 40
    (halted / "run.json").write_text(json.dumps(form))
    before = contents(halted)
    with pytest.raises(ValueError, match="this place is of another walk: its data is 'synthetic train"):
        train(None, halted, resume=True, quiet=True)
    assert contents(halted) == before


def test_a_resumed_run_may_be_longer_and_not_another(halted):
    with pytest.raises(ValueError, match=r"was begun with lr=0.01, not 0.5: resuming may change steps, minutes"):
        train(tiny(lr=0.5), halted, resume=True, quiet=True)
    assert train(tiny(steps=14, eval_every=0), halted, resume=True, quiet=True).step == 14
    assert json.loads((halted / "run.json").read_text())["run"]["steps"] == 14


def test_a_finished_run_stays_as_it_is(finished):
    before = contents(finished)
    result = train(None, finished, resume=True, quiet=True)
    assert result.step == 12 and result.evaluation is not None and result.evaluation["step"] == 12
    assert contents(finished) == before


def test_a_taken_folder_is_refused(finished):
    before = contents(finished)
    with pytest.raises(ValueError, match="holds a run already: resume it, or choose another folder"):
        train(TINY, finished, quiet=True)
    assert contents(finished) == before


def test_folders_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [train(tiny(steps=1), quiet=True).folder for _ in range(2)]
    assert [str(folder) for folder in made] == ["runs/tiny-1", "runs/tiny-2"]


def test_nothing_to_resume(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run to resume: there is no .*run.json"):
        train(None, tmp_path, resume=True, quiet=True)
    with pytest.raises(ValueError, match="Give its folder"):
        train(None, resume=True, quiet=True)
    (tmp_path / "run.json").write_text('{"run": ')
    with pytest.raises(ValueError, match=r"run.json is damaged, or no run of linattn"):
        train(None, tmp_path, resume=True, quiet=True)


def test_a_run_that_never_began_leaves_no_folder(tmp_path, monkeypatch):
    """A wrong field that only the model or the data can know, `position=spiral`; what was there before stays."""
    monkeypatch.chdir(tmp_path)
    wrong = tiny(changes={"position": "spiral"})
    with pytest.raises(ValueError, match="unknown position 'spiral'"):
        train(wrong, quiet=True)
    assert not list(tmp_path.glob("runs/*"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "notes").write_text("mine")
    for folder in ("mine", "begun"):
        with pytest.raises(ValueError, match="unknown position 'spiral'"):
            train(wrong, tmp_path / folder, quiet=True)
    assert (tmp_path / "mine").is_dir() and (tmp_path / "begun" / "notes").is_file()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ValueError, match="is a file: a run needs a folder"):
        train(TINY, tmp_path / "taken", quiet=True)
    with pytest.raises(ValueError, match=r"cannot write .*taken/below: Not a directory"):
        train(TINY, tmp_path / "taken" / "below", quiet=True)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_read_only_folder(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("linattn.train.run_folder.write_atomically", refuse)
    with pytest.raises(ValueError, match=r"cannot write .*run.json: Permission denied. Nothing was overwritten"):
        train(TINY, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("name", ["checkpoint-00000012.safetensors", "weights.safetensors", "run.json"])
def test_a_full_disk(halted, monkeypatch, name):
    """No room when `name` is to be written: an error that says so, all files whole, and later the run goes on."""
    good = os.fsync
    opened = {}

    def fsync(handle):
        if f".{name}." in os.readlink(f"/proc/self/fd/{handle}"):
            opened[name] = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        good(handle)

    before = contents(halted)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ValueError, match=rf"cannot write .*{name}: No space left on device. Nothing was overwritten"):
        train(None, halted, resume=True, quiet=True)
    after = contents(halted)
    assert opened and not [left for left in after if left.startswith(f".{name}")]
    for kept in ("checkpoint-00000009.safetensors", "run.json", "weights.safetensors"):
        assert after[kept] == before[kept] or (kept == "weights.safetensors" and name.startswith("checkpoint"))
    monkeypatch.undo()
    assert train(None, halted, resume=True, quiet=True).step == 12
    assert weights_of(halted)


def test_a_run_is_trained_by_one_process(halted):
    with alone(halted), pytest.raises(ValueError, match="another process is training in"):
        train(None, halted, resume=True, quiet=True)
    assert train(None, halted, resume=True, quiet=True).step == 12


def test_half_a_line_of_metrics_is_taken_out(halted, finished):
    with open(halted / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    train(None, halted, resume=True, quiet=True)
    for kind in ("train", "eval"):
        again, once = (list(map(without_clock, lines_of(f, kind))) for f in (halted, finished))
        assert again == once


def test_nothing_is_pickled(finished):
    for name, data in contents(finished).items():
        assert not data.startswith((b"PK", b"\x80")), name
    assert set(contents(finished)) == {
        ".lock",
        "run.json",
        "metrics.jsonl",
        "weights.safetensors",
        "checkpoint-00000009.safetensors",
        "checkpoint-00000012.safetensors",
    }
