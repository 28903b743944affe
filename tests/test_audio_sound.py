"""Sound from files: what is read is what was written, and what cannot be used is named with the reason."""

from __future__ import annotations

import sys

import pytest
import soundfile
import torch
from sound_cases import RATE, noise, tone, write

from linattn.audio import BadSound, Sound, chunks, from_pcm, read, read_all

FORMATS = {
    "wav": ({}, 1e-4),
    "flac": ({}, 1e-4),
    "ogg": ({"format": "OGG", "subtype": "VORBIS"}, 0.1),
    "opus": ({"format": "OGG", "subtype": "OPUS"}, 0.1),
    "mp3": ({}, None),  # it adds silence before the sound
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_what_was_written(name, tmp_path):
    options, tolerance = FORMATS[name]
    x = tone(440, 1.0)
    path = write(tmp_path / f"a.{name}", x, **options)
    for source in (path, str(path), path.read_bytes()):
        sound = read(source)
        assert sound.rate == RATE and sound.samples.dtype == torch.float32
        assert abs(sound.seconds - 1) < (0.2 if tolerance is None else 1e-3)
        if tolerance is not None:
            middle = slice(2000, -2000)  # a lossy format needs a moment to begin
            assert (sound.samples[: len(x)] - x)[middle].abs().max() < tolerance * 0.5


def test_channels_become_their_mean(tmp_path):
    left, right = noise(seed=1), noise(seed=2)
    path = write(tmp_path / "a.wav", torch.stack([left, right], 1), subtype="FLOAT")
    assert torch.allclose(read(path).samples, (left + right) / 2, atol=1e-7)


def test_another_rate_is_another_number_of_samples(tmp_path):
    sound = read(write(tmp_path / "a.wav", tone(440, 1.0, 44_100), 44_100), rate=RATE)
    assert sound.rate == RATE and len(sound.samples) == RATE
    assert (sound.samples - tone(440, 1.0))[500:-500].abs().max() < 1e-3


def test_chunks_are_the_file_in_pieces(tmp_path):
    path = write(tmp_path / "a.flac", noise(1.05))
    rate, parts = chunks(path, seconds=0.1)
    parts = list(parts)
    assert rate == RATE and [len(part) for part in parts] == [1600] * 10 + [800]
    assert torch.equal(torch.cat(parts), read(path).samples)


def test_raw_samples():
    assert from_pcm(bytes([0x00, 0x80, 0xFF, 0x7F, 0x00, 0x40])).tolist() == [-1.0, 32767 / 32768, 0.5]
    assert len(from_pcm(b"")) == 0
    with pytest.raises(ValueError, match="two bytes each, got 3 bytes"):
        from_pcm(b"abc")


def broken(folder):
    """Files that cannot be used, and what is said of each."""
    write(folder / "empty.wav", torch.zeros(0))
    write(folder / "silent.wav", torch.full((RATE,), 5e-5), subtype="FLOAT")
    write(folder / "slow.wav", noise(1.0, 4000), 4000)
    write(folder / "long.wav", noise(2.5))
    write(folder / "nan.wav", torch.full((RATE,), torch.nan), subtype="FLOAT")
    (folder / "text.wav").write_text("not a sound")
    whole = write(folder / "whole.flac", noise(2.0)).read_bytes()
    (folder / "cut.flac").write_bytes(whole[: len(whole) // 2])
    return {
        "empty.wav": "is empty: it holds no samples",
        "silent.wav": "is silent: its loudest sample is 5.0e-05 of full scale",
        "slow.wav": "says it has 4000 samples a second, and speech needs 8000 to",
        "long.wav": r"lasts 2.5 s, and at most 2 s are taken here.*max_seconds",
        "nan.wav": "no finite numbers",
        "text.wav": "cannot be read as sound .*convert it to one of these",
        "cut.flac": "damaged or cut off|is cut off",
        "gone.wav": "there is no file .*gone.wav",
    }


def test_a_sound_that_cannot_be_used_says_why(tmp_path):
    for name, message in broken(tmp_path).items():
        with pytest.raises(BadSound, match=rf"(?s){name}.*({message})|{message}"):
            read(tmp_path / name, max_seconds=2)


def test_a_bad_file_does_not_end_the_work(tmp_path):
    bad = broken(tmp_path)
    names = [*bad, "whole.flac"]
    found = dict(read_all(((name, tmp_path / name) for name in names), rate=RATE, max_seconds=2))
    assert [name for name, made in found.items() if isinstance(made, Sound)] == ["whole.flac"]
    assert all(str(found[name]).startswith(name) or name in str(found[name]) for name in bad)


def test_without_soundfile_the_way_out_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.wav", noise())
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ValueError, match=r"pip install 'linattn\[audio\]'"):
        read(path)
    assert soundfile.__name__ == "soundfile"
