"""`linattn eval` and `linattn info`: how good a model is on real data, and what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.text import Text

from linattn.bench.image_record import EVALUATED
from linattn.bench.report import counted
from linattn.cli import speech
from linattn.cli.sampling import load_model
from linattn.cli.show import console, say
from linattn.models import ImageModel, Model, SpeechModel
from linattn.models.files import find, record_of, to_json
from linattn.state import write_atomically
from linattn.train import evaluate as run_evaluation
from linattn.train import training_data
from linattn.train.data import Dataset
from linattn.train.evaluate import first
from linattn.train.metrics import clock
from linattn.train.recount import recount
from linattn.train.run_folder import writing

AGREE = 1e-3  # bits/dim by which two counts of the same images may differ
Weights = Annotated[str, typer.Argument(help="A run's folder, a weights file, or the name of a shipped model.")]


def evaluate(
    weights: Weights,
    data: Annotated[
        str | None, typer.Option(help="A dataset or a path; default: what the model was trained on.")
    ] = None,
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test",
    examples: Annotated[int | None, typer.Option(help="Only the first so many; default: all.")] = None,
    window: Annotated[
        int | None, typer.Option(help="Of a text: bytes that are predicted in a row. Default: as it was trained.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Examples at a time.")] = 64,
    beam: Annotated[int, typer.Option(help="Of speech: label sequences that are followed; 0: the best path.")] = 0,
    check: Annotated[
        int, typer.Option(help="Count the first so many images again, token by token, by other code; 0: do not.")
    ] = 0,
    record: Annotated[
        bool, typer.Option("--record", help="Keep the figures in the run's folder, for `linattn report images`.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Bits per value on held-out data, exactly.

    Images are reported as in the paper, the mean over values 2 … L given the first, and beside it over all L. A text is
    read in windows of the length that the model was trained with; one that was trained with stateful=true reads it as
    one stream. The last line is JSON.

        linattn eval runs/digits-1
        linattn eval runs/text-1 --data notes.txt --split dev
        linattn eval digits --check 16

    The last counts some of them a second time, in recurrent form, and fails where the two figures differ.
    """
    model, about = load_model(weights, device), record_of(weights)
    options = {"data": data, "examples": examples, "batch": batch, "beam": beam, "window": window}
    found = judge(model, about, split, **options)
    if check:
        found["check"] = second_count(model, training_data(about, split, data), check)
    text = json.dumps({"weights": str(find(weights))} | found)
    if record:
        path = find(weights).parent / EVALUATED.format(split=split)
        with writing(path):
            write_atomically(path, f"{text}\n".encode())
    print(text)
    if check and not found["check"]["agrees"]:
        raise typer.Exit(1)


def judge(
    model: Model,
    record: Mapping[str, Any],
    split: str,
    *,
    data: str | None = None,
    examples: int | None = None,
    window: int | None = None,
    batch: int = 64,
    beam: int = 0,
) -> dict[str, Any]:
    """Print, and return, how good a model is on a split."""
    if isinstance(model, SpeechModel):
        return speech.judge(model, record, split, data, examples=examples, batch=batch, beam=beam)
    if beam:
        raise ValueError("--beam is of speech models: leave it out")
    dataset = training_data(record, split, data)
    found = run_evaluation(model, dataset, batch=batch, examples=examples, **_reading(record, window, dataset.kind))
    unit = "bits/dim" if isinstance(model, ImageModel) else "bits/value"
    say(f"{dataset.name} {split}, {found['examples']:,} examples: {found['bits']:.4f} {unit}")
    if "bits_all" in found:
        say(f"over all values, the first by its frequency in training: {found['bits_all']:.4f} {unit}")
    return {"data": dataset.name, "split": split} | found


def second_count(model: Model, dataset: Dataset, images: int) -> dict[str, Any]:
    """The bits of the first images of a split, counted both ways, and whether the two agree."""
    if not isinstance(model, ImageModel):
        raise ValueError(f"--check counts images again, this is a {type(model).__name__}")
    some = first(dataset, images, None)
    whole = run_evaluation(model, some)["bits"]
    again = float(recount(model, some.data).mean())
    apart = abs(again - whole)
    words = "agree" if apart <= AGREE else f"DIFFER, by more than {AGREE:g}"
    say(f"{len(some)} images in parallel {whole:.5f}, token by token {again:.5f}: the figures {words}")
    return {"images": len(some), "bits": whole, "bits_again": again, "agrees": apart <= AGREE}


def _reading(record: Mapping[str, Any], window: int | None, kind: str) -> dict[str, Any]:
    """How a text is read: as in training, but for a window that was asked for."""
    if kind != "text":
        if window is not None:
            raise ValueError(f"--window is of texts, this data is {kind}: leave it out")
        return {}
    run = record.get("run", {})
    return {"window": run.get("window") if window is None else window, "carry": run.get("stateful", False)}


def info(
    weights: Weights,
    as_json: Annotated[bool, typer.Option("--json", help="All of it: the whole config and record.")] = False,
) -> None:
    """What a checkpoint is, and how it was trained.

    Its sizes, its attention and feature map, the bytes of a sequence's state, the data, the steps, the machine.

        linattn info runs/digits-1
        linattn info runs/digits-1 --json

    The second prints the whole config and record, to be read by programs.
    """
    model, record = load_model(weights, "cpu"), record_of(weights)
    if as_json:
        console.print_json(json.dumps({"config": to_json(model.config), "training": record}))
        return
    rows = [("file", str(find(weights))), *_sizes(model), *_training(record)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), f"  {text}"), soft_wrap=True)


def _sizes(model: Model) -> list[tuple[str, str]]:
    """What the model is made of."""
    layer = model.config.layer
    if layer.attention == "linear":
        state = f"{model.empty_state(1).nbytes:,} bytes, whatever its length"
    else:
        grown = model.empty_state(1, capacity=1024).nbytes - model.empty_state(1, capacity=512).nbytes
        state = f"{grown // 512:,} bytes for each token"
    return [
        ("model", f"{type(model).__name__}, {model.num_parameters:,} parameters"),
        ("layers", f"{model.config.depth} of width {layer.width}, {layer.num_heads} heads of {layer.key_width}"),
        ("attention", layer.attention + (f", map {layer.feature_map}" if layer.attention == "linear" else "")),
        ("state of a sequence", state),
    ]


def _training(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How it came about; nothing where the file does not say."""
    rows = _trained(record) if "step" in record else [("training", "not recorded")]
    if "packed" in record:
        small = record["packed"]
        before, after = (figure(small[when]) for when in ("before", "after"))
        rows.append(("rounded", f"to {small['form']}: {before} on {small['split']} before, {after} after"))
    return rows


def _trained(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    data, made, evaluation = record["data"], record["machine"], record["evaluation"]
    on = made["gpu"] or f"{made['system']}, {counted(made['threads'], 'thread')}"
    rows = [
        ("trained on", f"{data['name']}, {data['split']} split (licence: {data['licence']})"),
        ("trained for", f"{record['step']:,} steps of {record['run']['batch']} examples, {clock(record['seconds'])}"),
        ("machine", f"{on}, torch {record['versions']['torch']}"),
    ]
    if evaluation is not None:
        rows.append(("evaluation", f"{evaluation['bits']:.4f} bits on {evaluation['split']}"))
    return rows


def figure(found: Mapping[str, Any]) -> str:
    """The one number that an evaluation comes to."""
    return f"{found['error_rate']:.2%} wrong" if "error_rate" in found else f"{found['bits']:.4f} bits"


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(info)
