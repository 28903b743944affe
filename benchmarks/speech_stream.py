"""An hour of speech as one stream: does what it costs, and what is remembered, stay the same?

What    Utterances of a split, joined (and repeated where they do not fill the time), are pushed in pieces of 100 ms.
        For each minute: the time of a piece (middle, 99%, longest), bytes remembered, memory of the process, and the
        rate of wrong labels, which shows whether a long past confuses the model.
Why     Constant memory and time for each piece are what linear attention promises; an absolute claim needs a record.
How     python benchmarks/speech_stream.py runs/speech-1 [--minutes 60] [--split dev]
Out     A table, and all numbers as JSON in benchmarks/results/ (<date>-<machine>-speech-stream.json).
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from linattn._typing import Tensor
from linattn.audio import read
from linattn.bench.machine import environment, resident_memory
from linattn.bench.report import heading, save_json
from linattn.models import SpeechModel, load
from linattn.models.files import record_of
from linattn.train.speech.corpus import Labeller, Utterance
from linattn.train.speech.data import find_corpus
from linattn.train.speech.error_rate import errors
from linattn.transcribe import Transcriber

PIECE = 0.1  # seconds
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
HEAD = f"{'minute':>7}{'median ms':>11}{'99% ms':>9}{'longest ms':>12}{'remembered':>12}{'process MB':>12}{'wrong':>9}"


class Block(NamedTuple):
    """About a minute: its samples, and the labels of what is said in it."""

    samples: Tensor
    labels: list[int]


@app.command()
def main(
    weights: Annotated[Path, typer.Argument(help="A causal recogniser: a run's folder or a weights file.")],
    minutes: Annotated[float, typer.Option(help="Of sound.")] = 60.0,
    split: Annotated[str, typer.Option(help="Whose utterances: dev, train or test.")] = "dev",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A .json file or a folder, instead of the usual place.")] = None,
):
    """Push a long stream through a recogniser."""
    torch.set_num_threads(threads)
    about = environment()
    model, run = load(weights), record_of(weights)["run"]
    assert isinstance(model, SpeechModel)
    blocks = minute_by_minute(model, run, split)
    heard, lines, begun = Transcriber(model), [], 0.0
    print(f"{heading(about)}\n\n{HEAD}")
    while heard.seconds < 60 * minutes:
        lines.append(line(heard, blocks[len(lines) % len(blocks)], begun))
        begun = heard.seconds
        print(in_words(lines[-1]), flush=True)
    busy = sum(one["busy_seconds"] for one in lines)
    print(f"{heard.seconds / 60:.1f} minutes in {busy:.1f} s: real-time factor {busy / heard.seconds:.4f}")
    data = {"what": "speech-stream", "environment": about, "weights": str(weights.name), "split": split}
    data |= {"parameters": model.num_parameters, "piece_seconds": PIECE, "seconds": heard.seconds}
    data |= {"real_time_factor": busy / heard.seconds, "record": without_paths(record_of(weights)), "minutes": lines}
    print(f"\nwritten: {save_json(json.loads(json.dumps(data)), 'speech-stream', out)}")


def without_paths(record: dict[str, Any]) -> dict[str, Any]:
    """How the model was trained, without where this machine keeps its files."""
    options = {key: x for key, x in record["run"]["data_options"].items() if key not in ("data_dir", "cache_dir")}
    return record | {"run": record["run"] | {"data_options": options}}


def minute_by_minute(model: SpeechModel, run: dict[str, Any], split: str) -> list[Block]:
    """The split's utterances, joined to blocks of a minute or a little more."""
    options = run["data_options"]
    corpus = find_corpus(run["data"], options.get("data_dir"), options.get("lexicon"))
    label = Labeller(options.get("units") or ("phonemes" if corpus.lexicon else "characters"), corpus)
    front = model.config.front
    assert front is not None
    blocks: list[Block] = []
    parts: list[tuple[Tensor, Utterance]] = []
    for utterance in corpus.utterances(split):
        parts.append((read(utterance.contents(), rate=front.rate).samples, utterance))
        if sum(len(samples) for samples, _ in parts) >= 60 * front.rate:
            blocks.append(joined(parts, label))
            parts = []
    return blocks or [joined(parts, label)]


def joined(parts: list[tuple[Tensor, Utterance]], label: Labeller) -> Block:
    return Block(torch.cat([samples for samples, _ in parts]), [i for _, one in parts for i in label(one.text)])


def line(heard: Transcriber, block: Block, begun: float) -> dict[str, Any]:
    """A block through the stream, and what it cost."""
    took = []
    for piece in block.samples.split(round(PIECE * heard.rate)):
        before = time.perf_counter()
        heard.hear(piece)
        took.append(time.perf_counter() - before)
    said, heard.labels = heard.labels, []
    took.sort()
    return {
        "begun_seconds": begun,
        "seconds": len(block.samples) / heard.rate,
        "busy_seconds": sum(took),
        "median_ms": 1000 * statistics.median(took),
        "p99_ms": 1000 * took[int(0.99 * (len(took) - 1))],
        "longest_ms": 1000 * took[-1],
        "remembered_bytes": heard.nbytes,
        "process_bytes": resident_memory(),
        "error_rate": errors(block.labels, said).rate,
    }


def in_words(one: dict[str, Any]) -> str:
    process = "" if one["process_bytes"] is None else f"{one['process_bytes'] / 2**20:.1f}"
    return (
        f"{one['begun_seconds'] / 60:>7.1f}{one['median_ms']:>11.2f}{one['p99_ms']:>9.2f}{one['longest_ms']:>12.2f}"
        f"{one['remembered_bytes']:>12,}{process:>12}{one['error_rate']:>9.1%}"
    )


if __name__ == "__main__":
    app()
