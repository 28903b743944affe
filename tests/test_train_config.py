"""Runs as values: what the command line may say, what is refused and how, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from train_cases import TINY, tiny

from linattn.models import LanguageModel, build, preset
from linattn.train import Run, load_run, override, train
from linattn.train.config import CHANGEABLE, fit_to, run_from_json

EXPERIMENTS = ("digits", "mnist", "cifar10", "copy_task", "text", "folder", "speech")

PARSED = [
    ("steps=200", "steps", 200),
    ("steps=1e3", "steps", 1000),
    ("steps=1_000", "steps", 1000),
    ("minutes=1.5", "minutes", 1.5),
    ("lr=3e-4", "lr", 3e-4),
    ("lr=1", "lr", 1.0),
    ("clip=none", "clip", None),
    ("clip=None", "clip", None),
    ("ema=0.99", "ema", 0.99),
    ("compile=true", "compile", True),
    ("compile=no", "compile", False),
    ("betas=0.8,0.95", "betas", (0.8, 0.95)),
    ("betas=(0.8, 0.95)", "betas", (0.8, 0.95)),
    ("data=a=b.txt", "data", "a=b.txt"),
    ("data=none", "data", "none"),
    ("start=none", "start", None),
    ("start=digits", "start", "digits"),
    ("seed=7", "seed", 7),
]


@pytest.mark.parametrize(("setting", "name", "value"), PARSED, ids=[setting for setting, _, _ in PARSED])
def test_settings_are_typed(setting, name, value):
    made = getattr(override(TINY, [setting]), name)
    assert made == value and type(made) is type(value)


def test_settings_reach_the_model_and_the_data():
    run = override(TINY, ["attention=softmax", "depth=4", "size=6", "data.seed=3", 'map_options={"a": 1}', "scale=0.5"])
    assert run.changes == {
        "width": 16, "num_heads": 2, "depth": 4, "attention": "softmax", "map_options": {"a": 1}, "scale": 0.5
    }  # fmt: skip
    assert run.data_options == {"size": 6, "num_examples": 48, "seed": 3}
    assert run.seed == TINY.seed and TINY.changes == {"width": 16, "num_heads": 2, "depth": 1}
    config = run.config()
    assert config.depth == 4 and config.layer.attention == "softmax" and config.layer.scale == 0.5
    assert override(TINY, ["model.head=logistics"]).changes["head"] == "logistics"


def test_the_last_of_two_settings_counts():
    assert override(TINY, ["steps=3", "steps=4"]).steps == 4


def test_changes_of_another_model_or_data_are_dropped():
    assert override(TINY, ["preset=copy", "data=copy", "depth=2", "length=20"]) == dataclasses.replace(
        TINY, preset="copy", data="copy", changes={"depth": 2}, data_options={"length": 20}
    )


REFUSED = {
    "stepz=3": r"unknown key 'stepz'; did you mean 'steps'\?\n  a run has accumulate, batch, .*\n  the model has ac",
    "model.stepz=3": r"unknown key 'stepz'.*\n  the model has activation, attention",
    "data.width=3": r"unknown key 'width'.*\n  the data has augment, batch_frames",
    "steps": "expected key=value, got 'steps'",
    "=3": "expected key=value",
    "steps=many": "steps must be an integer or none, got 'many'",
    "steps=1.5": "steps must be an integer or none, got '1.5'",
    "lr=fast": "lr must be a number, got 'fast'",
    "compile=perhaps": "compile must be true or false, got 'perhaps'",
    "betas=0.9,x": "betas must be numbers with commas between them",
    "map_options=[1]": "map_options must be a JSON object",
    "depth=deep": "depth must be an integer",
    "attention=quadratic": "attention must be one of linear, softmax, reformer",
    "preset=imagenet": "unknown preset 'imagenet'",
    "optimizer=sgd": "optimizer must be one of radam, adamw, got 'sgd'",
    "schedule=linear": "schedule must be one of constant, cosine, step, plateau",
    "precision=fp16": "precision must be one of fp32, bf16",
    "split=validation": "split must be one of train, dev, test",
    "batch=0": "batch must be an integer of at least 1, got 0",
    "warmup=-1": "warmup must be an integer of at least 0, got -1",
    "lr=-1": "lr must lie in 0 … 100",
    "ema=1.5": "ema must lie in 0 … 1",
    "clip=0": "clip must be positive",
    "minutes=0": "minutes must be positive",
    "betas=0.9": "betas must be two numbers",
    "steps=none": "a run must end: set steps=, minutes= or both",
    "accumulate=3": "batch=8 does not divide into accumulate=3 equal parts",
    "schedule=step": "schedule=step needs drops=",
    "drops=3": "drops= belongs to schedule=step",
    "stateful=true": "stateful training reads a text in windows: set window=",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_is_refused(setting):
    with pytest.raises(ValueError, match=REFUSED[setting]):
        override(TINY, [setting])


def test_a_growing_state_is_not_carried():
    with pytest.raises(ValueError, match="attention must be linear, got softmax"):
        override(tiny(window=4), ["stateful=true", "attention=softmax"])
    with pytest.raises(ValueError, match="schedule=plateau watches the evaluations"):
        override(TINY, ["schedule=plateau", "eval_every=0"])


def test_runs_survive_json():
    run = tiny(changes={"shape": (4, 4, 1), "depth": 2}, drops=(3, 5), schedule="step", minutes=2.5)
    assert run_from_json(json.loads(json.dumps(run.to_json()))) == run
    with pytest.raises(ValueError, match=r"a file: a run has .*lr|unknown key 'learning_rate'"):
        run_from_json({"preset": "digits", "data": "digits", "steps": 1, "learning_rate": 1.0}, "a file")


def test_a_name_means_the_experiment_whatever_lies_around(tmp_path, monkeypatch):
    """`linattn train digits` once took a folder `digits` in the current one for the run, and its old fields."""
    monkeypatch.chdir(tmp_path)
    expected = load_run("digits")
    train(TINY, tmp_path / "digits", quiet=True)
    assert load_run("digits") == expected != load_run("./digits") == TINY


def test_runs_come_from_names_files_and_folders(tmp_path):
    assert load_run("digits").name == "digits"
    path = tmp_path / "mine.py"
    path.write_text('from linattn.train import Run\nRUN = Run("digits", "digits", steps=3)\n')
    assert load_run(path) == Run("digits", "digits", steps=3, name="mine")
    train(TINY, tmp_path / "run", quiet=True)
    assert load_run(tmp_path / "run") == TINY
    with pytest.raises(
        ValueError, match=r"no run 'nothing': .* nor one of cifar10, copy_task, digits, folder, mnist, speech, te"
    ):
        load_run("nothing")
    for wrong in (tmp_path, tmp_path / "nothing.txt"):
        with pytest.raises(ValueError, match="neither a Python file, nor the folder of a run"):
            load_run(wrong)
    path.write_text("RUN = 3\n")
    with pytest.raises(ValueError, match=r"mine.py defines no run: .* and RUN is a int"):
        load_run(path)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_its_command(name):
    run = load_run(name)
    text = (Path(__file__).parents[1] / "linattn" / "experiments" / f"{name}.py").read_text()
    assert text.startswith(f'"""linattn train {name}')
    assert run.name == name and run.config() and set(CHANGEABLE) <= {f.name for f in dataclasses.fields(Run)}


def test_every_experiment_is_listed():
    folder = Path(__file__).parents[1] / "linattn" / "experiments"
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(EXPERIMENTS)


def test_a_model_takes_the_shape_of_its_images():
    config = fit_to(preset("mnist", depth=1), "images", (5, 4, 3), 256)
    assert config == preset("mnist", depth=1, shape=(5, 4, 3))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("mnist", ("text", (), 256), "an image model is trained on images, this data is text"),
        ("speech", ("text", (), 256), "this loop trains image and language models, got a SpeechConfig"),
        ("copy", ("text", (), 256), r"values 0 … 255 and the model a vocabulary of 11: set vocabulary=256"),
    ],
)
def test_data_that_no_model_fits(name, data, message):
    with pytest.raises(ValueError, match=message):
        fit_to(preset(name), *data)


def test_a_language_model_reads_images_too():
    config = fit_to(preset("text", depth=1), "images", (4, 4, 1), 256)
    assert isinstance(build(config), LanguageModel)
