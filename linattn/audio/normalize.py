"""Features to mean 0 and spread 1, each bin for itself, in one of three ways.

    "utterance"   by the mean and spread of the whole utterance: needs its end
    "running"     by those of the frames so far, begun with the training set's as if they were `prior` frames:

                      w_t = min(prior + t, horizon)      m_t = m_{t-1} + (x_t - m_{t-1}) / w_t      q_t likewise of x²
                      y_t = (x_t - m_t) / √(q_t - m_t²)                                  t = 1, 2, …

                  so the microphone and the room are learnt in a second or two, and followed when they change
    "global"      by the training set's

Axes:  T frames   F bins
"""

from __future__ import annotations

import torch

from linattn._typing import Float, Tensor

WAYS = ("running", "utterance", "global")
LEAST = 0.1  # spread of a bin: less has no sound that changes
BLOCK = 1024  # frames; (1 - 1/horizon)^BLOCK must not be tiny


class Running:
    """The running normaliser; in any pieces the result is that of the whole. Float64 inside."""

    def __init__(self, mean: Float[Tensor, " F"], std: Float[Tensor, " F"], *, prior: int = 100, horizon: int = 3000):
        if not 1 <= prior <= horizon:
            raise ValueError(f"prior frames must be 1 … horizon, got {prior=}, {horizon=}")
        mean, std = mean.double(), std.double()
        self.moments = torch.stack([mean, std.square() + mean.square()])  # m and q, (2, F)
        self.weight, self.horizon = prior, horizon

    def push(self, frames: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
        made = [frames[:0]]
        while len(frames):
            grows = self.weight < self.horizon
            count = min(len(frames), BLOCK, self.horizon - self.weight if grows else BLOCK)
            x, frames = frames[:count], frames[count:]
            moments = (self._mean if grows else self._decayed)(torch.stack([x.double(), x.double().square()]))
            self.moments = moments[:, -1]
            self.weight += count if grows else 0
            made.append(scaled(x, moments[0], (moments[1] - moments[0].square()).clamp(min=0).sqrt()))
        return torch.cat(made)

    def _mean(self, x: Float[Tensor, "2 T F"]) -> Float[Tensor, "2 T F"]:
        """While w grows, m_t is the plain mean of the prior and all frames so far."""
        weights = self.weight + torch.arange(x.shape[1] + 1, dtype=torch.float64)
        return (self.weight * self.moments[:, None] + x.cumsum(1)) / weights[1:, None]

    def _decayed(self, x: Float[Tensor, "2 T F"]) -> Float[Tensor, "2 T F"]:
        """Then m_t = d m_{t-1} + (1 - d) x_t, that is d^t (m_0 + (1 - d) Σ_s d^{-s} x_s)."""
        d = 1 - 1 / self.horizon
        powers = (d ** torch.arange(1, x.shape[1] + 1, dtype=torch.float64))[:, None]
        return powers * (self.moments[:, None] + (1 - d) * (x / powers).cumsum(1))


def by_utterance(frames: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
    if len(frames) == 0:
        return frames
    wide = frames.double()
    return scaled(frames, wide.mean(0), wide.std(0, unbiased=False))


def scaled(frames: Float[Tensor, "T F"], mean: Tensor, std: Tensor) -> Float[Tensor, "T F"]:
    return ((frames.double() - mean) / std.clamp(min=LEAST)).float()
