"""Where public data is found, in which forms, and how it is downloaded: from a server on this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import socket
import struct
import sys
import tarfile
import threading
import types
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from linattn.train.data import cifar10 as cifar10_module
from linattn.train.data import download as download_module
from linattn.train.data import load, originals
from linattn.train.data import mnist as mnist_module
from linattn.train.data import text as text_module
from linattn.train.data.progress import Bar
from linattn.train.data.sources import CIFAR10, ENWIK8, MNIST, TINYSHAKESPEARE, Download, Original, Source

TEST_FILES = ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def small_mnist(monkeypatch):
    """MNIST but for 30 test images, 5,010 training images, all 2 × 2, and no address: name -> contents."""
    rng = np.random.default_rng(0)
    contents = {}
    for part, count in (("train", 5010), ("t10k", 30)):
        contents[f"{part}-images-idx3-ubyte"] = idx(rng.integers(0, 256, (count, 2, 2), dtype=np.uint8))
        contents[f"{part}-labels-idx1-ubyte"] = idx(rng.integers(0, 10, count, dtype=np.uint8))
    publish(monkeypatch, contents, {})
    return contents


def publish(monkeypatch, contents: dict[str, bytes], urls: dict[str, tuple[str, ...]]) -> None:
    """Make MNIST consist of these files, each of them found packed at its addresses."""
    made = {}
    for name, data in contents.items():
        download = Download(f"mnist/{name}.gz", sha256(gzip.compress(data, mtime=0)), urls.get(name, ()))
        made[name] = Original(sha256(data), download)
    monkeypatch.setattr(mnist_module, "MNIST", Source("mnist", "none", MNIST.folders, made))


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


# Forms


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("end", ["", ".gz", ".xz"])
def test_mnist_is_found_in_every_form(tmp_path, small_mnist, folder, end):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[end]
    put(tmp_path / folder, {name + end: pack(data) for name, data in small_mnist.items()})
    for split, part, rows in (
        ("train", "train", slice(0, 10)),
        ("dev", "train", slice(10, 5010)),
        ("test", "t10k", slice(0, 30)),
    ):
        data = load("mnist", split=split, data_dir=tmp_path)
        images = np.frombuffer(small_mnist[f"{part}-images-idx3-ubyte"][16:], np.uint8).reshape(-1, 2, 2, 1)
        assert np.array_equal(data.data.numpy(), images[rows])
        assert data.labels is not None
        assert data.labels.numpy().tobytes() == small_mnist[f"{part}-labels-idx1-ubyte"][8:][rows]


def test_files_may_lie_in_several_folders(tmp_path, small_mnist):
    images, labels = TEST_FILES
    put(tmp_path / "mnist", {images: small_mnist[images]})
    put(tmp_path, {f"{labels}.gz": gzip.compress(small_mnist[labels])})
    assert len(load("mnist", split="test", data_dir=tmp_path)) == 30


def records(rng: np.random.Generator, count: int) -> bytes:
    rows = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
    rows[:, 0] %= 10
    return rows.tobytes()


@pytest.fixture
def small_cifar10(monkeypatch):
    """CIFAR-10 as published, but 1,100 images a file: name -> contents."""
    rng = np.random.default_rng(0)
    contents = {name: records(rng, 1100) for name in CIFAR10.originals}
    made = {name: Original(sha256(data), CIFAR10.originals[name].download) for name, data in contents.items()}
    monkeypatch.setattr(cifar10_module, "CIFAR10", Source("cifar10", "none", CIFAR10.folders, made))
    return contents


def archived(contents: dict[str, bytes]) -> bytes:
    """As published: other files between those that are looked for, all in one folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for name, data in {"readme.html": b"<html>", **contents, "batches.meta.txt": b"airplane\n"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("form", ["cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "archive"])
def test_cifar10_is_found_in_every_form(tmp_path, small_cifar10, form):
    if form == "archive":
        backwards = dict(reversed(small_cifar10.items()))
        put(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": archived(backwards)})
    else:
        put(tmp_path / form, small_cifar10)
    rows = [np.frombuffer(data, np.uint8).reshape(1100, 3073) for data in small_cifar10.values()]
    train, dev, test = (load("cifar10", split=split, data_dir=tmp_path) for split in ("train", "test", "test"))
    assert len(train) == 500 and train.labels is not None
    published = np.concatenate(rows[:5])
    assert np.array_equal(train.labels.numpy(), published[:500, 0])
    for data, row in ((train, published[499]), (test, rows[5][499]), (dev, rows[5][499])):
        r, g, b = row[1:].reshape(3, 32, 32)
        assert np.array_equal(data.data[499].numpy(), np.stack([r, g, b], axis=-1))


def test_cifar10_is_made_again_from_mosaics(tmp_path, monkeypatch):
    """One mosaic of flat tiles, written by pillow: of 5,100 tiles, dev holds all but the first row."""
    from PIL import Image

    rng = np.random.default_rng(0)
    colours, labels = rng.integers(0, 256, (51, 100, 3), dtype=np.uint8), rng.integers(0, 10, 6 * 5100, dtype=np.uint8)
    put(tmp_path / "cifar10", {})
    mosaic = Image.fromarray(colours.repeat(32, 0).repeat(32, 1))
    mosaic.save(tmp_path / "cifar10" / "data_batch_5.webp", lossless=True, quality=0, method=0)
    np.save(tmp_path / "cifar10" / "labels.npy", labels)
    rows = np.concatenate([labels[4 * 5100 : 5 * 5100, None], colours.reshape(-1, 3).repeat(1024, 1)], 1)
    original = CIFAR10.originals["data_batch_5.bin"]
    made = {**CIFAR10.originals, "data_batch_5.bin": original._replace(sha256=sha256(rows.tobytes()))}
    monkeypatch.setattr(cifar10_module, "CIFAR10", CIFAR10._replace(originals=made))

    data = load("cifar10", split="dev", data_dir=tmp_path, download=False)
    assert data.labels is not None and np.array_equal(data.labels.numpy(), labels[4 * 5100 + 100 : 5 * 5100])
    assert (data.data[102].numpy() == colours[2, 2]).all()

    np.save(tmp_path / "cifar10" / "labels.npy", labels + 1)
    with pytest.raises(ValueError, match=r"data_batch_5\.webp is not the published data_batch_5\.bin of cifar10"):
        load("cifar10", split="dev", data_dir=tmp_path, download=False)


@pytest.mark.parametrize("name", ["labels.npy", "data_batch_5.webp", "cifar-10-binary.tar.gz", "data_batch_5.bin.gz"])
def test_a_damaged_file_is_named(tmp_path, name):
    put(tmp_path / "cifar10", {"data_batch_5.webp": b"RIFF", "labels.npy": b"\x93NUMPY"} if "ba" in name[:4] else {})
    put(tmp_path / "cifar10", {"data_batch_5.webp": b"RIFF"} if name == "labels.npy" else {})
    if name == "data_batch_5.webp":
        np.save(tmp_path / "cifar10" / "labels.npy", np.zeros(60_000, np.uint8))
    put(tmp_path / "cifar10", {name: b"\x1f\x8b\x08\x00 not what it seems"})
    with pytest.raises(ValueError, match=rf"{name} cannot be read .*: is it damaged or incomplete"):
        load("cifar10", split="dev", data_dir=tmp_path, download=False)


def test_text_in_an_archive_of_one_file(tmp_path, monkeypatch):
    text = bytes(range(200))
    for source, attribute in ((ENWIK8, "ENWIK8"), (TINYSHAKESPEARE, "TINYSHAKESPEARE")):
        (name,) = source.originals
        made = {name: source.originals[name]._replace(sha256=sha256(text))}
        monkeypatch.setattr(text_module, attribute, source._replace(originals=made))
        (tmp_path / source.folders[0]).mkdir()
        path = tmp_path / source.folders[0] / f"{name}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("whatever", text)
        assert load(source.name, split="dev", data_dir=tmp_path).data.numpy().tobytes() == text[180:190]
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("another", b"")
        with pytest.raises(ValueError, match=r"zip cannot be read \(it must hold one file, and holds 2\)"):
            load(source.name, data_dir=tmp_path)


def test_another_file_under_the_name_is_refused_and_left_alone(tmp_path, small_mnist):
    images, labels = TEST_FILES
    other = small_mnist[images][:-1] + b"\0"
    put(tmp_path / "mnist", {images: other, labels: small_mnist[labels]})
    with pytest.raises(ValueError, match="is not the published t10k-images-idx3-ubyte of mnist") as caught:
        load("mnist", split="test", data_dir=tmp_path)
    assert sha256(other) in str(caught.value) and sha256(small_mnist[images]) in str(caught.value)
    assert (tmp_path / "mnist" / images).read_bytes() == other


# Places


def test_the_argument_comes_before_the_variable_and_that_before_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("LINATTN_DATA", raising=False)
    assert originals.place().root == originals.cache_folder()
    monkeypatch.setenv("LINATTN_DATA", "~/here")
    assert originals.place().root == Path.home() / "here"
    assert originals.place(tmp_path).root == tmp_path
    assert originals.place("~/there").root == Path.home() / "there"
    monkeypatch.setenv("LINATTN_DATA", "")
    assert originals.place().root == originals.cache_folder()


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", None, ".cache/linattn"),
        ("linux", "XDG_CACHE_HOME", "elsewhere/linattn"),
        ("darwin", None, "Library/Caches/linattn"),
        ("win32", None, "AppData/Local/linattn/cache"),
        ("win32", "LOCALAPPDATA", "elsewhere/linattn/cache"),
    ],
)
def test_the_cache_folder_is_that_of_the_platform(tmp_path, monkeypatch, platform, variable, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    assert originals.cache_folder() == tmp_path / expected


# Downloads


class Server:
    """Files by path. `asked` is what was asked for; `/cut/…` closes the connection half way."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                data = outer.files.get(self.path.rpartition("/")[2])
                if data is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if self.path.startswith("/cut/") else data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server(monkeypatch, small_mnist):
    """It has the small MNIST, packed; what is published names addresses that tests may replace."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setitem(sys.modules, "pooch", None)  # as if it were not installed
    running = Server()
    running.files = {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in small_mnist.items()}
    publish(monkeypatch, small_mnist, {name: (f"{running.address}/{name}.gz",) for name in small_mnist})
    yield running
    running.close()


def dead_address() -> str:
    """An address of this machine where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_missing_is_downloaded_once(tmp_path, server, small_mnist):
    images, labels = TEST_FILES
    put(tmp_path / "mnist", {labels: small_mnist[labels]})
    data = load("mnist", split="test", data_dir=tmp_path)
    assert data.data.numpy().tobytes() == small_mnist[images][16:]
    assert server.asked == [f"/{images}.gz"]
    assert files_in(tmp_path) == [f"mnist/{images}.gz", f"mnist/{labels}"]
    assert load("mnist", split="test", data_dir=tmp_path).sha256 == data.sha256
    assert len(server.asked) == 1


def test_the_variable_says_where_to_download_to(tmp_path, server, monkeypatch):
    monkeypatch.setenv("LINATTN_DATA", str(tmp_path / "new" / "folder"))
    load("mnist", split="test")
    assert files_in(tmp_path / "new" / "folder") == [f"mnist/{name}.gz" for name in TEST_FILES]


def test_another_address_is_tried(tmp_path, server, monkeypatch, small_mnist):
    """After one where nobody listens, one that has not got it, and one that stops half way."""
    before = [dead_address(), f"{server.address}/not-here", f"{server.address}/cut"]
    server.files["nothing.gz"] = b""
    urls = {
        name: (
            f"{before[0]}/{name}.gz",
            f"{before[1]}/no-{name}.gz",
            f"{before[2]}/{name}.gz",
            f"{server.address}/{name}.gz",
        )
        for name in small_mnist
    }
    publish(monkeypatch, small_mnist, urls)
    assert len(load("mnist", split="test", data_dir=tmp_path)) == 30
    assert files_in(tmp_path) == [f"mnist/{name}.gz" for name in TEST_FILES]
    assert len(server.asked) == 6


def test_a_wrong_file_is_kept_aside(tmp_path, server, small_mnist):
    images = TEST_FILES[0]
    right, wrong = server.files[f"{images}.gz"], gzip.compress(b"please log in")
    server.files[f"{images}.gz"] = wrong
    with pytest.raises(ValueError, match="gave another file than the published") as caught:
        load("mnist", split="test", data_dir=tmp_path)
    assert f"sha256 is {sha256(wrong)}, expected {sha256(right)}" in str(caught.value)
    assert files_in(tmp_path) == [f"mnist/{images}.gz.bad"]
    assert (tmp_path / "mnist" / f"{images}.gz.bad").read_bytes() == wrong
    server.files[f"{images}.gz"] = right
    assert len(load("mnist", split="test", data_dir=tmp_path)) == 30


def test_half_a_file_is_no_file(tmp_path, server, monkeypatch, small_mnist):
    publish(monkeypatch, small_mnist, {name: (f"{server.address}/cut/{name}.gz",) for name in small_mnist})
    size = len(server.files[f"{TEST_FILES[0]}.gz"])
    with pytest.raises(ValueError, match=f"the connection closed after {size // 2} of {size} bytes"):
        load("mnist", split="test", data_dir=tmp_path)
    assert files_in(tmp_path) == []


def test_offline_says_what_was_looked_for_where_and_the_ways_out(tmp_path, server, monkeypatch, small_mnist):
    nobody = dead_address()
    publish(monkeypatch, small_mnist, {name: (f"{nobody}/{name}.gz", f"{nobody}/b/{name}.gz") for name in small_mnist})
    with pytest.raises(ValueError, match="Three ways out") as caught:
        load("mnist", split="test", data_dir=tmp_path)
    said = str(caught.value)
    for part in (
        *TEST_FILES,
        *(str(tmp_path / folder) for folder in MNIST.folders),
        "data_dir=",
        f"{nobody}/{TEST_FILES[0]}.gz: ",
        f"{nobody}/b/{TEST_FILES[0]}.gz: ",
        "refused",
        "LINATTN_DATA=FOLDER",
        f"{nobody}/{TEST_FILES[1]}.gz -> {tmp_path / 'mnist' / TEST_FILES[1]}.gz",
        "'digits' ships with linattn",
    ):
        assert part in said
    assert files_in(tmp_path) == []


def test_nothing_is_downloaded_unasked(tmp_path, server):
    with pytest.raises(ValueError, match=r"not downloaded:\s+download=False\s+Three ways out"):
        load("mnist", split="test", data_dir=tmp_path, download=False)
    assert server.asked == [] and files_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_to(tmp_path, server):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file cannot be written to: .*\s+Three ways out"):
        load("mnist", split="test", data_dir=tmp_path / "file")


def test_an_interrupt_leaves_nothing_behind(tmp_path, server, monkeypatch):
    def interrupt(url, part, bar):
        part.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(download_module, "_transfer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load("mnist", split="test", data_dir=tmp_path)
    assert files_in(tmp_path) == []


def test_pooch_downloads_where_it_is_installed(tmp_path, server, monkeypatch):
    """A stand-in with pooch's interface: it gets a bar that it may set, move, reset and close."""
    seen = []

    class HTTPDownloader:
        def __init__(self, progressbar, chunk_size, **kwargs):
            assert kwargs.keys() == {"timeout", "headers"}
            self.bar = progressbar

        def __call__(self, url, output_file, pooch):
            data = server.files[url.rpartition("/")[2]]
            Path(output_file).write_bytes(data)
            self.bar.total = len(data)
            self.bar.update(len(data))
            self.bar.reset()
            self.bar.update(self.bar.total)
            self.bar.close()
            seen.append(url)

    monkeypatch.setitem(sys.modules, "pooch", types.SimpleNamespace(HTTPDownloader=HTTPDownloader))
    assert len(load("mnist", split="test", data_dir=tmp_path)) == 30
    assert seen == [f"{server.address}/{name}.gz" for name in TEST_FILES] and server.asked == []


def test_a_log_gets_a_line_and_a_terminal_a_bar(tmp_path, server, capsys, monkeypatch):
    load("mnist", split="test", data_dir=tmp_path)
    lines = capsys.readouterr().err.splitlines()
    host = server.address.removeprefix("http://")
    assert lines == [f"downloading {name}.gz from {host} to {tmp_path / 'mnist'}" for name in TEST_FILES]

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for variable in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    with Bar("reading", 4) as bar:
        bar.update(3)
    assert "reading" in file.getvalue() and "3/4" in file.getvalue()
