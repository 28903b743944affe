"""The command line as a user meets it: what it writes, what it says, and how it exits."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.cli import main as cli
from linattn.cli.show import grid, write_png
from linattn.models import ImageModel, build, preset, save
from linattn.train.data import load as load_data


def call(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `linattn words`."""
    monkeypatch.setattr("sys.argv", ["linattn", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    seen = capsys.readouterr()
    return code, seen.out, seen.err


@pytest.fixture
def linattn(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: call(monkeypatch, capsys, *words)


@pytest.fixture
def digits(tmp_path) -> str:
    """A tiny untrained model of digits, whose first values are those of the data."""
    model = build(preset("digits", width=8, num_heads=2, depth=1), generator=torch.Generator().manual_seed(0))
    assert isinstance(model, ImageModel)
    model.first.fit(load_data("digits").data.flatten(1)[:, 0])
    save(model, tmp_path / "digits.safetensors", {"run": {"data": "digits", "data_options": {}}})
    return str(tmp_path / "digits.safetensors")


TINY = ("width=8", "num_heads=2", "depth=1", "batch=4", "eval_examples=4")


def test_train_generate_eval_info(linattn, tmp_path):
    code, said, _ = linattn("train", "digits", "steps=2", "sample_every=2", "samples=4", *TINY, "--folder", "run")
    assert code == 0 and "linattn generate run" in said
    assert (tmp_path / "run/samples/step-00000002.png").is_file()
    code, said, _ = linattn("eval", "run", "--examples", "3")
    found = json.loads(said.splitlines()[-1])
    assert code == 0 and found["examples"] == 3 and 0 < found["bits"] < 12
    code, said, _ = linattn("info", "run")
    assert code == 0 and "whatever its length" in said and '"steps": 2' in said
    code, said, _ = linattn("train", "run", "steps=3", "--resume")
    assert code == 0 and len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 2


def test_a_seed_makes_the_same_picture(linattn, digits, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert linattn("generate", digits, "--count", "4", "--seed", seed, "--out", f"{name}.png")[0] == 0
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


def test_a_completion_keeps_the_top(linattn, digits, tmp_path):
    code, _, _ = linattn("complete", digits, "--data", "digits", "--index", "3", "--rows", "5", "--count", "2")
    assert code == 0
    with Image.open(tmp_path / "out/completed.png") as picture:
        size = 2 * 9 + 1  # four images of 8 pixels in two columns, lines around them
        sheet = torch.tensor(np.array(picture.convert("L").resize((size, size), Image.Resampling.NEAREST)))
    whole = load_data("digits", split="test").data[3, :, :, 0]
    assert torch.equal(sheet[1:9, 1:9], whole)
    for y, x in ((1, 10), (10, 1), (10, 10)):
        assert torch.equal(sheet[y : y + 5, x : x + 8], whole[:5])
    assert not sheet[6:9, 10:18].any()  # of the second picture only the top is given


def test_a_picture_file_is_completed(linattn, digits, tmp_path):
    Image.new("RGB", (40, 30), (255, 255, 255)).save(tmp_path / "white.jpg")
    assert linattn("complete", digits, "--image", "white.jpg", "--count", "1")[0] == 0


def test_text_is_streamed_behind_its_prompt(linattn, tmp_path):
    save(build(preset("text", width=8, num_heads=2, depth=1)), tmp_path / "text.safetensors")
    code, said, _ = linattn("generate", "text.safetensors", "--prompt", "Été ", "--length", "12", "--seed", "3")
    assert code == 0 and said.startswith("Été ") and len(said.strip("\n")) > 4
    assert linattn("generate", "text.safetensors", "--prompt", "Été ", "--length", "12", "--seed", "3")[1] == said


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("generate", "nothing"), 1, "no file, run folder or shipped model 'nothing'"),
        (("train", "digts"), 1, "digits"),
        (("train", "digits", "stpes=3"), 1, "did you mean 'steps'"),
        (("train", "digits", "lr=fast"), 1, "lr"),
        (("train", "digits", "--resume"), 1, "digits"),
        (("complete", "DIGITS"), 1, "--image FILE and --data NAME"),
        (("complete", "DIGITS", "--data", "digits", "--rows", "8"), 1, "between 1 and 7"),
        (("complete", "DIGITS", "--data", "digits", "--index", "200"), 1, "between 0 and 199"),
        (("complete", "DIGITS", "--image", "absent.png"), 1, "absent.png"),
        (("generate", "DIGITS", "--prompt", "a"), 1, "for text"),
        (("generate", "DIGITS", "--temperature", "-1"), 1, "temperature"),
        (("generate", "DIGITS", "--count", "many"), 2, "valid integer"),
        (("paint",), 2, "paint"),
    ],
)
def test_what_goes_wrong(linattn, digits, words, code, message):
    got, _, said = linattn(*(digits if word == "DIGITS" else word for word in words))
    assert got == code and message in " ".join(said.split()), said
    assert "Traceback" not in said


def test_ctrl_c_is_130(linattn, monkeypatch, digits):
    monkeypatch.setattr("linattn.cli.making.run_generation", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert linattn("generate", digits)[0] == 130


@pytest.mark.parametrize("command", ["train", "generate", "complete", "eval", "info"])
def test_help_teaches_by_example(linattn, command):
    code, said, _ = linattn(command, "--help")
    assert code == 0 and f"linattn {command} runs/" in said.replace("  ", " ")


def test_a_sheet_holds_every_image(tmp_path):
    images = torch.arange(5 * 2 * 3, dtype=torch.uint8).view(5, 2, 3, 1)
    sheet = grid(images, columns=2)
    assert sheet.shape == (3 * 3 + 1, 2 * 4 + 1, 1)
    for i in range(5):
        y, x = 1 + (i // 2) * 3, 1 + (i % 2) * 4
        assert torch.equal(sheet[y : y + 2, x : x + 3], images[i])
    with Image.open(write_png(sheet, tmp_path / "deep/er/sheet.png")) as picture:
        assert min(picture.size) >= 300
