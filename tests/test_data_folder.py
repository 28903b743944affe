"""A folder of one's own images: every format, the right way up, and nothing read twice or lost silently."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from linattn.train.data import folder as folder_module
from linattn.train.data import load

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Each test stands in a folder of its own, where `runs` will be."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def photos(tmp_path) -> Path:
    (tmp_path / "photos").mkdir()
    return tmp_path / "photos"


def flat(colour, size=(8, 8), mode="RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def quarters() -> Image.Image:
    """16 × 16: red above green on the left, blue above white on the right."""
    image = flat(RED, (16, 16))
    for colour, corner in ((BLUE, (8, 0)), (GREEN, (0, 8)), (WHITE, (8, 8))):
        image.paste(colour, (*corner, corner[0] + 8, corner[1] + 8))
    return image


def noise(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / f"{i:03}.png")


def only(folder: Path, **options) -> np.ndarray:
    """The one image in the folder."""
    data = load(folder, **options).data
    assert len(data) == 1
    return data[0].numpy()


def corners(image: np.ndarray) -> list[tuple[int, ...]]:
    """The colours of the quarters' centres: above left, above right, below left, below right."""
    low, high = len(image) // 4, 3 * len(image) // 4
    return [tuple(int(x) for x in image[y, x]) for y in (low, high) for x in (low, high)]


@pytest.mark.parametrize("kind", ["png", "webp", "bmp", "tiff", "ppm", "gif", "jpg"])
def test_formats(photos, kind):
    (photos / "deep" / "er").mkdir(parents=True)
    options = {"webp": {"lossless": True}, "jpg": {"quality": 95, "subsampling": 0}}.get(kind, {})
    quarters().save(photos / "deep" / "er" / f"a.{kind}", **options)
    got = np.array(corners(only(photos, size=16)))
    assert np.abs(got - np.array([RED, BLUE, GREEN, WHITE])).max() <= (4 if kind == "jpg" else 0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(photos, orientation):
    """Stored turned or mirrored, with the note that says so: read as it is meant."""
    meant = np.asarray(quarters())
    stored = {
        1: meant,
        2: meant[:, ::-1],
        3: meant[::-1, ::-1],
        4: meant[::-1],
        5: meant.transpose(1, 0, 2),
        6: np.rot90(meant, 1),
        7: meant[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(meant, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(photos / "a.png", exif=exif)
    assert corners(only(photos, size=16)) == [RED, BLUE, GREEN, WHITE]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (10, 40)])
def test_the_centre_square_is_kept(photos, width, height):
    image = flat(RED, (width, height))
    image.paste(GREEN, (width // 2 - 5, height // 2 - 5, width // 2 + 5, height // 2 + 5))
    image.save(photos / "a.png")
    assert (only(photos, size=10) == GREEN).all()
    assert (only(photos, size=5) == GREEN).all()


def test_scaling_averages(photos):
    """A fine chequerboard becomes its mean, not one of its colours; a small image grows."""
    board = np.indices((64, 64)).sum(0) % 2 * 255
    Image.fromarray(board.astype(np.uint8)).save(photos / "a.png")
    assert np.abs(only(photos, size=8, channels=1).astype(int) - 127.5).max() <= 2
    assert only(photos, size=100).shape == (100, 100, 3)


def test_a_large_jpeg_is_not_worse_for_being_read_small(photos):
    """JPEG is decoded at a fraction of its size. What is smooth becomes the mean, what is fine as it would of a PNG."""
    y, x = np.mgrid[:512, :512]
    smooth = np.stack([y / 2, x / 2, (x + y) / 4], -1).astype(np.uint8)
    Image.fromarray(smooth).save(photos / "a.jpg", quality=95)
    mean = smooth.reshape(16, 32, 16, 32, 3).mean((1, 3))
    inner = (slice(1, -1), slice(1, -1))
    assert np.abs(only(photos, size=16)[inner] - mean[inner]).max() < 3

    fine = Image.fromarray(((x // 4 + y // 4) % 2 * 255).astype(np.uint8))
    fine.save(photos / "a.jpg", quality=95)
    small = only(photos, size=128).astype(int)
    (photos / "a.jpg").unlink()
    fine.save(photos / "a.png")
    assert np.abs(small - only(photos, size=128)).max() < 20 < small.std()


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (lambda: flat((255, 0, 0, 0), mode="RGBA"), WHITE),  # what is hidden stays hidden
        (lambda: flat((0, 0, 255, 255), mode="RGBA"), BLUE),
        (lambda: flat((0, 0, 0, 51), mode="RGBA"), (204, 204, 204)),
        (lambda: flat((0, 0), mode="LA"), WHITE),
        (lambda: flat(100, mode="L"), (100, 100, 100)),
        (lambda: flat(1, mode="1"), WHITE),
        (lambda: Image.fromarray(np.full((8, 8), 100 * 256 + 7, np.uint16)), (100, 100, 100)),  # 16 bits, not clipped
        (lambda: flat(RED).convert("P"), RED),
    ],
    ids=["clear", "opaque", "shade", "clear grey", "grey", "bit", "16 bits", "palette"],
)
def test_kinds_of_pixels(photos, image, expected):
    image().save(photos / "a.png")
    assert np.unique(only(photos).reshape(-1, 3), axis=0).tolist() == [list(expected)]


def test_a_transparent_palette_and_four_colours(photos):
    flat(RED).convert("P").save(photos / "a.gif", transparency=flat(RED).convert("P").getpixel((0, 0)))
    assert (only(photos) == 255).all()
    (photos / "a.gif").unlink()
    flat((0, 255, 255, 0), mode="CMYK").save(photos / "a.tiff")
    assert (only(photos, size=4) == RED).all()


def test_grey(photos):
    flat(GREEN).save(photos / "a.png")
    assert only(photos, channels=1).shape == (32, 32, 1)
    assert np.unique(only(photos, channels=1)).tolist() == [150]  # 0.587 · 255: the eye's weight of green


# What cannot be read


def test_unreadable_files_are_named_and_the_rest_is_read(photos):
    noise(photos, 5)
    (photos / "notes.txt").write_text("no image")
    whole = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole, "JPEG")
    (photos / "cut.jpg").write_bytes(whole.getvalue()[:-900])
    flat(0.5, mode="F").save(photos / "float.tiff")
    (photos / ".hidden").write_text("not even tried")
    (photos / ".git").mkdir()
    (photos / ".git" / "index").write_text("not even tried")
    for attempt in ("read", "cached"):
        with pytest.warns(UserWarning, match=r"skipped 3 of 8 files in .*photos: cut\.jpg \(") as caught:
            data = load(photos)
        said = str(caught[0].message)
        assert len(data) == 3, attempt
        assert "notes.txt (UnidentifiedImageError" in said and "float.tiff (ValueError: floating-point" in said
        assert "hidden" not in said


def test_many_unreadable_files_are_counted(photos):
    noise(photos, 1)
    for i in range(25):
        (photos / f"note-{i:02}.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"skipped 25 of 26 .*note-19\.txt .* and 5 more$") as caught:
        load(photos)
    assert "note-20" not in str(caught[0].message)


def test_a_folder_without_images_is_an_error(photos):
    with pytest.raises(ValueError, match="photos holds no files: expected images"):
        load(photos)
    (photos / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"holds 1 files and no image that can be read: notes\.txt \(Unidentified"):
        load(photos)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be a positive integer .*, got 0"),
        ({"size": "32"}, "size must be a positive integer .*, got '32'"),
        ({"channels": 4}, "channels must be 3 .* or 1 .*, got 4"),
        ({"colour": True}, "photos has no option colour: it has size, channels, cache_dir"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_options_are_errors(photos, options, message):
    with pytest.raises(ValueError, match=message):
        load(photos, **options)


# Splits


@pytest.mark.parametrize(("count", "sizes"), [(3, (1, 1, 1)), (30, (28, 1, 1)), (47, (43, 2, 2))])
def test_every_image_is_in_one_split(photos, count, sizes):
    noise(photos, count)
    parts = [load(photos, split=split, size=4).data for split in ("train", "dev", "test")]
    assert tuple(len(part) for part in parts) == sizes
    read = sorted(image.numpy().tobytes() for part in parts for image in part)
    assert read == sorted(np.asarray(Image.open(path)).tobytes() for path in photos.iterdir())


def test_splits_do_not_depend_on_names(photos):
    noise(photos, 30)
    before = load(photos, split="test", size=4)
    for i, path in enumerate(sorted(photos.iterdir())):
        path.rename(photos / f"{'zyx'[i % 3]}{i}.image")
    assert load(photos, split="test", size=4).sha256 == before.sha256


def test_copies_of_an_image_stay_in_one_split(photos):
    noise(photos, 10)
    for path in sorted(photos.iterdir()):
        for i in range(5):
            (photos / f"{path.stem}-{i}.png").write_bytes(path.read_bytes())
    parts = [load(photos, split=split, size=4).data for split in ("train", "dev", "test")]
    seen = [{image.numpy().tobytes() for image in part} for part in parts]
    assert [len(part) for part in parts] == [48, 6, 6]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_too_few_to_hold_one_out(photos):
    noise(photos, 2)
    assert len(load(photos)) == 2
    with pytest.raises(ValueError, match="the dev split is empty"):
        load(photos, split="dev")


# The cache


def reads(monkeypatch) -> list[Path]:
    """The files that are decoded from now on."""
    seen = []
    decode = folder_module._decode
    monkeypatch.setattr(folder_module, "_decode", lambda path, *rest: seen.append(path) or decode(path, *rest))
    return seen


def test_a_folder_is_read_once(photos, monkeypatch):
    noise(photos, 5)
    seen, listing = reads(monkeypatch), sorted(photos.iterdir())
    first = load(photos)
    assert len(seen) == 5 and sorted(photos.iterdir()) == listing
    (cache,) = Path("runs").iterdir()
    assert cache.name.startswith("photos-32x32x3-") and cache.suffix == ".npz"
    assert load(photos).sha256 == first.sha256 and len(load(photos, split="dev")) == 1
    assert len(seen) == 5
    load(photos, cache_dir=None)
    assert len(seen) == 10
    load(photos, cache_dir="elsewhere/else")
    assert len(seen) == 15 and len(list(Path("elsewhere/else").iterdir())) == 1
    load(photos, size=8)
    load(photos, channels=1)
    assert len(seen) == 25 and len(list(Path("runs").iterdir())) == 3


def test_a_changed_folder_is_read_again(photos, monkeypatch):
    noise(photos, 5)
    load(photos)
    seen = reads(monkeypatch)
    flat(RED).save(photos / "new.png")
    assert len(load(photos)) == 4 and len(seen) == 6
    (photos / "new.png").rename(photos / "newer.png")
    load(photos)
    assert len(seen) == 12
    os.utime(photos / "newer.png", ns=(0, 0))
    load(photos)
    assert len(seen) == 18 and len(list(Path("runs").iterdir())) == 1


def test_folders_of_one_name_do_not_mix(photos, tmp_path):
    noise(photos, 3)
    other = tmp_path / "other" / "photos"
    other.mkdir(parents=True)
    flat(RED).save(other / "a.png")
    assert len({load(photos).sha256, load(other).sha256, load(photos).sha256}) == 2


def test_half_a_cache_is_made_again(photos):
    noise(photos, 5)
    first = load(photos)
    (cache,) = Path("runs").iterdir()
    for damage in (cache.read_bytes()[:-100], b"", b"PK\x03\x04"):
        cache.write_bytes(damage)
        assert load(photos).sha256 == first.sha256
        assert len(cache.read_bytes()) > 1000


def test_nothing_is_written_into_the_folder(photos, tmp_path, monkeypatch):
    """Not when one stands in it, either: then the cache is where downloads are."""
    noise(photos, 3)
    monkeypatch.setattr(folder_module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.chdir(photos)
    listing = sorted(photos.iterdir())
    load(".")
    assert sorted(photos.iterdir()) == listing
    assert len(list((tmp_path / "cache" / "folders").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_no_obstacle(photos):
    noise(photos, 3)
    Path("runs").touch()
    with pytest.warns(UserWarning, match="cannot keep the images of this folder for next time"):
        assert len(load(photos)) == 1


def test_many_files_show_progress(photos, capsys, monkeypatch):
    noise(photos, 12)
    load(photos, cache_dir=None)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(folder_module, "MANY", 12)
    load(photos, cache_dir=None)
    assert capsys.readouterr().err == f"reading 12 files in {photos}\n"


def test_an_interrupt_is_not_taken_for_a_bad_file(photos, monkeypatch):
    noise(photos, 3)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module, "_flatten", interrupt)
    with pytest.raises(KeyboardInterrupt), warnings.catch_warnings():
        load(photos)
    assert not Path("runs").exists()
