"""Datasets: what is in them, what is held out, and that nothing of it is silently something else."""

from __future__ import annotations

import ast
import gzip
import hashlib
import lzma
import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from linattn.train.data import Dataset, load
from linattn.train.data.mnist import read_idx

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "tests" / "data"
FIRST_LABELS = [7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5, 9, 7, 3, 4]  # of the MNIST test set

PUBLISHED_MD5 = {  # the checksums with which the originals were published: ours are sha256
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


def md5(*parts: bytes) -> str:
    digest = hashlib.md5()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def labels(data: Dataset) -> torch.Tensor:
    assert data.labels is not None
    return data.labels


# What ships: the digits, and the tests' sample


def test_digits_against_scikit_learn():
    """Every value and every label, in order; the mapping to bytes is monotone, even, and can be taken back."""
    pixels, classes = (np.asarray(x) for x in load_digits(return_X_y=True))
    parts = [load("digits", split=split) for split in ("train", "dev", "test")]
    assert [len(part) for part in parts] == [1397, 200, 200]
    images = torch.cat([part.data for part in parts]).numpy()
    assert images.shape == (1797, 8, 8, 1) and images.dtype == np.uint8
    assert np.array_equal((images[..., 0].astype(int) * 16 + 127) // 255, pixels.reshape(-1, 8, 8))
    assert np.array_equal(torch.cat([labels(part) for part in parts]).numpy(), classes)
    levels = np.unique(images)
    assert len(levels) == 17 and levels[0] == 0 and levels[-1] == 255
    assert np.abs(levels - np.linspace(0, 255, 17)).max() <= 0.5


def test_the_sample_against_a_reading_by_hand():
    data = {name: (SAMPLE / f"mnist-20-{name}-ubyte.gz").read_bytes() for name in ("images-idx3", "labels-idx1")}
    raw = {name: gzip.decompress(packed) for name, packed in data.items()}
    images, classes = (read_idx(raw[name], name) for name in raw)
    assert classes.tolist() == FIRST_LABELS
    assert images.shape == (20, 28, 28)
    assert images.tobytes() == raw["images-idx3"][16:]
    assert images[0, 7].tolist() == [0] * 6 + [84, 185, 159, 151, 60, 36] + [0] * 16  # the bar of the seven


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"\x1f\x8b" + data, "no idx file .* begins with 1f 8b"),
        (lambda data: data[:2] + b"\x0d" + data[3:], "no idx file .* begins with 00 00 0d 03"),  # float32
        (lambda data: data[:3], "no idx file"),
        (lambda data: data[:9], "ends within its header, after 9 bytes"),
        (lambda data: data[:-1], "20 × 28 × 28 = 15680 bytes after its header, and holds 15679"),
        (lambda data: data + b"\0", "and holds 15681"),
    ],
)
def test_a_damaged_idx_file_is_an_error(damage, message):
    data = gzip.decompress((SAMPLE / "mnist-20-images-idx3-ubyte.gz").read_bytes())
    with pytest.raises(ValueError, match=message):
        read_idx(damage(data), "it")


# Text


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["plain", "gz", "xz"])
def test_a_text_is_its_bytes(tmp_path, pack):
    text = "Zürich, 1–2 °C\n".encode() * 100 + b"\x00\xff"
    path = tmp_path / {bytes: "a.txt", gzip.compress: "a.txt.gz", lzma.compress: "a.txt.xz"}[pack]
    path.write_bytes(pack(text))
    parts = [load(path, split=split) for split in ("train", "dev", "test")]
    assert [part.data.numpy().tobytes() for part in parts] == [text[:1711], text[1711:1806], text[1806:]]
    assert [part.sha256 for part in parts] == [
        hashlib.sha256(part.data.numpy().tobytes()).hexdigest() for part in parts
    ]
    assert parts[0].kind == "text" and parts[0].shape == ()


def test_a_path_is_looked_for_in_the_data_folder(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"abc" * 40)
    assert len(load("texts/a.txt", data_dir=tmp_path)) == 108
    monkeypatch.setenv("LINATTN_DATA", str(tmp_path))
    assert len(load("texts/a.txt")) == 108


def test_a_damaged_text_is_named(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(os.urandom(1000))[:-100])
    with pytest.raises(ValueError, match=r"a\.txt\.xz cannot be read"):
        load(tmp_path / "a.txt.xz")


def test_a_text_too_short_to_hold_out_of_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab")
    assert len(load(tmp_path / "a.txt")) == 1
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="train split is empty"):
        load(tmp_path / "b.txt")


# Generated data


@pytest.mark.parametrize("length", [4, 5, 33, 128])
def test_the_copy_task_against_its_definition(length):
    """0 w 0 w 0 …, read by a loop: the mask is on the second w, |w| takes every value, the symbols every symbol."""
    data = load("copy", length=length, symbols=3, num_examples=2000)
    assert data.shape == (length,) and data.num_values == 4 and data.mask is not None
    sizes, symbols = set(), set()
    for tokens, mask in zip(data.data.tolist(), data.mask.tolist(), strict=True):
        n = tokens.index(0, 1) - 1
        word = tokens[1 : n + 1]
        assert tokens == [0, *word, 0, *word] + [0] * (length - 2 - 2 * n)
        assert mask == [n + 2 <= t <= 2 * n + 1 for t in range(length)]
        sizes.add(n)
        symbols |= set(word)
    assert sizes == set(range(1, length // 2)) and symbols == {1, 2, 3}


def test_copies_of_train_are_drawn_anew_each_epoch_and_those_held_out_are_not():
    train, dev, test = (load("copy", split=split) for split in ("train", "dev", "test"))
    assert train.redraw is not None and dev.redraw is None and test.redraw is None
    later = train.redraw(3)
    assert later.sha256 != train.sha256 and train.redraw(0).sha256 == train.sha256
    assert load("copy").redraw(3).sha256 == later.sha256  # pyright: ignore[reportOptionalCall]
    long = [{tuple(row) for row in part.data.tolist() if row[12]} for part in (train, later, dev, test)]
    assert all(not (a & b) for i, a in enumerate(long) for b in long[:i])
    assert load("copy", seed=1).sha256 != train.sha256


def test_synthetic_images_are_discs():
    data = load("synthetic", size=9, channels=3, num_examples=300)
    assert data.data.shape == (300, 9, 9, 3)
    colours = [len(np.unique(image.reshape(-1, 3), axis=0)) for image in data.data.numpy()]
    assert max(colours) == 2 and colours.count(2) > 280  # a small disc between two pixels is not seen
    assert torch.bincount(labels(data).long(), minlength=4).min() > 40
    assert data.sha256 == load("synthetic", size=9, channels=3, num_examples=300).sha256
    assert data.sha256 != load("synthetic", size=9, channels=3, num_examples=300, split="dev").sha256


def test_synthetic_labels_say_where_the_disc_is():
    data = load("synthetic", size=16, num_examples=200)
    for image, label in zip(data.data[..., 0].numpy().astype(int), labels(data).tolist(), strict=True):
        edge = image[0, 0] if image[0, 0] == image[-1, -1] else None  # the colour of the background
        if edge is None or (image == edge).all():
            continue
        y, x = np.nonzero(image != edge)
        if abs(y.mean() - 7.5) > 2 and abs(x.mean() - 7.5) > 2:
            assert label == 2 * (y.mean() > 7.5) + (x.mean() > 7.5)


# The value


def test_the_marginal_of_the_first_value():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (500, 2, 3, 3), dtype=np.uint8)
    images[:, 0, 0, 0] = rng.choice([0, 7, 255], 500, p=[0.5, 0.3, 0.2])
    marginal = Dataset("d", "train", torch.from_numpy(images)).marginal_first(0.5)
    counts = np.array([(images[:, 0, 0, 0] == v).sum() for v in range(256)])
    np.testing.assert_allclose(marginal.numpy(), (counts + 0.5) / (500 + 128), rtol=1e-14)
    assert marginal.dtype == torch.float64 and marginal.min() > 0


def test_the_marginal_of_a_text_counts_every_byte_and_that_of_symbols_has_their_number():
    text = Dataset("t", "train", torch.tensor([5, 5, 5, 9], dtype=torch.uint8))
    assert text.marginal_first()[5].item() == 4 / 260 and text.marginal_first()[9].item() == 2 / 260
    copies = load("copy", num_examples=89)
    assert torch.equal(copies.marginal_first(), torch.tensor([90] + [1] * 10).double() / 100)


def test_the_marginal_is_that_of_the_training_set():
    with pytest.raises(ValueError, match=r"this is the dev split of digits: .*split='train'"):
        load("digits", split="dev").marginal_first()
    with pytest.raises(ValueError, match="smoothing must be positive, got 0"):
        load("digits").marginal_first(0.0)


def test_the_checksum_covers_data_labels_and_mask():
    data, classes = torch.arange(6, dtype=torch.uint8).view(3, 2), torch.tensor([1, 0, 1], dtype=torch.uint8)
    mask = torch.tensor([[True, False]] * 3)
    whole = Dataset("d", "train", data, classes, mask)
    assert whole.sha256 == hashlib.sha256(bytes([0, 1, 2, 3, 4, 5, 1, 0, 1, 1, 0, 1, 0, 1, 0])).hexdigest()
    # of the values: the same for the same in another layout
    assert Dataset("d", "train", data.T.contiguous().T, classes, mask).sha256 == whole.sha256
    assert whole.to("cpu").sha256 == whole.sha256


def test_a_dataset_says_what_it_is():
    assert re.fullmatch(r"<digits dev: 200 images 8×8×1, sha256 [0-9a-f]{12}>", repr(load("digits", split="dev")))
    assert load("digits").licence.startswith("CC BY 4.0")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda u8: Dataset("d", "valid", u8(4)), "split must be one of train, dev, test, got 'valid'"),
        (lambda u8: Dataset("d", "train", u8(4).float()), r"must be uint8 .*, got torch.float32 \(4,\)"),
        (lambda u8: Dataset("d", "train", u8(4, 2, 2)), r"got torch.uint8 \(4, 2, 2\)"),
        (lambda u8: Dataset("d", "test", u8(0, 2)), "the test split is empty"),
        (lambda u8: Dataset("d", "train", u8(4, 2), u8(3)), "3 labels for 4 examples"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_dataset_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make(lambda *shape: torch.zeros(shape, dtype=torch.uint8))


# load


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load("minst"), r"no dataset 'minst': it is neither one of mnist, .*synthetic nor a file or folder at"),
        (lambda: load("digits", split="valid"), "split must be one of train, dev, test, got 'valid'"),
        (lambda: load("digits", size=32), "digits has no option size: it has none"),
        (lambda: load("copy", lenght=64), "copy has no option lenght: it has length, symbols, num_examples, seed"),
        (lambda: load("mnist", where=1), "mnist has no option where: it has none"),
        (lambda: load("copy", split_=1), "copy has no option split_"),
        (lambda: load("copy", length=3), "length must be at least 4, got 3"),
        (lambda: load("copy", symbols=256), "symbols must be at most 255"),
        (lambda: load("synthetic", channels=0), "channels must be at least 1, got 0"),
    ],
)
def test_what_load_does_not_know_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_importing_brings_in_neither_pillow_nor_rich():
    """At the top of the modules stand numpy, torch, what comes with Python, and linattn itself."""
    for file in (ROOT / "linattn" / "train" / "data").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= {"numpy", "torch", "linattn"} | sys.stdlib_module_names


# The real data, where it is


def real(*files: str) -> Path:
    """The folder with the real data: LINATTN_DATA, else ../shared/data from here."""
    folder = Path(os.environ.get("LINATTN_DATA") or ROOT.parent / "shared" / "data")
    if not all((folder / file).exists() for file in files):
        pytest.skip(f"the real data is not here: LINATTN_DATA names no folder with {', '.join(files)}")
    return folder


def test_mnist_is_the_published_one():
    """The four originals, rebuilt from the three splits, have the published checksums."""
    folder = real("mnist")
    train, dev, test = (
        load("mnist", split=split, data_dir=folder, download=False) for split in ("train", "dev", "test")
    )
    assert [len(train), len(dev), len(test)] == [55_000, 5_000, 10_000]
    for part, sets in (("train", (train, dev)), ("t10k", (test,))):
        count = sum(map(len, sets))
        head = struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28)
        assert md5(head, *(x.data.numpy().tobytes() for x in sets)) == PUBLISHED_MD5[f"{part}-images-idx3-ubyte"]
        head = struct.pack(">4BI", 0, 0, 8, 1, count)
        assert md5(head, *(labels(x).numpy().tobytes() for x in sets)) == PUBLISHED_MD5[f"{part}-labels-idx1-ubyte"]
    assert torch.bincount(labels(test).long()).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert train.marginal_first()[0].item() == 55_001 / 55_256  # the first pixel is always black


def test_the_sample_is_the_beginning_of_the_real_test_set():
    test = load("mnist", split="test", data_dir=real("mnist"), download=False)
    packed = (SAMPLE / "mnist-20-images-idx3-ubyte.gz").read_bytes()
    assert test.data[:20].numpy().tobytes() == gzip.decompress(packed)[16:]
    assert labels(test)[:20].tolist() == FIRST_LABELS


def test_cifar10_is_the_published_one():
    """The test batch, rebuilt from the split: planes after labels."""
    test = load("cifar10", split="test", data_dir=real("cifar10"), download=False)
    assert test.data.shape == (10_000, 32, 32, 3)
    planes = test.data.permute(0, 3, 1, 2).reshape(10_000, 3072)
    assert md5(torch.cat([labels(test)[:, None], planes], 1).numpy().tobytes()) == PUBLISHED_MD5["test_batch.bin"]
    assert torch.bincount(labels(test).long()).tolist() == [1000] * 10
    assert labels(test)[:5].tolist() == [3, 8, 8, 0, 6]  # cat, ship, ship, airplane, frog


def test_tinyshakespeare_is_the_published_one():
    folder = real("text_small/tinyshakespeare.txt")
    parts = [
        load("tinyshakespeare", split=split, data_dir=folder, download=False) for split in ("train", "dev", "test")
    ]
    assert [len(part) for part in parts] == [1_003_854, 55_770, 55_770]
    text = b"".join(part.data.numpy().tobytes() for part in parts)
    assert text.startswith(b"First Citizen:\nBefore we proceed any further, hear me speak.")
    assert text == (folder / "text_small" / "tinyshakespeare.txt").read_bytes()
