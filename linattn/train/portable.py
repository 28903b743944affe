"""A checkpoint small enough to be carried: in files of at most 15 MiB, from which a run goes on on another machine.

    pack(runs/mnist-1, folder)       folder/portable-1-of-3.safetensors, …
    unpack(folder)                   the run's files again, beside them; `train(resume=True)` does that by itself

An exact checkpoint is 16 bytes a parameter: weights, their average, two moments. This is about 5, in blocks of 256
numbers, each with a float32 scale s (for v two borders), and then deflated:

    weights    w ≈ s · c, c of 16 bits
    average    a ≈ ŵ + s · c, c of 6 bits (in 8, which deflate): it lies close to the weights
    moments    v ≈ exp(lo + c (hi - lo) / 255), by its logarithm: a small v must not become 0, it is divided by;
               m ≈ √v̂ · s · c, by the step it makes, m / √v: what is lost of it then moves no weight by much

Everything else (small tensors, counts, random state, the place in the data, the metrics) is kept as it is. Of a run
that keeps its best weights, the next evaluation counts as the first: those weights are not carried.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from linattn._typing import Tensor
from linattn.state import write_atomically
from linattn.train import checkpoint
from linattn.train.metrics import FILE as METRICS
from linattn.train.run_folder import RUN_FILE, read_run, writing

SHARD = 15 * 2**20 - 2**12  # bytes of the stream in a file, which has a short header besides
BLOCK = 256
SMALL = 4096  # numbers: tensors of fewer are kept as they are
ENTRY = "linattn_portable"
NAME = re.compile(r"portable-(\d+)-of-(\d+)\.safetensors")
TINY = 1e-30  # v of a weight that never had a gradient
FACTS = "facts.json"


def pack(run: Path, folder: Path) -> list[Path]:
    """Write the newest checkpoint of a run as a few files into `folder`, in the place of older ones."""
    read_run(run)  # says what is wrong where there is no run
    found, _ = checkpoint.newest(run)
    if found is None:
        raise ValueError(f"{run} has no checkpoint yet: train it until its first one (checkpoint_every=)")
    kept = narrowed(found.tensors)
    texts = {FACTS: json.dumps(found.facts).encode()}
    texts |= {name: (run / name).read_bytes() for name in (RUN_FILE, METRICS) if (run / name).exists()}
    kept |= {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in texts.items() if text}
    stream = zlib.compress(to_bytes(kept), 1)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in shards(folder):
            old.unlink()
        return _write_shards(folder, stream)


def unpack(folder: Path) -> bool:
    """Make the run's files out of the packed ones, where there are some and no run yet; whether that was so."""
    if (folder / RUN_FILE).exists() or not shards(folder):
        return False
    kept = from_bytes(zlib.decompress(_read_shards(folder)))
    texts = {name: kept.pop(name).numpy().tobytes() for name in (FACTS, RUN_FILE, METRICS) if name in kept}
    facts = json.loads(texts[FACTS])
    if json.loads(texts[RUN_FILE])["run"]["keep"] == "best":
        facts["watch"]["best"] = None
    with writing(folder):
        checkpoint.save(folder, widened(kept), facts)
        for name in (METRICS, RUN_FILE):  # the run last: until it is there, all of this is done again
            if name in texts:
                write_atomically(folder / name, texts[name])
    return True


def shards(folder: Path) -> list[Path]:
    """The packed files in a folder, in order."""
    named = [(NAME.fullmatch(path.name), path) for path in folder.glob("portable-*")]
    return [path for _, path in sorted((int(m[1]), path) for m, path in named if m)]


def _write_shards(folder: Path, stream: bytes) -> list[Path]:
    pieces = [stream[i : i + SHARD] for i in range(0, len(stream), SHARD)]
    whole = hashlib.sha256(stream).hexdigest()
    paths = []
    for i, piece in enumerate(pieces, 1):
        about = {"piece": i, "of": len(pieces), "whole": whole, "sha256": hashlib.sha256(piece).hexdigest()}
        tensor = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
        paths.append(folder / f"portable-{i}-of-{len(pieces)}.safetensors")
        write_atomically(paths[-1], to_bytes({"piece": tensor}, metadata={ENTRY: json.dumps(about)}))
    return paths


def _read_shards(folder: Path) -> bytes:
    """The stream again. What is damaged, missing or of another checkpoint is named."""
    read = {path: _read_shard(path) for path in shards(folder)}
    count, whole = next((about["of"], about["whole"]) for about, _ in read.values())
    for path, (about, _) in read.items():
        if about["whole"] != whole:
            raise ValueError(
                f"{path} belongs to another checkpoint than {next(iter(read))}: keep the files of one call of "
                f"`linattn pack --resumable` in a folder of their own"
            )
    missing = sorted(set(range(1, count + 1)) - {about["piece"] for about, _ in read.values()})
    if missing:
        names = ", ".join(f"portable-{i}-of-{count}.safetensors" for i in missing)
        raise ValueError(f"{folder} lacks {names}: copy all {count} files of the packed checkpoint")
    return b"".join(piece for _, piece in read.values())


def _read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})[ENTRY])
            piece = file.get_tensor("piece").numpy().tobytes()
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged, cut off, or no packed checkpoint ({error}): copy it again") from error
    if hashlib.sha256(piece).hexdigest() != about["sha256"]:
        raise ValueError(f"{path} is damaged: its contents are not those that were written. Copy it again")
    return about, piece


def narrowed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint in fewer bytes: "NAME codes" with "NAME scale" (v: two borders), or as they are."""
    made: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if x.dtype != torch.float32 or x.numel() < SMALL:
            made[name] = x
            continue
        made[f"{name} shape"] = torch.tensor(x.shape)
        if name.startswith("average."):
            w = twin(name, tensors)
            _enter(made, name, *rounded(x - restored(*rounded(w, 32767), w.shape), 31))
        elif name.endswith(".exp_avg"):
            v = tensors[f"{name}_sq"].clamp_min(TINY)
            _enter(made, name, *rounded(x / v.sqrt(), 127))
        elif name.endswith(".exp_avg_sq"):
            _enter(made, name, *logarithms(x))
        else:
            codes, scale = rounded(x, 32767)
            # High bytes first, then low ones: the high ones are alike, and deflate well.
            _enter(made, name, codes.view(torch.uint8).unflatten(1, (-1, 2)).movedim(2, 0), scale)
    return {name: x.contiguous() for name, x in made.items()}


def widened(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint again, in their own sizes and dtypes."""
    names = [name.removesuffix(" codes") for name in kept if not name.endswith((" scale", " shape"))]
    made = {name: kept[name] for name in names if name in kept}
    in_turn = sorted((name for name in names if name not in kept), key=_turn)
    for name in in_turn:
        codes, scale, shape = kept[f"{name} codes"], kept[f"{name} scale"], torch.Size(kept[f"{name} shape"].tolist())
        if name.endswith(".exp_avg_sq"):
            low, high = scale.unbind(1)
            step = (high - low)[:, None] / 255
            made[name] = flat((low[:, None] + codes.float() * step).exp(), shape)
        elif name.endswith(".exp_avg"):
            made[name] = restored(codes, scale, shape) * made[f"{name}_sq"].sqrt()
        elif name.startswith("average."):
            made[name] = restored(codes, scale, shape) + twin(name, made)
        else:
            whole = codes.movedim(0, 2).contiguous().view(torch.int16)[..., 0]
            made[name] = restored(whole, scale, shape)
    return made


def _turn(name: str) -> int:
    """What others are restored from comes first."""
    return int(name.startswith("average.") or name.endswith(".exp_avg"))


def twin(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The weight that an averaged one belongs to."""
    return tensors[f"model.{name.removeprefix('average.')}"]


def _enter(made: dict[str, Tensor], name: str, codes: Tensor, scale: Tensor) -> None:
    made[f"{name} codes"], made[f"{name} scale"] = codes, scale


def rounded(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Codes in -most … most of each block, and its scale."""
    blocks = blocked(x)
    scale = (blocks.abs().amax(1) / most).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (blocks / scale[:, None]).round().clamp(-most, most)
    return codes.to(torch.int8 if most <= 127 else torch.int16), scale


def restored(codes: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    return flat(codes.float() * scale[:, None], shape)


def logarithms(v: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0 … 255 between the least and the largest logarithm of each block, and these two."""
    blocks = blocked(v.clamp_min(TINY), fill=float(v.flatten()[-1].clamp_min(TINY))).log()
    low, high = blocks.aminmax(dim=1)
    step = ((high - low) / 255).clamp_min(1e-12)
    return ((blocks - low[:, None]) / step[:, None]).round().to(torch.uint8), torch.stack([low, high], 1)


def blocked(x: Tensor, fill: float = 0.0) -> Tensor:
    """All numbers in rows of BLOCK; the last row is filled up."""
    return F.pad(x.flatten(), (0, -x.numel() % BLOCK), value=fill).view(-1, BLOCK)


def flat(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten()[: shape.numel()].view(shape)
