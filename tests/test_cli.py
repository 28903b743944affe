"""The command line as a user meets it: what it writes, what it says, and how it exits."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from linattn.cli import main as cli
from linattn.cli.sampling import samples
from linattn.cli.show import page
from linattn.models import ImageModel, LanguageModel, build, load, preset, save
from linattn.models.files import record_of
from linattn.train.data import load as load_data
from linattn.train.painting import FRAMES, few_greys, gif, stages, strip
from linattn.train.sheets import GREY, sheet


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


def draw(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


TINY = ("width=8", "num_heads=2", "depth=1", "batch=4", "eval_examples=4")


def test_train_generate_eval_info(linattn, tmp_path):
    code, said, _ = linattn("train", "digits", "steps=2", "sample_every=2", "samples=4", *TINY, "--folder", "run")
    assert code == 0 and "linattn generate run" in said
    assert (tmp_path / "run/samples/step-00000002.png").is_file()
    code, said, _ = linattn("eval", "run", "--examples", "3")
    found = json.loads(said.splitlines()[-1])
    assert code == 0 and found["examples"] == 3 and 0 < found["bits"] < 12
    code, said, _ = linattn("info", "run")
    assert code == 0 and "whatever its length" in said and "2 steps of 4 examples" in said and "bits on dev" in said
    code, said, _ = linattn("info", "run", "--json")
    assert code == 0 and json.loads(said)["training"]["run"]["steps"] == 2
    code, said, _ = linattn("train", "run", "steps=3", "--resume")
    assert code == 0 and len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize("stateful", [True, False])
def test_a_text_is_evaluated_as_it_was_trained(linattn, tmp_path, stateful):
    """In windows as long, or with stateful=true as one stream; another window is asked for."""
    (tmp_path / "notes").write_bytes(bytes(i * i % 251 for i in range(4000)))
    words = ("train", "text", "data=notes", "steps=1", "window=8", *TINY, f"stateful={stateful}", "--folder", "run")
    assert linattn(*words)[0] == 0
    bits = {}
    for window in (8, 16):
        asked = () if window == 8 else ("--window", "16")
        code, said, _ = linattn("eval", "run", "--batch", "5", *asked)
        assert code == 0
        bits[window] = json.loads(said.splitlines()[-1])["bits"]
        model, text = load("run"), load_data("notes", split="test").data[None].long()
        assert isinstance(model, LanguageModel)
        pieces = [*text.unfold(1, window + 1, window)[0].split(1), text[:, 199 // window * window :]]
        with torch.no_grad():
            whole = torch.cat([model.nats(some)[0] for some in ([text] if stateful else pieces)], 1)
        assert bits[window] == pytest.approx(float(whole.double().mean()) / math.log(2), rel=1e-5)
    assert (bits[8] == pytest.approx(bits[16], rel=1e-6)) == stateful


def test_all_fields_are_shown_as_they_are_set(linattn):
    code, said, _ = linattn("train", "text", "attention=softmax", "stateful=false", "--show")
    shown = dict(line.strip().split("=", 1) for line in said.splitlines() if "=" in line)
    assert code == 0 and shown["attention"] == "softmax" and shown["betas"] == "0.9,0.95" and shown["minutes"] == "none"
    keys = [f"{name}={value}" for name, value in shown.items() if name not in ("preset", "name")]
    assert dict(line.strip().split("=", 1) for line in linattn("train", "text", *keys, "--show")[1].splitlines()
                if "=" in line) == shown  # fmt: skip


def test_a_seed_makes_the_same_picture(linattn, digits, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert linattn("generate", digits, "--count", "4", "--seed", seed, "--out", f"{name}.png")[0] == 0
    a, b, c = ((tmp_path / f"{name}.png").read_bytes() for name in "abc")
    assert a == b != c


def test_a_completion_keeps_the_top(linattn, digits, monkeypatch):
    """As in the paper: what is given, the completions, the image itself; a row for each image."""
    shown = []
    monkeypatch.setattr("linattn.cli.making.show_sheet", lambda images, path, columns: shown.append((images, columns)))
    code, _, _ = linattn("complete", digits, "--data", "digits", "--index", "3,8", "--rows", "5", "--count", "2")
    ((images, columns),) = shown
    assert code == 0 and columns == 4 and len(images) == 8
    for row, index in ((images[:4], 3), (images[4:], 8)):
        whole = load_data("digits", split="test").data[index]
        assert torch.equal(row[3], whole) and (row[0, 5:] == GREY).all()
        for image in row:
            assert torch.equal(image[:5], whole[:5])
        assert not torch.equal(row[1], row[2])


def test_a_painting_is_shown_on_its_way(linattn, digits, tmp_path):
    code, said, _ = linattn("generate", digits, "--count", "5", "--gif", "--strip", "--out", "a.png", "--seed", "1")
    assert code == 0 and "wrote a.gif" in said and "wrote a-strip.png" in said
    with Image.open(tmp_path / "a.gif") as gif, Image.open(tmp_path / "a.png") as png:
        assert gif.n_frames == FRAMES and gif.size == png.size
        gif.seek(FRAMES - 1)
        assert np.array_equal(np.asarray(gif.convert("L")), few_greys(np.asarray(png)))
        gif.seek(0)
        assert (np.asarray(gif.convert("L")) == few_greys(np.full(1, GREY))).all()
    code, said, _ = linattn("complete", digits, "--data", "digits", "--count", "2", "--strip", "--out", "b.png")
    assert code == 0 and (tmp_path / "b-strip.png").is_file()


def test_a_gif_has_few_greys_black_and_white_among_them():
    shades = few_greys(np.arange(256, dtype=np.uint8))
    assert len(set(shades.tolist())) == 32 and (shades[0], shades[-1]) == (0, 255)
    assert np.abs(shades.astype(int) - np.arange(256)).max() <= 5  # half a step of 255 / 31, rounded


def test_stages_of_a_painting():
    images = draw(2, 20, 4, 3)
    made = stages(images, 3, begin=24)
    for values, stage in zip((24, 132, 240), made, strict=True):
        flat, whole = stage.flatten(1), images.flatten(1)
        assert flat[:, :values].equal(whole[:, :values]) and (flat[:, values:] == GREY).all()
    assert strip(images[:1, :4]).shape[1] > 5 * strip(images[:1, :4]).shape[0] and gif(images).startswith(b"GIF89a")


def test_a_picture_file_is_completed(linattn, digits, tmp_path):
    Image.new("RGB", (40, 30), (255, 255, 255)).save(tmp_path / "white.jpg")
    assert linattn("complete", digits, "--image", "white.jpg", "--count", "1")[0] == 0


def test_text_is_streamed_behind_its_prompt(linattn, tmp_path):
    save(build(preset("text", width=8, num_heads=2, depth=1)), tmp_path / "text.safetensors")
    code, said, _ = linattn("generate", "text.safetensors", "--prompt", "Été ", "--length", "12", "--seed", "3")
    assert code == 0 and said.startswith("Été ") and len(said.strip("\n")) > 4
    assert linattn("generate", "text.safetensors", "--prompt", "Été ", "--length", "12", "--seed", "3")[1] == said


def test_symbols_that_are_no_bytes_are_numbers(linattn, tmp_path):
    save(build(preset("copy", width=8, num_heads=2, depth=1)), tmp_path / "copy.safetensors")
    code, said, _ = linattn("generate", "copy.safetensors", "--length", "12", "--seed", "3")
    made = [int(word) for word in said.split()]
    assert code == 0 and len(made) == 12 and set(made) <= set(range(11))
    model = load("copy.safetensors")
    assert isinstance(model, LanguageModel) and all(set(text) <= set("0123456789 ") for text in samples(model, 2, 0))


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
        (("complete", "DIGITS", "--data", "digits", "--index", "3;5"), 1, "as in 3 or 3,5,8"),
        (("generate", "TEXT", "--count", "2"), 1, "are for images"),
        (("pack", "DIGITS"), 1, "Give --name"),
        (("pack", "DIGITS", "--name", "a", "--form", "int4"), 1, "must be int8 or bf16"),
        (("pack", "DIGITS", "--resumable"), 1, "give its folder, --to"),
        (("train", "mnist", "recipe=bets"), 1, "its recipes are paper, best"),
        (("train", "digits", "recipe=best"), 1, "leave recipe= out"),
        (("generate", "DIGITS", "--device", "gpu"), 1, "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (("eval", "DIGITS", "--beam", "3"), 1, "--beam is of speech models"),
        (("eval", "DIGITS", "--examples", "0"), 1, "examples must be at least 1"),
        (("generate", "DIGITS", "--count", "many"), 2, "valid integer"),
        (("paint",), 2, "paint"),
    ],
)
def test_what_goes_wrong(linattn, digits, words, code, message):
    if "TEXT" in words:
        save(build(preset("text", width=8, num_heads=2, depth=1)), "TEXT")
    got, _, said = linattn(*(digits if word == "DIGITS" else word for word in words))
    assert got == code and message in " ".join(said.split()), said
    assert "Traceback" not in said


def test_version_says_what_is_installed(linattn):
    code, out, _ = linattn("--version")
    assert code == 0 and out.startswith("linattn 0.") and f"torch {torch.__version__}" in out


def test_ctrl_c_is_130(linattn, monkeypatch, digits):
    monkeypatch.setattr("linattn.cli.making.run_generation", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert linattn("generate", digits)[0] == 130


def test_a_warning_is_a_line(tmp_path):
    """Of what was skipped, for one, without the line of source that it came from. In a process: pytest has its own."""
    (tmp_path / "photos").mkdir()
    for i in range(8):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"photos/{i}.png")
    (tmp_path / "photos/notes.txt").write_text("no image")
    words = [sys.executable, "-m", "linattn.cli.main", "train", "folder", "data=photos", "size=4", "steps=1", *TINY]
    words = [word for word in words if not word.startswith("batch")] + ["batch=2", "sample_every=0", "samples=1"]
    run = subprocess.run(words, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "warning: skipped 1 of 9 files in photos: notes.txt" in run.stderr
    assert "UserWarning" not in run.stderr and "load_data" not in run.stderr


def test_a_reader_that_leaves_hears_no_complaint(tmp_path):
    """As `linattn generate … | head -c 20` does."""
    save(build(preset("text", width=8, num_heads=2, depth=1)), tmp_path / "text.safetensors")
    words = [sys.executable, "-m", "linattn.cli.main", "generate", "text.safetensors", "--length", "100000"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr and process.stdout.read(20)
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1 and said == ""


def test_pack_writes_weights_and_a_card(linattn, digits, tmp_path):
    code, said, _ = linattn("pack", digits, "--name", "tiny", "--to", "made", "--split", "dev", "--examples", "3")
    assert code == 0 and "bits before" in said
    record = record_of("made/tiny.safetensors")
    assert record["packed"]["form"] == "int8" and record["packed"]["after"]["examples"] == 3
    assert "linattn generate tiny" in (tmp_path / "made/tiny.md").read_text()
    code, said, _ = linattn("info", "made/tiny.safetensors")
    assert code == 0 and "to int8: " in said and "on dev before" in said
    assert linattn("generate", "made/tiny.safetensors", "--count", "2")[0] == 0


def test_a_packed_run_goes_on(linattn, tmp_path):
    assert linattn("train", "digits", "steps=2", "sample_every=0", "samples=4", *TINY, "--folder", "run")[0] == 0
    code, said, _ = linattn("pack", "run", "--resumable", "--to", "stick")
    assert code == 0 and "linattn train stick --resume" in said
    assert [path.name for path in (tmp_path / "stick").iterdir()] == ["portable-1-of-1.safetensors"]
    code, said, _ = linattn("train", "stick", "steps=3", "--resume")
    assert code == 0 and (tmp_path / "stick/weights.safetensors").is_file()


@pytest.mark.parametrize("command", ["train", "generate", "complete", "eval", "info", "pack"])
def test_help_teaches_by_example(linattn, command):
    code, said, _ = linattn(command, "--help")
    lines = [line.strip() for line in said.splitlines()]
    examples = [line for line in lines if line.startswith(f"linattn {command} ")]
    assert code == 0 and any(f"linattn {command} runs/" in line for line in examples)
    assert all(line.count("linattn") == 1 for line in examples)  # one a line, not run together as a paragraph


def test_a_page_of_a_terminal():
    """As large as it fits; where not all images do, the first that do, pixel by pixel."""
    images = draw(6, 8, 8, 1)
    assert page(images, 60, 40).equal(sheet(images, scale=2)) and page(images, 400, 200).equal(sheet(images, scale=4))
    few = page(images, 20, 9)
    assert few.shape == (19 - 9, 19, 1) and few.equal(sheet(images[:2], columns=2, scale=1, smooth=False))
    assert page(images, 3, 1).shape == (10, 10, 1)
