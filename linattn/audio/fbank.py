"""Mel filter banks, log energies of 25 ms every 10 ms, as Kaldi defines them (its tests are kaldi-native-fbank's).

    frame t    samples 160 t … 160 t + 399 at 16 kHz, in 16-bit units: less its mean, x_i ← x_i - 0.97 x_{i-1}, times
               Povey's window (½ - ½ cos)^0.85
    bin f      log max(1, Σ_k M_fk |FFT_k|²), with triangles M_f that are equally wide in mels, 1127 log(1 + Hz/700)

There is one departure: energies are at least 1, where Kaldi's floor is 1e-7. A 16-bit recording's own rounding is about
100 units, so only digital silence is below, and there it stays near what quiet sounds have (0 instead of -16).
Frames lie wholly inside the sound, so a stream knows each as soon as its last sample is there.

Axes:  N samples   T frames   F bins   L samples of a frame   K frequencies
"""

from __future__ import annotations

import functools
import math

import torch

from linattn._typing import Float, Tensor

FRAME, SHIFT = 0.025, 0.010  # seconds
PREEMPHASIS, POVEY, LOWEST = 0.97, 0.85, 20.0
SCALE = 32768  # samples in ±1 to 16-bit units
BLOCK = 2048  # frames at a time


class FilterBank:
    """Samples in, frames of log energies out; in any pieces the result is that of the whole."""

    def __init__(self, rate: int = 16_000, bins: int = 40):
        self.length, self.shift = round(FRAME * rate), round(SHIFT * rate)
        self.window = povey(self.length)
        self.triangles = triangles(rate, bins, fft_length(self.length))
        self.kept = torch.zeros(0)

    def push(self, samples: Float[Tensor, " N"]) -> Float[Tensor, "T F"]:
        """The frames that are whole by now."""
        self.kept = torch.cat([self.kept, samples.float()])
        count = max(0, (len(self.kept) - self.length) // self.shift + 1)
        if not count:
            return self.kept.new_zeros(0, len(self.triangles))
        frames = self.kept.unfold(0, self.length, self.shift)[:count]
        self.kept = self.kept[count * self.shift :].clone()
        return torch.cat([self.energies(some) for some in frames.split(BLOCK)])

    def energies(self, frames: Float[Tensor, "T L"]) -> Float[Tensor, "T F"]:
        """Float64 inside: what a frame becomes does not depend on how many come with it."""
        x = SCALE * frames.double()
        x = x - x.mean(1, keepdim=True)
        x = (x - PREEMPHASIS * torch.cat([x[:, :1], x[:, :-1]], 1)) * self.window
        spectrum = torch.fft.rfft(x, fft_length(self.length))[:, :-1].abs().square()
        return (spectrum @ self.triangles.T).clamp(min=1).log().float()


def fbank(samples: Float[Tensor, " N"], rate: int = 16_000, bins: int = 40) -> Float[Tensor, "T F"]:
    """All frames of a sound: (N - 25 ms) / 10 ms + 1.

    >>> fbank(torch.zeros(16_000)).shape
    torch.Size([98, 40])
    """
    return FilterBank(rate, bins).push(samples)


def povey(length: int) -> Float[Tensor, " L"]:
    return torch.hann_window(length, periodic=False, dtype=torch.float64) ** POVEY


def fft_length(length: int) -> int:
    """The next power of two."""
    return 1 << math.ceil(math.log2(length))


@functools.cache
def triangles(rate: int, bins: int, length: int) -> Float[Tensor, "F K"]:
    """The weight of each frequency (the last, half the rate, is left out) in each bin; float64."""
    edges = torch.linspace(float(mels(LOWEST)), float(mels(rate / 2)), bins + 2, dtype=torch.float64)
    at = mels(torch.arange(length // 2, dtype=torch.float64) * rate / length)
    left, centre, right = (edges[i : i + bins, None] for i in range(3))
    made = torch.minimum((at - left) / (centre - left), (right - at) / (right - centre)).clamp(min=0)
    if not bool((made.sum(1) > 0).all()):
        raise ValueError(f"{bins} bins are too many at {rate} samples a second: some would hold no frequency. Take 80")
    return made


def mels(hertz: float | Tensor) -> Tensor:
    return 1127 * (1 + torch.as_tensor(hertz, dtype=torch.float64) / 700).log()
