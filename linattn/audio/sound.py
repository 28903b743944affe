"""Sound from files: wav, flac, ogg, opus, mp3 and whatever else libsndfile reads, as one channel of float32 in ±1.

A file that cannot be used raises BadSound: what it is called, what is wrong with it, and the way out. `read_all` skips
such files and names them, so that one bad file never ends the work on a thousand good ones.

Axes:  N samples
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from linattn._typing import Float, Tensor
from linattn.audio.resample import resample

if TYPE_CHECKING:
    import soundfile

LOWEST, HIGHEST = 8_000, 768_000  # Hz: below, speech has lost its consonants; above, the header is wrong
SILENCE = 1e-4  # of full scale, -80 dB: less is no microphone's noise
Source = str | os.PathLike[str] | bytes


class BadSound(ValueError):
    """A sound that cannot be used, and why."""


class Sound(NamedTuple):
    samples: Float[Tensor, " N"]
    rate: int  # samples a second

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate


def read(source: Source, *, rate: int | None = None, max_seconds: int | float | None = None, name: str = "") -> Sound:
    """A whole sound, from a file or from a file's bytes; at `rate` samples a second, None: at its own.

    Several channels become their mean. Broken, empty, silent and wrongly sampled files raise BadSound, and with
    max_seconds those that are longer, before they are decoded.
    """
    name = name or _name_of(source)
    with _opened(source, name) as file:
        check_rate(file.samplerate, name)
        _check_length(file, max_seconds, name)
        sound = Sound(_decoded(file, name), file.samplerate)
    check_samples(sound.samples, name)
    return sound if rate in (None, sound.rate) else Sound(resample(sound.samples, sound.rate, rate), rate)


def chunks(source: Source, seconds: float = 1.0) -> tuple[int, Iterator[Tensor]]:
    """A file's rate, and its samples piece by piece, for files of any length: memory holds one piece."""
    name = _name_of(source)
    file = _opened(source, name)
    check_rate(file.samplerate, name)
    return file.samplerate, _pieces(file, max(1, round(seconds * file.samplerate)), name)


def read_all(
    sources: Iterable[tuple[str, Source]], *, rate: int, max_seconds: int | float | None = None
) -> Iterator[tuple[str, Sound | BadSound]]:
    """Each of the named sources as its sound, or as what is wrong with it."""
    for name, source in sources:
        yield name, _sound_or_error(source, rate, max_seconds, name)


def _sound_or_error(source: Source, rate: int, max_seconds: int | float | None, name: str) -> Sound | BadSound:
    try:
        return read(source, rate=rate, max_seconds=max_seconds, name=name)
    except BadSound as error:
        return error


def from_pcm(data: bytes) -> Float[Tensor, " N"]:
    """Raw samples of 16 bits, signed, little-endian, as what `arecord -f S16_LE` and `sox -e signed -b 16` write."""
    if len(data) % 2:
        raise ValueError(f"16-bit samples have two bytes each, got {len(data)} bytes: keep the last one for later")
    if not data:
        return torch.zeros(0)
    return torch.frombuffer(bytearray(data), dtype=torch.int16).float() / 32768


def check_rate(rate: int, name: str = "the sound") -> int:
    if not LOWEST <= rate <= HIGHEST:
        raise BadSound(
            f"{name} says it has {rate} samples a second, and speech needs {LOWEST} to {HIGHEST}: is its header right? "
            f"Record it anew, or convert it from the original"
        )
    return rate


def check_samples(samples: Float[Tensor, " N"], name: str = "the sound") -> None:
    """Something is there, it is finite, and it is not silence."""
    if not len(samples):
        raise BadSound(f"{name} is empty: it holds no samples")
    largest = float(samples.abs().max())
    if not largest < float("inf"):  # NaN as well
        raise BadSound(f"{name} holds samples that are no finite numbers: export it anew")
    if largest < SILENCE:
        raise BadSound(f"{name} is silent: its loudest sample is {largest:.1e} of full scale. Was the microphone on?")


def _check_length(file: soundfile.SoundFile, max_seconds: int | float | None, name: str) -> None:
    seconds = file.frames / file.samplerate
    if max_seconds is not None and seconds > max_seconds:
        raise BadSound(
            f"{name} lasts {seconds:.1f} s, and at most {max_seconds:g} s are taken here: cut it, or allow more "
            f"(max_seconds)"
        )


def _decoded(file: soundfile.SoundFile, name: str) -> Float[Tensor, " N"]:
    announced = file.frames
    samples = torch.cat([torch.zeros(0), *_pieces(file, 1 << 20, name)])
    if len(samples) < announced:
        raise BadSound(f"{name} is cut off: {len(samples)} of the {announced} samples that its header announces")
    return samples


def _pieces(file: soundfile.SoundFile, size: int, name: str) -> Iterator[Tensor]:
    with file:
        while True:
            try:
                piece = file.read(size, dtype="float32", always_2d=True)
            except _damage() as error:
                raise BadSound(
                    f"{name} cannot be decoded to its end ({_why(error)}): it is damaged or cut off"
                ) from error
            if not len(piece):
                return
            yield torch.from_numpy(piece).mean(1)


def _opened(source: Source, name: str) -> soundfile.SoundFile:
    library = _library()
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise BadSound(f"there is no file {name}")
    try:
        return library.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else os.fspath(source))
    except _damage() as error:
        raise BadSound(
            f"{name} cannot be read as sound ({_why(error)}): it is damaged, or in a format that is not known here. "
            f"wav, flac, ogg, opus and mp3 are: convert it to one of these"
        ) from error


def _why(error: Exception) -> str:
    return str(getattr(error, "error_string", error)).rstrip(
        "."
    )  # libsndfile's own words, without the object's address


def _damage() -> tuple[type[Exception], ...]:
    return (_library().LibsndfileError, OSError, RuntimeError, ValueError)


def _library() -> Any:
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without libsndfile
        raise ValueError(f"sound files are read by soundfile ({error}): pip install 'linattn[audio]'") from error
    return soundfile


def _name_of(source: Source) -> str:
    return "the sound" if isinstance(source, bytes) else str(os.fspath(source))
