"""`linattn eval` and `linattn info`: how good a model is on real data, and what it is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from linattn.cli.sampling import load_model
from linattn.cli.show import console, say
from linattn.models import ImageModel, SpeechModel
from linattn.models.files import find, record_of, to_json
from linattn.train import evaluate as run_evaluation
from linattn.train import training_data

Weights = Annotated[str, typer.Argument(help="A run's folder, a weights file, or the name of a shipped model.")]


def evaluate(
    weights: Weights,
    data: Annotated[
        str | None, typer.Option(help="A dataset or a path; default: what the model was trained on.")
    ] = None,
    split: Annotated[str, typer.Option(help="train, dev or test.")] = "test",
    examples: Annotated[int | None, typer.Option(help="Only the first so many; default: all.")] = None,
    batch: Annotated[int, typer.Option(help="Examples at a time.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Bits per value on held-out data, exactly.

        linattn eval runs/digits-1
        linattn eval runs/text-1 --data notes.txt --split dev

    Images are reported as in the paper, the mean over values 2 … L given the first, and beside it over all L.
    """
    model = load_model(weights, device)
    if isinstance(model, SpeechModel):
        raise ValueError(f"{weights} is a speech model: this version evaluates images and text")
    dataset = training_data(record_of(weights), split, data)
    found = run_evaluation(model, dataset, batch=batch, examples=examples)
    unit = "bits/dim" if isinstance(model, ImageModel) else "bits/value"
    say(f"{dataset.name} {split}, {found['examples']:,} examples: {found['bits']:.4f} {unit}")
    if "bits_all" in found:
        say(f"over all values, the first by its frequency in training: {found['bits_all']:.4f} {unit}")
    print(json.dumps({"weights": str(find(weights)), "data": dataset.name, "split": split} | found))


def info(weights: Weights) -> None:
    """What a checkpoint is: its sizes, its attention and map, what a sequence's state costs, and how it was trained.

    linattn info runs/digits-1
    """
    model = load_model(weights, "cpu")
    layer = model.config.layer
    state = model.empty_state(1)
    rows = [
        ("file", str(find(weights))),
        ("model", type(model).__name__),
        ("parameters", f"{model.num_parameters:,}"),
        ("layers", f"{model.config.depth} of width {layer.width}, {layer.num_heads} heads of {layer.key_width}"),
        ("attention", layer.attention + (f", map {layer.feature_map}" if layer.attention == "linear" else "")),
    ]
    if layer.attention == "linear":
        rows.append(("state of a sequence", f"{state.nbytes:,} bytes, whatever its length"))
    else:
        grown = model.empty_state(1, capacity=1024).nbytes - model.empty_state(1, capacity=512).nbytes
        rows.append(("state of a sequence", f"{grown // 512:,} bytes for each token"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"[bold]{name:<{width}}[/bold]  {text}", highlight=False, soft_wrap=True)
    console.print_json(json.dumps({"config": to_json(model.config), "training": record_of(weights)}))


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
    app.command()(info)
