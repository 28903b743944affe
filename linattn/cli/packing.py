"""`linattn pack`: a trained model as a small file with a model card, as the ones that ship with the package."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.bench.report import counted
from linattn.cli.judging import figure, judge
from linattn.cli.sampling import load_model
from linattn.cli.show import say
from linattn.models import Model, SpeechModel, save
from linattn.models.files import SHIPPED, find, record_of
from linattn.models.packed import FORMS
from linattn.state import write_atomically
from linattn.train.metrics import clock
from linattn.train.portable import pack as pack_checkpoint
from linattn.train.run_folder import writing

IN_WORDS = {"int8": "int8, with a float32 scale for each row", "bf16": "bfloat16"}
LICENCE = "The weights are under the licence of the package, Apache 2.0; the data has its own, above."


def pack(
    run: Annotated[str, typer.Argument(help="A run's folder, or a weights file.")],
    name: Annotated[str | None, typer.Option(help="What the packed model is to be called.")] = None,
    to: Annotated[Path | None, typer.Option(help="The folder for it. Default: where shipped models lie.")] = None,
    form: Annotated[str, typer.Option(help="int8 (a scale for each row) or bf16.")] = "int8",
    split: Annotated[str, typer.Option(help="What it is judged on before and after: test, dev or train.")] = "test",
    examples: Annotated[int | None, typer.Option(help="Only the first so many of them; default: all.")] = None,
    device: Annotated[str, typer.Option(help="Where it is judged: auto, cpu or cuda.")] = "auto",
    resumable: Annotated[
        bool, typer.Option("--resumable", help="Pack the newest checkpoint instead, to go on with it elsewhere.")
    ] = False,
) -> None:
    """Make a trained model small, and write its model card.

    Matrices are rounded to int8 with a scale for each row; the model is judged before and after.

        linattn pack runs/digits-1 --name digits --to .
        linattn generate digits.safetensors

    With --resumable it is the run that is packed, its newest checkpoint, in files of at most 15 MiB:

        linattn pack runs/mnist-1 --resumable --to stick/mnist-1
        linattn train stick/mnist-1 --resume

    The second line goes on with it, there or on another machine.
    """
    if resumable:
        if to is None or name is not None:
            raise ValueError("--resumable packs a checkpoint: give its folder, --to, and no --name")
        shards = pack_checkpoint(Path(run), to)
        size = sum(path.stat().st_size for path in shards)
        say(f"{len(shards)} files in {to}, {size / 2**20:.1f} MiB. Go on:  linattn train {to} --resume")
        return
    if not name:
        raise ValueError("what is the packed model to be called? Give --name")
    if form not in FORMS:
        raise ValueError(f"--form must be {' or '.join(FORMS)}, got {form!r}")
    path = (SHIPPED if to is None else to) / f"{name}.safetensors"
    _pack_model(run, path, form, {"split": split, "examples": examples}, device)


def _pack_model(run: str, path: Path, form: str, asked: dict[str, Any], device: str) -> None:
    model, record = load_model(str(find(run)), device), record_of(run)
    before = judge(model, record, **asked)
    with tempfile.TemporaryDirectory() as folder:
        trial = f"{folder}/trial.safetensors"
        save(model, trial, form=form)
        rounded = load_model(trial, device)
        after = judge(rounded, record, **asked)
    record["packed"] = {"form": form, "split": asked["split"], "before": before, "after": after}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        save(model, path, record, form=form)
        write_atomically(path.with_suffix(".md"), card(path.stem, model, record, path.stat().st_size).encode())
    say(f"wrote {path}, {path.stat().st_size / 1e6:.2f} MB ({figure(before)} before, {figure(after)} after)")


def card(name: str, model: Model, record: Mapping[str, Any], size: int) -> str:
    """What a model is, where it comes from, how good it is, and what one may do with it."""
    layer, small = model.config.layer, record["packed"]
    shape = f"{model.config.depth} layers of width {layer.width}, {layer.num_heads} heads, {layer.attention} attention"
    use = f"linattn transcribe FILE --model {name}" if isinstance(model, SpeechModel) else f"linattn generate {name}"
    lines = [
        f"# {name}",
        f"{type(model).__name__}, {model.num_parameters:,} parameters: {shape}. {size / 1e6:.2f} MB.",
        f"```bash\n{use}\nlinattn info {name}\nlinattn eval {name}\n```",
        "| | |\n| --- | --- |\n" + "\n".join(f"| {what} | {text} |" for what, text in _facts(record)),
        f"Large matrices are {IN_WORDS[small['form']]}. {LICENCE}",
        "The whole run, as `linattn train` takes it:",
        f"```json\n{json.dumps(record.get('run', {}), indent=1)}\n```",
    ]
    return "\n\n".join(lines) + "\n"


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    small = record["packed"]
    judged = f"{small['split']} split of {small['before']['data']}, {small['before']['examples']:,} examples"
    facts = [(f"before rounding ({judged})", _figures(small["before"])), ("after rounding", _figures(small["after"]))]
    if "step" not in record:
        return [("training", "not recorded"), *facts]
    data, made, run = record["data"], record["machine"], record["run"]
    on = made["gpu"] or f"{made['system']}, {counted(made['threads'], 'thread')}"
    return [
        ("data", f"{data['name']}, {data['split']} split, sha256 `{data['sha256'][:12]}…`; licence: {data['licence']}"),
        ("recipe", f"{run['name'] or run['preset']}, whose fields stand below"),
        ("trained for", f"{record['step']:,} steps of {run['batch']} examples, {clock(record['seconds'])} on {on}"),
        *facts,
    ]


def _figures(found: Mapping[str, Any]) -> str:
    if "bits_all" in found:
        return f"{found['bits']:.4f} bits/dim over values 2 … L, {found['bits_all']:.4f} over all L"
    return figure(found)


def register(app: typer.Typer) -> None:
    app.command()(pack)
