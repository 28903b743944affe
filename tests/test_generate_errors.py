"""What generation refuses, and that it says what to do; and the line that it shows on a terminal."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from generate_cases import image_model, language_model

from linattn.generate import Snapshot, generate, progress, stream
from linattn.generate.progress import Progress
from linattn.models import LanguageConfig, LanguageModel, SpeechConfig, SpeechModel
from linattn.nn import Layer

LAYER = Layer(width=16, num_heads=2)


def text(**options):
    return lambda: generate(language_model(), **({"prompt": [1], "length": 8} | options))


def image(**options):
    return lambda: generate(image_model(), **options)


def resumed(**options):
    return lambda: generate(
        language_model(), snapshot=generate(language_model(), [[1], [2, 3]], length=6).snapshot, **options
    )


WRONG = {
    "no length": (text(length=None), r"length is missing: .* \(stream\(\) needs none\)"),
    "length 0": (text(length=0), "length must be an integer, at least 1, got 0"),
    "length 8.0": (text(length=8.0), "at least 1, got 8.0"),
    "long prompt": (text(prompt=[1] * 9), "the prompt has 9 values, more than length = 8, which counts them too"),
    "prompt of an image": (
        image(prompt=torch.zeros(1, 25, dtype=torch.uint8)),
        "the prompt has 25 values, more than length = 24",
    ),
    "longer than an image": (image(length=25), "length 25 is more than the 24 values that this model can make"),
    "longer than positions": (
        lambda: generate(
            LanguageModel(LanguageConfig(LAYER, 1, 9, position="learned", position_options={"max_length": 6})),
            [1],
            length=8,
        ),
        "length 8 is more than the 7 values",
    ),
    "empty row": (text(prompt=[[1], []]), "prompt row 1 is empty: give it a value, or leave the prompt out"),
    "empty prompt": (text(prompt=[]), "prompt row 0 is empty"),
    "no rows": (text(prompt=torch.zeros(0, 3, dtype=torch.int64)), "the prompt has no rows: leave it out"),
    "large value": (text(prompt=[[1], [2, 11]]), "prompt row 1 holds 11, the model's values are 0 … 10"),
    "negative value": (text(prompt=torch.tensor([-1])), "prompt row 0 holds -1"),
    "text": (text(prompt="abc"), r"encode it, for a model of bytes with text.encode\(\)"),
    "texts": (text(prompt=["abc"]), "a prompt is values, not a str"),
    "floats": (text(prompt=[1.5]), "prompt row 0 is a float: pass a tensor"),
    "float rows": (text(prompt=[[1.5]]), r"prompt row 0 holds something else than integers: \[1.5\]"),
    "float tensor": (text(prompt=torch.ones(3)), r"prompt row 0 is \(3,\) torch.float32, expected integers"),
    "images": (image(prompt=torch.zeros(1, 2, 3, 2, dtype=torch.uint8)), r"prompt row 0 is \(1, 2, 3, 2\) torch.uint8"),
    "a number": (text(prompt=3), "prompt row 0 is a int: pass a tensor"),
    "count 0": (text(count=0), "count must be an integer, at least 1, got 0"),
    "count True": (text(count=True), "got True"),
    "first row": (text(first_row=-1), "first_row must be an integer, at least 0, got -1"),
    "temperature": (text(temperature=-0.1), "temperature must be 0 .* got -0.1"),
    "top_k": (text(top_k=0), "top_k must be a positive integer"),
    "top_p": (text(top_p=1.5), r"top_p must lie in \(0, 1\]"),
    "stop": (text(stop=(3, 11)), "stop holds 11, which the model never makes: its values are 0 … 10"),
    "stop text": (text(stop="\n"), r"stop holds '\\n', which"),
    "seed -1": (text(seed=-1), "seed must be an integer in 0 … 2⁶⁴ - 1, got -1"),
    "seed 2^64": (text(seed=2**64), "got 18446744073709551616"),
    "graph": (text(graph=True), "graph=True makes the step a CUDA graph, and the model is on 'cpu': pass graph='auto'"),
    "graph word": (text(graph="yes"), "graph must be 'auto', True or False, got 'yes'"),
    "speech": (
        lambda: generate(SpeechModel(SpeechConfig(LAYER, 1, 3))),
        "image and language models generate, got a SpeechModel",
    ),
    "snapshot and prompt": (
        resumed(prompt=[1], seed=3),
        "prompt was given beside a snapshot, .* leave out prompt, seed",
    ),
    "snapshot and count": (resumed(count=2), "count was given beside a snapshot"),
    "snapshot, no cache": (resumed(cache=False), "cache was given beside a snapshot"),
    "shorter": (resumed(length=5), "the longest row of the snapshot has 6 values, more than length = 5"),
    "not a snapshot": (
        text(prompt=None, snapshot={}),
        r"snapshot must be a Snapshot, got dict: load one with Snapshot.load",
    ),
    "snapshot of a stream": (
        lambda: generate(language_model(), snapshot=stream(language_model(), [1], length=4).snapshot()),
        r"this snapshot is a stream's, .* go on with stream\(model, snapshot=…\)",
    ),
    "another model": (
        lambda: generate(language_model("softmax"), snapshot=generate(language_model(), [1], length=4).snapshot),
        r"not of this model: its state has blocks.0.own.memory.kv = .*, the model's None",
    ),
    "another dtype": (
        lambda: generate(language_model().float(), snapshot=generate(language_model(), [1], length=4).snapshot),
        "not of this model: its state has blocks.0.own.memory.kv = .*float64.*float32",
    ),
    "another device": (
        lambda: generate(language_model().to("meta"), snapshot=generate(language_model(), [1], length=4).snapshot),
        r"the snapshot is on cpu and the model on meta: use snapshot.to\('meta'\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_told_the_way_out(case, unchecked):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_file_of_something_else(tmp_path):
    stream(language_model(), [1]).snapshot().state.save(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="holds a StackState, expected a Snapshot"):
        Snapshot.load(tmp_path / "state.safetensors")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "shown", "seen"), [(True, None, True), (False, None, False), (False, True, True), (True, False, False)]
)
def test_progress_is_for_terminals(monkeypatch, terminal, shown, seen):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.__setitem__(0, now[0] + 0.06) or now[0])
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    generate(language_model(), [[1], [2]], length=11, seed=1, progress=shown)
    lines = [line for line in screen.getvalue().split("\r\x1b[K") if line]
    assert len(lines) == 5 * seen  # ten steps of 0.06 seconds, and a line each 0.1
    if seen:
        assert lines[-1] == "10 of 10 values, 2 rows, 33 values/s, 0 s left" and screen.getvalue().endswith("\r\x1b[K")


def test_the_line_of_one_row():
    bar = Progress(3072, 1, shown=False)
    for _ in range(1024):
        bar.step()
    assert bar.line(2.0) == "1,024 of 3,072 values, 512 values/s, 4 s left"
