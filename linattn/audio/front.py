"""The front end: sound to the frames that a recogniser reads, whole or as it arrives.

    front = FrontEnd(bins=80)
    frames = front.whole(samples)                        # (T, F)
    stream = front.stream()                              # the same frames, in pieces
    for piece in pieces: frames = stream.push(piece)
    frames = stream.finish()

Axes:  N samples   T frames   F bins
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from linattn._typing import Float, Tensor
from linattn.audio.fbank import FRAME, SHIFT, FilterBank, fbank
from linattn.audio.normalize import WAYS, Running, by_utterance, scaled
from linattn.audio.resample import Resampler, resample
from linattn.audio.sound import LOWEST, BadSound, check_rate


@dataclass(frozen=True)
class FrontEnd:
    """What happens to sound before the model, as plain values that are saved with it.

    rate          samples a second that the features are made of; other sound is resampled
    bins          of the filter bank: 40 or 80
    scaling     "running" (streams), "utterance" or "global": see normalize.py
    mean, std     of the training set's features, a number for each bin; "utterance" needs none
    prior, horizon    frames: of the running normaliser
    """

    rate: int = 16_000
    bins: int = 40
    scaling: str = "running"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    prior: int = 100
    horizon: int = 3_000

    def __post_init__(self) -> None:
        if self.scaling not in WAYS:
            raise ValueError(f"scaling must be one of {', '.join(WAYS)}, got {self.scaling!r}")
        if self.rate < LOWEST:
            raise ValueError(f"rate must be at least {LOWEST} samples a second, got {self.rate}")
        if self.bins < 1:
            raise ValueError(f"bins must be positive, got {self.bins}: 40 and 80 are usual")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (0, self.bins):
                raise ValueError(f"{name} must have a number for each of {self.bins} bins: {len(getattr(self, name))}")

    def fitted(self, mean: Float[Tensor, " F"], std: Float[Tensor, " F"]) -> FrontEnd:
        """With the mean and spread of a training set."""
        return dataclasses.replace(self, mean=tuple(mean.tolist()), std=tuple(std.tolist()))

    def features(self, samples: Float[Tensor, " N"], rate: int | None = None) -> Float[Tensor, "T F"]:
        """Log energies, not normalised."""
        return fbank(self._at_rate(samples, rate), self.rate, self.bins)

    def normalized(self, features: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
        """All features of one utterance, normalised."""
        if self.scaling == "utterance":
            return by_utterance(features)
        mean, std = self.statistics()
        if self.scaling == "global":
            return scaled(features, mean, std)
        return Running(mean, std, prior=self.prior, horizon=self.horizon).push(features)

    def whole(self, samples: Float[Tensor, " N"], rate: int | None = None, name: str = "the sound") -> Tensor:
        """The frames of a whole utterance. `rate` is that of the samples, None: the front end's."""
        samples = self._at_rate(samples, rate)
        if len(samples) < round(FRAME * self.rate):
            raise BadSound(f"{name} lasts {1000 * len(samples) / self.rate:.0f} ms, less than a frame of 25 ms")
        return self.normalized(fbank(samples, self.rate, self.bins))

    def stream(self, rate: int | None = None) -> FrontStream:
        """For sound that arrives at `rate` samples a second, None: the front end's."""
        return FrontStream(self, self.rate if rate is None else rate)

    def statistics(self) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
        if not (self.mean and self.std):
            raise ValueError(
                f"scaling={self.scaling!r} begins with the mean and spread of a training set, and this front end "
                f"has none: use front.fitted(mean, std), or scaling='utterance'"
            )
        return torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)

    @property
    def frames_a_second(self) -> float:
        return 1 / SHIFT

    def _at_rate(self, samples: Tensor, rate: int | None) -> Tensor:
        return samples if rate in (None, self.rate) else resample(samples, check_rate(rate), self.rate)


class FrontStream:
    """One stream of sound. It remembers some milliseconds, however long the stream."""

    def __init__(self, front: FrontEnd, rate: int):
        if front.scaling == "utterance":
            raise ValueError("scaling='utterance' needs the end of the utterance: a stream takes 'running' or 'global'")
        mean, std = front.statistics()
        self.resampler = None if rate == front.rate else Resampler(check_rate(rate), front.rate)
        self.bank = FilterBank(front.rate, front.bins)
        running = front.scaling == "running"
        self.running = Running(mean, std, prior=front.prior, horizon=front.horizon) if running else None
        self.mean, self.std = mean, std

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, "T F"]:
        """The frames that are whole by now."""
        return self._frames(samples if self.resampler is None else self.resampler.push(samples))

    def finish(self) -> Float[Tensor, "T F"]:
        """The frames that the resampler still held back; the stream is over."""
        return self._frames(torch.zeros(0) if self.resampler is None else self.resampler.finish())

    def _frames(self, samples: Tensor) -> Tensor:
        features = self.bank.push(samples)
        return scaled(features, self.mean, self.std) if self.running is None else self.running.push(features)
