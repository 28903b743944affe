"""A training run at one step, in one safetensors file: tensors by name, everything else as JSON. Nothing is unpickled.

    runs/digits-1/checkpoint-00000500.safetensors         written whole or not at all; the newest two are kept

A checkpoint carries the sha256 of its contents. `newest` takes the latest one that is whole, and says which it left.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from linattn._typing import Tensor
from linattn.state import write_atomically
from linattn.train.run_folder import writing

ENTRY, DIGEST = "linattn_checkpoint", "sha256"
NAME = re.compile(r"checkpoint-(\d{8,})\.safetensors")
KEPT = 2


class Checkpoint(NamedTuple):
    """`tensors` by dotted names (model.…, optimizer.…), and `facts`: the step, the loader's place and the like."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Damaged(ValueError):
    """A file that is no whole checkpoint."""


def save(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write the checkpoint of facts["step"], then delete those older than the newest two."""
    path = folder / f"checkpoint-{facts['step']:08d}.safetensors"
    ready = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    text = json.dumps(facts)
    with writing(path):
        write_atomically(path, to_bytes(ready, metadata={ENTRY: text, DIGEST: _digest(ready, text)}))
        for old in found(folder)[KEPT:]:
            old.unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[Path]:
    """The folder's checkpoints, newest first."""
    files = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(files, key=_step, reverse=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The latest checkpoint that is whole, None where there is not one file; and a word on each damaged one."""
    damage: list[str] = []
    for path in found(folder):
        made = _whole(path)
        if isinstance(made, Checkpoint):
            return made, damage
        damage.append(str(made))
    if damage:
        raise ValueError(
            f"no checkpoint in {folder} can be read, so this run cannot go on. Start it anew in another folder; "
            f"nothing here was changed:\n  " + "\n  ".join(damage)
        )
    return None, damage


def _whole(path: Path) -> Checkpoint | Damaged:
    try:
        return read(path)
    except Damaged as error:
        return error


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint in a file. Damaged is raised for one that was cut off, altered, or is something else."""
    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path} is damaged or cut off ({error})") from error
    if ENTRY not in metadata:
        raise Damaged(f"{path} holds no checkpoint of linattn (no {ENTRY!r} entry)")
    if _digest(tensors, metadata[ENTRY]) != metadata.get(DIGEST):
        raise Damaged(f"{path} is damaged: its contents are not those that were written (the sha256 differs)")
    return Checkpoint(tensors, json.loads(metadata[ENTRY]))


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose name begins with `prefix.`, without it."""
    return {name[len(prefix) + 1 :]: x for name, x in tensors.items() if name.startswith(f"{prefix}.")}


def named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way: `prefix.` before each name."""
    return {f"{prefix}.{name}": x for name, x in tensors.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter, by the parameter's name."""
    moments = {name: optimizer.state.get(w, {}) for name, w in model.named_parameters()}
    return {f"{name}.{key}": torch.as_tensor(x) for name, kept in moments.items() for key, x in kept.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give back what `optimizer_tensors` took."""
    names = {w: name for name, w in model.named_parameters()}
    order = [names[w] for group in optimizer.param_groups for w in group["params"]]
    place = {name: i for i, name in enumerate(order)}
    moments: dict[int, dict[str, Tensor]] = {}
    for key, x in tensors.items():
        name, _, what = key.rpartition(".")
        moments.setdefault(place[name], {})[what] = x.clone()
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def load_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: object) -> None:
    """Put tensors into the model. Those of another model raise, and the model is left as it was."""
    mine = model.state_dict()
    wrong = [f"{name} is missing" for name in mine if name not in tensors]
    wrong += [f"{name} is not of this model" for name in tensors if name not in mine]
    wrong += [
        f"{name} is {tuple(tensors[name].shape)} there and {tuple(x.shape)} here"
        for name, x in mine.items()
        if name in tensors and tensors[name].shape != x.shape
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(f"the weights in {where} are of another model: {'; '.join(wrong[:3])}{more}")
    model.load_state_dict(dict(tensors))


def _step(path: Path) -> int:
    matched = NAME.fullmatch(path.name)
    assert matched
    return int(matched[1])


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.view(-1).view(torch.uint8).numpy().data if x.numel() else b"")
    return digest.hexdigest()
