"""`linattn transcribe`: sound files, or a live stream, to text; and what `linattn eval` says of a recogniser."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from linattn.audio import BadSound, from_pcm
from linattn.cli.sampling import load_model
from linattn.cli.show import complain, errors, say
from linattn.models import SpeechModel, shipped
from linattn.train.speech.data import find_corpus, load_speech
from linattn.train.speech.evaluate import evaluate_speech
from linattn.transcribe import Transcriber
from linattn.transcribe import transcribe as run_transcription

SHIPPED = "speech"
PIECE = 0.1  # seconds of a stream at a time, at most


def transcribe(
    files: Annotated[
        list[Path] | None, typer.Argument(help="wav, flac, ogg, opus or mp3, of any sampling rate.")
    ] = None,
    weights: Annotated[
        str, typer.Option("--model", help="A run's folder, a weights file, or the name of a shipped model.")
    ] = SHIPPED,
    stream: Annotated[
        bool, typer.Option("--stream", help="Raw samples from standard input: 16 bits, little-endian, one channel.")
    ] = False,
    rate: Annotated[int, typer.Option(help="Of the stream, samples a second.")] = 16_000,
    beam: Annotated[int, typer.Option(help="Label sequences that are followed; 0: the best path. Files only.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="CPU threads; pieces are small, and more than one rarely helps.")] = 1,
) -> None:
    """Write down what is said.

    One line for each file. A file that cannot be used is named, and the others are done all the same. A stream is
    printed as it comes, in constant memory; at its end stands how fast that was.

        linattn transcribe question.wav answer.flac --model runs/speech-1
        arecord -q -f S16_LE -r 16000 -c 1 -t raw | linattn transcribe --stream --model runs/speech-1
    """
    if stream == bool(files):
        raise ValueError("give sound files, or --stream to read standard input")
    if weights == SHIPPED and SHIPPED not in shipped() and not Path(SHIPPED).exists():
        raise ValueError(
            "no recogniser ships with this version: train one, `linattn train speech`, and name it: --model"
        )
    torch.set_num_threads(max(1, threads))  # on a busy machine two that wait for each other crawl
    model = load_model(weights, device)
    if not isinstance(model, SpeechModel):
        raise ValueError(f"{weights} holds a model of kind {type(model).__name__}: speech models transcribe")
    if stream:
        _stream(model, rate, sys.stdin.buffer)
    else:
        _files(model, files or [], beam)


def _files(model: SpeechModel, files: list[Path], beam: int) -> None:
    bad = 0
    for path in files:
        text = _text_of(model, path, beam)
        if text is None:
            bad += 1
        else:
            print(text if len(files) == 1 else f"{path}\t{text}", flush=True)
    if bad:
        if len(files) > 1:
            complain(f"{bad} of {len(files)} files could not be used")
        raise typer.Exit(1)


def _text_of(model: SpeechModel, path: Path, beam: int) -> str | None:
    """None where the file cannot be used, which is said."""
    try:
        return run_transcription(model, str(path), beam=beam).text
    except BadSound as error:
        complain(str(error))
        return None


def _stream(model: SpeechModel, rate: int, source: Any) -> None:
    heard, busy, longest = Transcriber(model, rate=rate), 0.0, 0.0
    size, rest = 2 * max(1, round(PIECE * rate)), b""
    try:
        while data := _some(source, size):
            data = rest + data
            rest = data[len(data) // 2 * 2 :]
            begun = time.perf_counter()
            text = heard.push(from_pcm(data[: len(data) // 2 * 2]))
            took = time.perf_counter() - begun
            busy, longest = busy + took, max(longest, took)
            print(text, end="", flush=True)
        print(heard.finish(), flush=True)
    except KeyboardInterrupt:
        print(flush=True)
    if rest:
        complain("the stream ended within a sample: is it 16 bits?")
    if heard.seconds:
        errors.print(
            f"{heard.seconds:.1f} s of sound in {busy:.2f} s: real-time factor {busy / heard.seconds:.3f}, at most "
            f"{1000 * longest:.0f} ms for a piece, {heard.nbytes:,} bytes remembered",
            highlight=False,
        )


def _some(source: Any, size: int) -> bytes:
    """What is there of a binary stream, at most `size` bytes; waits for the first of them."""
    return source.read1(size)


def judge(
    model: SpeechModel, record: Mapping[str, Any], split: str, data: str | None, **options: Any
) -> dict[str, Any]:
    """Print, and return, the error rate on a split of what the model was trained on, or of other `data`."""
    trained = record.get("run", {})
    name = trained.get("data") if data is None else data
    if name is None:
        raise ValueError("these weights do not say what they were trained on: name the data")
    given = trained.get("data_options", {}) if name == trained.get("data") else {}
    kept = {
        key: given[key] for key in ("data_dir", "units", "lexicon", "join", "max_seconds", "cache_dir") if key in given
    }
    held_out = load_speech(name, split=split, front=model.config.front, **kept).first(options.pop("examples"))
    corpus = find_corpus(name, kept.get("data_dir"), kept.get("lexicon"))
    known = {utterance.text for utterance in corpus.utterances("train")} if split != "train" else set()
    found = evaluate_speech(model, held_out, known=known, **options)
    low, high = found["interval"]
    say(
        f"{held_out.name} {split}, {found['examples']:,} utterances: {found['error_rate']:.2%} of labels wrong "
        f"(95%: {low:.2%} to {high:.2%}, drawing speakers)"
    )
    before, new = found.get("heard_before", {}), found.get("over_new", {})
    if before.get("labels") and new["labels"]:
        say(
            f"{before['examples']} sentences also in training: {before['error_rate']:.2%}; "
            f"others: {new['error_rate']:.2%}"
        )
    if "word_error_rate" in found:
        say(f"of words: {found['word_error_rate']:.2%}")
    return {"data": held_out.name, "split": split} | found


def register(app: typer.Typer) -> None:
    app.command()(transcribe)
