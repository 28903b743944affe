"""From sound to text: training, resuming, judging, transcribing whole and as a stream, and the commands."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from typing import Any

import pytest
import torch
from sound_cases import RATE, little_ocean, noise, pieces, said, write
from torch import Tensor
from train_cases import assert_same_weights, lines_of

from linattn.audio import BadSound, FrontEnd
from linattn.cli import speech as command
from linattn.cli.main import main
from linattn.models import SpeechModel, load, preset
from linattn.models.files import record_of
from linattn.train import load_run, override, train
from linattn.train.config import Run
from linattn.train.speech.data import load_speech
from linattn.train.speech.evaluate import evaluate_speech
from linattn.train.speech.trainer import SpeechTrainer, fitted
from linattn.transcribe import Transcriber, stream, transcribe


@pytest.fixture(scope="module")
def ocean(tmp_path_factory):
    return little_ocean(tmp_path_factory.mktemp("ocean"), speakers=20)


def tiny(ocean, **changes) -> Run:
    run = Run(
        preset="transcriber",
        changes={"width": 16, "num_heads": 2, "depth": 1, "dropout": 0.1},
        data="speechocean762",
        data_options={"data_dir": str(ocean), "cache_dir": None, "speeds": (0.9, 1.0), "batch_frames": 600},
        steps=12,
        batch=8,
        accumulate=2,
        lr=1e-2,
        schedule="constant",
        ema=0.9,
        log_every=3,
        eval_every=6,
        checkpoint_every=3,
        device="cpu",
    )
    return dataclasses.replace(run, **changes)


def plain(ocean, **changes) -> Run:
    """Without dropout, augmentation and averaging: the same batch gives the same gradient."""
    sizes = {"width": 16, "num_heads": 2, "depth": 1, "dropout": 0.0}
    run = tiny(ocean, **{"changes": sizes, "accumulate": 1, "ema": None, **changes})
    return dataclasses.replace(run, data_options={**run.data_options, "augment": False})


def begun(run: Run, folder) -> SpeechTrainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SpeechTrainer(run, None, folder, quiet=True)


def recogniser(**changes) -> SpeechModel:
    """Never trained; with inputs so large that it says something at every turn."""
    torch.manual_seed(0)
    front = FrontEnd().fitted(torch.full((40,), 9.0), torch.full((40,), 3.0))
    config: Any = preset(
        "transcriber", width=16, num_heads=2, depth=2, num_labels=3, labels=("B", "IY", "AH"), front=front
    )
    model = SpeechModel(dataclasses.replace(config, **changes)).eval()
    with torch.no_grad():
        model.enter.weight.mul_(20)
        model.head.linear.weight.mul_(10)
        model.head.linear.bias.zero_()
    return model


def test_it_learns_what_is_said(ocean):
    """Three tones as three words: a few seconds of training tell them apart, in voices that were not trained on."""
    run = plain(ocean, optimizer="adamw", steps=80)
    trainer = begun(run, ocean)
    for _ in range(run.steps or 0):
        trainer.update()
    found = evaluate_speech(trainer.model, trainer.load("dev"))
    assert found["error_rate"] < 0.1, found
    assert found["interval"][0] <= found["error_rate"] <= found["interval"][1]
    assert sum(e["labels"] for e in found["speakers"].values()) == found["labels"]
    greedy, beam = (evaluate_speech(trainer.model, trainer.load("test"), beam=b)["error_rate"] for b in (0, 4))
    assert max(greedy, beam) < 0.1


def test_resuming_ends_with_the_same_weights(ocean, tmp_path):
    train(tiny(ocean), tmp_path / "whole", quiet=True)
    train(tiny(ocean, steps=6), tmp_path / "parts", quiet=True)
    train(tiny(ocean), tmp_path / "parts", resume=True, quiet=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    line = lines_of(tmp_path / "whole", "eval")[-1]
    assert {"error_rate", "interval", "substitutions", "bits"} <= line.keys()
    assert record_of(tmp_path / "whole")["data"]["licence"].startswith("CC BY 4.0")
    model = load(tmp_path / "whole")
    assert isinstance(model, SpeechModel) and model.config.labels == ("AH", "B", "IY", "OW", "T")
    assert model.config.front is not None and len(model.config.front.mean) == 40


def test_a_batch_in_parts_has_the_gradient_of_the_whole(ocean):
    grads = []
    for accumulate in (1, 4):
        trainer = begun(plain(ocean, accumulate=accumulate), ocean)
        batch: Any = next(trainer.loader)
        trainer.backward(batch, batch)
        grads.append(torch.cat([w.grad.flatten() for w in trainer.model.parameters() if w.grad is not None]))
    assert torch.allclose(*grads, rtol=1e-3, atol=1e-5) and grads[0].abs().max() > 1e-2


def test_bfloat16_products_stay_close(ocean):
    losses = []
    for precision in ("fp32", "bf16"):
        trainer = begun(plain(ocean, precision=precision), ocean)
        batch: Any = next(trainer.loader)
        losses.append(float(trainer.backward(batch, batch)))
    assert losses[0] != losses[1] and abs(losses[0] / losses[1] - 1) < 0.05


def test_evaluation_tells_known_sentences_from_new_ones(ocean):
    data = load_speech("speechocean762", split="dev", data_dir=ocean, cache_dir=None)
    model = SpeechModel(fitted(preset("transcriber", width=16, num_heads=2, depth=1), data))
    found = evaluate_speech(model, data, known={data.texts[0]})
    assert found["heard_before"]["examples"] == data.texts.count(data.texts[0])
    assert found["heard_before"]["labels"] + found["over_new"]["labels"] == found["labels"]
    other = recogniser()
    with pytest.raises(ValueError, match=r"the model knows 3 labels \(B IY AH …\), the data has 5"):
        evaluate_speech(other, data)


def speech(seconds: float = 3.0, rate: int = RATE) -> Tensor:
    parts = [said(word, seed=i) for i, word in enumerate(("BEE", "TOE", "A") * 3)]
    return torch.cat(parts)[: round(seconds * rate)]


@pytest.mark.parametrize("rate", [RATE, 44_100])
@pytest.mark.parametrize("options", [{}, {"body": "lstm", "subsample": 1}], ids=["linear", "lstm"])
def test_a_stream_says_what_the_whole_says(rate, options):
    model, x = recogniser(**options), speech()
    whole = transcribe(model, x, rate=rate)
    assert len(whole.labels) > 5, "an untrained model that says nothing would prove nothing"
    for seed, most in ((0, 300), (1, 5_000), (2, 40_000)):
        assert "".join(stream(model, pieces(x, seed, most), rate=rate)) == whole.text
    assert transcribe(model, x, rate=rate, beam=3).seconds == whole.seconds


def test_a_stream_remembers_no_more_than_at_its_beginning():
    heard = Transcriber(recogniser())
    sizes = set()
    for i in range(60):
        heard.push(noise(0.1, seed=i))
        sizes.add(heard.nbytes)
    assert max(sizes) - min(sizes) <= 4 * 160 + 8 * 40 * 6 and heard.seconds == pytest.approx(6)


def test_a_file_is_transcribed_like_its_samples(tmp_path):
    model, x = recogniser(), speech()
    path = write(tmp_path / "a.wav", x, subtype="FLOAT")
    assert transcribe(model, path) == transcribe(model, x) == transcribe(model, path.read_bytes())
    offline = recogniser(layer=dataclasses.replace(model.config.layer, causal=False))
    assert transcribe(offline, path).seconds == 3
    with pytest.raises(ValueError, match="reads whole utterances"):
        Transcriber(offline)
    with pytest.raises(BadSound, match=r"silent"):
        transcribe(model, write(tmp_path / "b.wav", torch.zeros(RATE)))
    with pytest.raises(BadSound, match=r"no finite numbers, after 0\.50 s"):
        list(stream(model, [noise(0.5), torch.full((100,), torch.nan)]))
    with pytest.raises(ValueError, match="leave it out"):
        transcribe(model, path, rate=8_000)


def run_command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["linattn", *words])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    said_ = capsys.readouterr()
    return code, said_.out, said_.err


def test_the_commands(ocean, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    train(tiny(ocean, steps=3), folder, quiet=True)
    good, bad = write(tmp_path / "good.wav", speech()), tmp_path / "bad.wav"
    bad.write_text("no sound")
    expected = transcribe(load(folder), good).text  # type: ignore[arg-type]
    assert run_command(monkeypatch, capsys, "transcribe", str(good), "--model", str(folder))[:2] == (0, expected + "\n")
    code, out, err = run_command(monkeypatch, capsys, "transcribe", str(bad), str(good), "--model", str(folder))
    assert (code, out) == (1, f"{good}\t{expected}\n")
    assert "bad.wav cannot be read as sound" in err and "1 of 2 files could not be used" in err
    code, out, _ = run_command(monkeypatch, capsys, "eval", str(folder), "--split", "dev")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["examples"] == 24 and "of labels wrong" in out
    assert found["error_rate"] == pytest.approx(lines_of(folder, "eval")[-1]["error_rate"])
    for words in (["transcribe"], ["transcribe", str(good)], ["transcribe", "--stream", str(good)]):
        assert run_command(monkeypatch, capsys, *words)[0] == 1


def test_the_stream_of_the_command(capsys):
    model, x = recogniser(), speech()
    pcm = (x * 32767).to(torch.int16)
    command._stream(model, RATE, io.BytesIO(pcm.numpy().tobytes() + b"x"))
    said_ = capsys.readouterr()
    assert said_.out == transcribe(model, pcm.float() / 32768).text + "\n"
    assert "3.0 s of sound in" in said_.err and "real-time factor" in said_.err and "within a sample" in said_.err


def test_the_experiment_takes_anybodys_recordings():
    run = override(load_run("speech"), ["data=recordings", "units=characters", "attention=softmax", "bins=80"])
    assert run.data == "recordings" and run.data_options == {"units": "characters", "bins": 80}
    assert run.config().layer.attention == "softmax"


def test_a_causal_model_is_not_trained_on_what_it_cannot_have(ocean):
    run = tiny(ocean)
    run = dataclasses.replace(run, data_options={**run.data_options, "scaling": "utterance"})
    with pytest.raises(ValueError, match="take scaling=running, or causal=false"):
        SpeechTrainer(run, None, ocean, quiet=True)
