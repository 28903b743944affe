"""A folder of anybody's images as a dataset: oriented, cropped to the centre square, scaled.

Every file below the folder is tried, whatever its name, except hidden ones. The result is kept as one .npz in
`cache_dir`, beside the runs; nothing is ever written to the folder itself.

Axes:  N images   H, W = size   C channels
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch

from linattn.train.data.dataset import Dataset
from linattn.train.data.download import written_whole
from linattn.train.data.originals import cache_folder
from linattn.train.data.progress import Bar

if TYPE_CHECKING:
    from PIL import Image

FORM = 1  # of the cache: raise it when the same folder would give other images
MODES = {1: "L", 3: "RGB"}
MANY = 200  # files: from here on reading them shows a bar
NAMED = 20  # skipped files that are named


class Images(NamedTuple):
    images: np.ndarray  # (N, H, W, C) uint8, in the order of their sha256
    skipped: list[str]  # "name (why)"


def image_folder(
    folder: Path, split: str, *, size: int = 32, channels: int = 3, cache_dir: str | os.PathLike[str] | None = "runs"
) -> Dataset:
    """size × size × channels (3: RGB, 1: grey). train 90% · dev 5% · test 5%, of three images one each.

    Which image is in which split depends on the images alone, not on names or dates: they are sorted by the sha256 of
    what they hold here, and copies of one image stay in one split. What is transparent becomes white. Files that cannot
    be read are skipped, and named in a warning. cache_dir=None reads the folder each time.
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size must be a positive integer (pixels of a side), got {size!r}")
    if channels not in MODES:
        raise ValueError(f"channels must be 3 (RGB) or 1 (grey), got {channels!r}")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    images, skipped = _read_cached(folder, files, size, channels, cache_dir)
    _report(folder, len(files), len(images), skipped)
    return Dataset(
        folder.resolve().name, split, torch.from_numpy(_part(images, split)), licence="of the folder's owner"
    )


def _part(images: np.ndarray, split: str) -> np.ndarray:
    """The split's share, counted in different images: copies follow each other here, and stay together."""
    firsts = [i for i in range(len(images)) if i == 0 or not np.array_equal(images[i - 1], images[i])]
    held = max(1, len(firsts) // 20) if len(firsts) >= 3 else 0
    cuts = [*firsts, len(images)]
    dev, test = cuts[len(firsts) - 2 * held], cuts[len(firsts) - held]
    return {"train": images[:dev], "dev": images[dev:test], "test": images[test:]}[split]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _report(folder: Path, num_files: int, num_images: int, skipped: list[str]) -> None:
    more = f" and {len(skipped) - NAMED} more" if len(skipped) > NAMED else ""
    named = ", ".join(skipped[:NAMED]) + more
    if not num_files:
        raise ValueError(f"{folder} holds no files: expected images, in it or in folders below it")
    if not num_images:
        raise ValueError(f"{folder} holds {num_files} files and no image that can be read: {named}")
    if skipped:
        warnings.warn(f"skipped {len(skipped)} of {num_files} files in {folder}: {named}", stacklevel=4)


def _read_cached(
    folder: Path, files: list[Path], size: int, channels: int, cache_dir: str | os.PathLike[str] | None
) -> Images:
    """From the cache where no file has changed since, else from the files."""
    if cache_dir is None:
        return _read(folder, files, size, channels)
    stats = [(str(path.relative_to(folder)), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files]
    fingerprint = _sha256(repr((FORM, size, channels, stats)).encode())
    whole = folder.resolve()
    if Path(cache_dir).resolve().is_relative_to(whole):
        cache_dir = cache_folder() / "folders"  # nothing of ours goes into the user's folder
    cache = Path(cache_dir) / f"{whole.name}-{size}x{size}x{channels}-{_sha256(os.fsencode(whole))[:8]}.npz"
    kept = _from_cache(cache, fingerprint)
    if kept is None:
        kept = _read(folder, files, size, channels)
        if len(kept.images):
            _to_cache(cache, fingerprint, kept)
    return kept


def _from_cache(cache: Path, fingerprint: str) -> Images | None:
    if not cache.is_file():
        return None
    try:
        with open(cache, "rb") as file, np.load(file, allow_pickle=False) as kept:
            if str(kept["fingerprint"]) != fingerprint:
                return None
            return Images(kept["images"], kept["skipped"].tolist())
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        return None  # not ours, or not whole: it is made again


def _to_cache(cache: Path, fingerprint: str, kept: Images) -> None:
    skipped = np.array(kept.skipped, dtype=np.str_)
    try:
        with written_whole(cache) as part, open(part, "wb") as file:
            np.savez(file, images=kept.images, skipped=skipped, fingerprint=np.array(fingerprint))
    except OSError as error:
        warnings.warn(f"cannot keep the images of this folder for next time: {error}", stacklevel=5)


def _read(folder: Path, files: list[Path], size: int, channels: int) -> Images:
    images, skipped = {}, []
    for path, result in zip(files, _decode_all(folder, files, size, channels), strict=True):
        if isinstance(result, str):
            skipped.append(f"{path.relative_to(folder)} ({result})")
        else:
            images[_sha256(result.tobytes()), len(images)] = result
    ordered = [images[key] for key in sorted(images)]
    return Images(np.stack(ordered) if ordered else np.empty((0, size, size, channels), np.uint8), skipped)


def _decode_all(folder: Path, files: list[Path], size: int, channels: int) -> Iterator[np.ndarray | str]:
    """Each file's image, or why it has none. In threads: pillow lets go of the interpreter while it decodes."""
    bar = Bar(f"reading {len(files):,} files in {folder}", len(files)) if len(files) >= MANY else None
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        for result in pool.map(lambda path: _decode(path, size, channels), files):
            yield result
            if bar:
                bar.update(1)
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for all files
        if bar:
            bar.close()


def _decode(path: Path, size: int, channels: int) -> np.ndarray | str:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            image.draft(MODES[channels], (2 * size, 2 * size))  # JPEG: decode no more pixels than are needed
            oriented = ImageOps.exif_transpose(image)
            plain = _flatten(oriented).convert(MODES[channels])
            scaled = _centre_square(plain).resize((size, size), Image.Resampling.LANCZOS)
            return np.asarray(scaled).reshape(size, size, channels)
    except Exception as error:  # decoders of foreign files raise anything
        return f"{type(error).__name__}: {error}".replace(str(path), path.name)


def _centre_square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    left, top = ((length - side) // 2 for length in image.size)
    return image.crop((left, top, left + side, top + side))


def _flatten(image: Image.Image) -> Image.Image:
    """8 bits, and what is transparent on white: a plain convert() would clip 16 bits and show what was hidden."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("floating-point pixels have no known scale")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
