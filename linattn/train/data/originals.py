"""From the name of a public dataset to the bytes of its original files: where they are looked for, and in which forms.

The data folder is data_dir=, else $LINATTN_DATA, else the user's cache folder. In it (see `Source.folders`) a file
counts as found when it is there as published or compressed (.gz, .xz, .zip); a dataset may have further forms of its
own. What is found must have the published checksum, and what is not found is downloaded.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from linattn.train.data.download import Unreachable, fetch
from linattn.train.data.sources import Download, Source

COMPRESSED = ("", ".gz", ".xz", ".zip")  # the first that is there is read
DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)

# A form in which files may lie in a folder: which of the named originals it has, as path -> contents by name.
Form = Callable[[Path, list[str]], dict[str, tuple[Path, bytes]]]


class Place(NamedTuple):
    """Where data is looked for, and whether it may be downloaded to there."""

    root: Path
    chosen_by: str
    download: bool


def place(data_dir: str | os.PathLike[str] | None = None, download: bool = True) -> Place:
    """data_dir, else $LINATTN_DATA, else the cache folder."""
    if data_dir is not None:
        return Place(Path(data_dir).expanduser(), "data_dir=", download)
    if os.environ.get("LINATTN_DATA"):
        return Place(Path(os.environ["LINATTN_DATA"]).expanduser(), "LINATTN_DATA", download)
    return Place(cache_folder(), "default: the cache folder", download)


def cache_folder() -> Path:
    """Where this platform keeps what can be fetched again."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "linattn"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "linattn" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "linattn"


def read_bytes(path: Path) -> bytes:
    """A file's contents, decompressed if its name ends in .gz, .xz or .zip (which must hold one file only)."""
    try:
        if path.suffix == ".zip":
            return _only_member(path)
        data = path.read_bytes()
        return {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix, bytes)(data)
    except DAMAGE as error:
        raise damaged(path, error) from error


def single_files(folder: Path, names: list[str]) -> dict[str, tuple[Path, bytes]]:
    """The form that every dataset may have: each file by itself, perhaps compressed."""
    found = {}
    for name in names:
        path = next((folder / f"{name}{end}" for end in COMPRESSED if (folder / f"{name}{end}").is_file()), None)
        if path:
            found[name] = (path, read_bytes(path))
    return found


def originals(source: Source, names: list[str], where: Place, forms: tuple[Form, ...] = (single_files,)) -> list[bytes]:
    """The contents of the named original files of `source`."""
    found = _find(source, names, where.root, forms)
    missing = [name for name in names if name not in found]
    if missing:
        _download(source, missing, where)
        found |= _find(source, missing, where.root, forms)
    assert found.keys() >= set(names), f"a download of {source.name} is not where it is looked for"
    return [found[name] for name in names]


def damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} cannot be read ({error}): is it damaged or incomplete? Fetch it again")


def _only_member(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
        if len(members) != 1:
            raise ValueError(f"it must hold one file, and holds {len(members)}")
        return archive.read(members[0])


def _find(source: Source, names: list[str], root: Path, forms: tuple[Form, ...]) -> dict[str, bytes]:
    """Those of the files that are there, each from the first form that has it."""
    found: dict[str, bytes] = {}
    for folder in (root / name for name in source.folders):
        for form in forms:
            missing = [name for name in names if name not in found]
            for name, (path, data) in form(folder, missing).items():
                _check(source, name, path, data)
                found[name] = data
    return found


def _check(source: Source, name: str, path: Path, data: bytes) -> None:
    found, published = hashlib.sha256(data).hexdigest(), source.originals[name].sha256
    if found != published:
        raise ValueError(
            f"{path} is not the published {name} of {source.name}: the sha256 of its contents is {found}, expected "
            f"{published}. Move it away, and it will be downloaded; or choose another folder with data_dir="
        )


def _download(source: Source, missing: list[str], where: Place) -> None:
    downloads = list(dict.fromkeys(source.originals[name].download for name in missing))
    reasons = ["download=False"]
    if where.download:
        try:
            for download in downloads:
                fetch(download, where.root)
            return
        except Unreachable as error:
            reasons = error.reasons
        except OSError as error:
            reasons = [f"{where.root} cannot be written to: {error}"]
    raise ValueError(_ways_out(source, missing, where, downloads, reasons))


def _ways_out(source: Source, missing: list[str], where: Place, downloads: list[Download], reasons: list[str]) -> str:
    folders = ", ".join(str(where.root / name) for name in source.folders)
    return "\n".join(
        [
            f"{source.name}: {', '.join(missing)} not found in {folders} ({where.chosen_by}), and not downloaded:",
            *(f"     {reason}" for reason in reasons),
            "Three ways out:",
            f"  1. name a folder that has it: data_dir=FOLDER or LINATTN_DATA=FOLDER, with FOLDER/{source.folders[0]}/",
            "  2. fetch it on a machine with a connection, and put it here:",
            *(f"     {download.urls[0]} -> {where.root / download.path}" for download in downloads),
            "  3. take data that needs no download: 'digits' ships with linattn, 'copy' and 'synthetic' are generated,",
            "     and a text file or a folder of images of your own is named by its path",
        ]
    )
