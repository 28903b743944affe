"""Models on disk: one safetensors file that holds the weights, the config and the training record. Never unpickled.

`load` takes such a file, the folder of a run, or the name of a model that ships with the package.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch

from linattn.audio.front import FrontEnd
from linattn.models.image import ImageConfig, ImageModel
from linattn.models.lm import LanguageConfig, LanguageModel
from linattn.models.packed import packed, unpacked
from linattn.models.presets import Config
from linattn.models.speech import SpeechConfig, SpeechModel
from linattn.nn.layer import Layer
from linattn.state import write_atomically

SHIPPED = Path(__file__).resolve().parent.parent / "weights"
IN_A_RUN = "weights.safetensors"
ENTRY, RECORD, FORM = "linattn_model", "linattn_record", "linattn_packed"
TO_SHIP = ("digits", "mnist", "cifar10", "speech")  # names of experiments whose weights ship, once they are trained
Model = ImageModel | LanguageModel | SpeechModel
MODELS: dict[type, type] = {ImageConfig: ImageModel, LanguageConfig: LanguageModel, SpeechConfig: SpeechModel}


def build(config: Config, *, generator: torch.Generator | None = None) -> Model:
    """The model of a config, freshly initialised: weights from torch's generator, random maps and hashes from yours."""
    if type(config) not in MODELS:
        raise ValueError(f"no model has a {type(config).__name__}; configs are {', '.join(c.__name__ for c in MODELS)}")
    return MODELS[type(config)](config, generator=generator)


def save(
    model: Model, path: str | os.PathLike[str], record: dict[str, Any] | None = None, *, form: str | None = None
) -> None:
    """Write the model, whole or not at all. `record` says how it was trained, in plain values.

    form: "int8" or "bf16" rounds large matrices (see packed.py), which `load` gives back in float32. None: as it is.
    """
    from safetensors.torch import save as to_bytes

    tensors = {name: x.detach().contiguous() for name, x in model.state_dict().items()}
    metadata = {ENTRY: json.dumps(to_json(model.config)), RECORD: json.dumps(record or {})}
    if form is not None:
        tensors, metadata = packed(tensors, form), metadata | {FORM: form}
    write_atomically(path, to_bytes(tensors, metadata=metadata))


def load(name: str | os.PathLike[str], device: str | torch.device = "cpu") -> Model:
    """A trained model, ready to use (`eval` mode): from a file, the folder of a run, or by the name it ships under."""
    path = find(name)
    metadata, tensors = read(path, device)
    with torch.random.fork_rng(devices=()):  # the weights that are about to be replaced draw nothing from a run's own
        model = build(from_json(_parsed(metadata[ENTRY], path), path))
    try:
        model.load_state_dict(tensors, assign=True)  # in the file's dtype, on the device they were read to
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit their own config: {error}") from error
    return model.eval()


def record_of(name: str | os.PathLike[str]) -> dict[str, Any]:
    """How the model was trained, as `save` was told."""
    path = find(name)
    return _parsed(read(path, "meta")[0].get(RECORD, "{}"), path)


def read(path: Path, device: str | torch.device) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of a model file; on "meta", no tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt", device="cpu" if str(device) == "meta" else str(device)) as file:
            metadata = file.metadata() or {}
            names = () if str(device) == "meta" else tuple(file.keys())
            # Copies: a file's tensors begin anywhere, and where they begin can change the last bit of a product.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors, it may be damaged or cut off ({error})") from error
    if ENTRY not in metadata:
        raise ValueError(f"{path} holds no linattn model (no {ENTRY!r} entry): is it a checkpoint, or somebody else's?")
    return metadata, unpacked(tensors) if FORM in metadata else tensors


def find(name: str | os.PathLike[str]) -> Path:
    """The file that a name or path stands for. The name of a shipped model means that one: ./digits is a path."""
    path = Path(name).expanduser()
    if str(name) in shipped():
        return SHIPPED / f"{name}.safetensors"
    if path.is_dir():
        if not (path / IN_A_RUN).is_file():
            raise ValueError(f"{path} is a folder without {IN_A_RUN}: has its run saved weights yet?")
        return path / IN_A_RUN
    if path.is_file():
        return path
    names = ", ".join(shipped()) or "none yet"
    if str(name) in TO_SHIP:
        raise ValueError(
            f"no weights of {str(name)!r} ship with this version (shipped models: {names}). Train them, "
            f"`linattn train {name}`, and give the run's folder instead of the name: runs/{name}-1"
        )
    raise ValueError(f"no file, run folder or shipped model {str(name)!r}; shipped models: {names}")


def shipped() -> list[str]:
    """The names of the models that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.safetensors"))


def to_json(config: Config) -> dict[str, Any]:
    return {"kind": type(config).__name__} | dataclasses.asdict(config)


def from_json(form: object, where: object = "this config") -> Config:
    """The config that `to_json` described. Unknown kinds and fields raise, naming what is known."""
    kinds = {cls.__name__: cls for cls in MODELS}
    fields = {} if not isinstance(form, dict) else dict(form)
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"{where}: unknown kind of model {kind!r}; known: {', '.join(kinds)}")
    if "layer" in fields:
        fields["layer"] = _made(Layer, fields["layer"], where)
    if fields.get("front") is not None:
        fields["front"] = _made(FrontEnd, fields["front"], where)
    return _made(kinds[kind], fields, where)


def _made(cls: type, fields: Any, where: object) -> Any:
    """An instance from plain values."""
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a {cls.__name__} is described by its fields {', '.join(names)}, got {fields!r}")
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise ValueError(
            f"{where}: a {cls.__name__} has no field {unknown[0]!r}; there are {', '.join(names)}. "
            f"Was it written by a newer version?"
        )
    try:
        return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()})  # JSON has no tuples
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: this {cls.__name__} is not complete or not valid ({error})") from error


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the metadata of {path} is not JSON, the file may be damaged ({error})") from error
