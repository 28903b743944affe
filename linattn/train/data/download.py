"""One file from the network: whole and checked, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from linattn.train.data.progress import Bar
from linattn.train.data.sources import Download

CHUNK = 1 << 18
PATIENCE = 30  # seconds without a byte, then the address counts as dead
HEADERS = {"User-Agent": "linattn"}  # some hosts refuse Python's own name


class Unreachable(Exception):
    """No address answered; `reasons` has a line for each."""

    def __init__(self, reasons: list[str]):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def fetch(download: Download, root: Path) -> Path:
    """Put the file at `root / download.path`, from the first of its addresses that delivers it.

    A file with another checksum than the published one is kept aside as `….bad` and never used.
    """
    path = root / download.path
    with written_whole(path) as part:
        url = _first_to_deliver(download.urls, path, part)
        found = _sha256(part)
        if found != download.sha256:
            bad = path.with_name(f"{path.name}.bad")
            os.replace(part, bad)
            raise ValueError(
                f"{url} gave another file than the published {path.name}: sha256 is {found}, expected "
                f"{download.sha256}. What came is kept as {bad}: if it is an error page, the network may be asking for "
                f"a login; else try again later, or put the right file at {path}"
            )
    return path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, which is renamed to `path` if all goes well: a reader never sees half a file."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _first_to_deliver(urls: tuple[str, ...], path: Path, part: Path) -> str:
    """The address that delivered."""
    reasons = []
    for url in urls:
        trouble = _try(url, path, part)
        if trouble is None:
            return url
        reasons.append(f"{url}: {trouble}")
    raise Unreachable(reasons)


def _try(url: str, path: Path, part: Path) -> str | None:
    """None if it went well, else what went wrong."""
    try:
        with Bar(f"downloading {path.name} from {urlsplit(url).netloc} to {path.parent}", unit="bytes") as bar:
            _transfer(url, part, bar)
    except (OSError, HTTPException) as error:
        return str(error) or type(error).__name__
    return None


def _transfer(url: str, part: Path, bar: Bar) -> None:
    """By pooch where it is installed (it knows the proxies and certificates that `requests` knows), else by urllib."""
    try:
        import pooch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _transfer_by_urllib(url, part, bar)
    downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK, timeout=PATIENCE, headers=HEADERS)
    return downloader(url, str(part), None)


def _transfer_by_urllib(url: str, part: Path, bar: Bar) -> None:
    request = Request(url, headers=HEADERS)
    with urlopen(request, timeout=PATIENCE) as answer, open(part, "wb") as file:
        bar.total = int(answer.headers.get("Content-Length") or 0)
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            bar.update(len(chunk))
        # a connection that closes early is no error to urllib
        if bar.total and file.tell() != bar.total:
            raise OSError(f"the connection closed after {file.tell():,} of {bar.total:,} bytes")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
