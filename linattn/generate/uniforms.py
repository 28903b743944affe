"""One uniform number for each row and place of a sequence, whatever is made beside it.

    u(seed, row, t) = ⌊w_t / 2¹¹⌋ / 2⁵³          w_0, w_1, …  the words of Philox-4×64 with the key (seed, row)

Philox (Salmon et al. 2011) is a function of its key and a counter: no row waits for another, no place for the ones
before it. So a row gives the same values alone and in a batch, from its beginning and resumed, and there is no random
state to keep. The words are those of numpy's bit generator, which numpy promises never to change. torch's own CPU
generator takes 32 bits of its seed only: too few to tell (seed, row) pairs apart.

Axes:  N rows   P places
"""

from __future__ import annotations

import numpy as np
import torch

from linattn._typing import Float, Tensor
from linattn.ops import gpu

AHEAD = 64  # places that are drawn at once: a generator for a row costs as much as a few hundred words of it
DRAWN = 128  # rows that a program draws for, on a GPU
WORDS = 4  # of one count of Philox's counter


def uniforms(seed: int, row: int, start: int, count: int) -> np.ndarray:
    """u(seed, row, start … start + count - 1) in [0, 1)."""
    counter, skipped = divmod(start, WORDS)
    key = np.array([seed, row], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(skipped + count)
    return (words[skipped:] >> np.uint64(11)) * 2.0**-53


class Uniforms:
    """The numbers that rows use step by step, each from its own place on."""

    def __init__(self, seed: int, rows: list[int], places: list[int], device: torch.device):
        self._seed, self._rows, self._places, self._device = seed, rows, places, device
        self._begin, self._block = -AHEAD, torch.empty(0)
        self._counters: tuple[Tensor, ...] | None = None

    def at(self, step: int) -> Float[Tensor, " N"]:
        """u(seed, row, place + step) of each row."""
        if not 0 <= step - self._begin < AHEAD:
            self._begin = step - step % AHEAD
            on_device = self._device.type == "cuda" and gpu.status()[0]
            self._block = self._drawn_on_device() if on_device else self._drawn()
        return self._block[step - self._begin]

    def between(self, step: int, count: int) -> Float[Tensor, "S N"]:
        """The numbers of `count` steps."""
        return torch.stack([self.at(step + i) for i in range(count)])

    def _drawn(self) -> Float[Tensor, "P N"]:
        starts = [place + self._begin for place in self._places]
        drawn = [uniforms(self._seed, *of, AHEAD) for of in zip(self._rows, starts, strict=True)]
        return torch.from_numpy(np.stack(drawn, 1)).to(self._device)

    def _drawn_on_device(self) -> Float[Tensor, "P N"]:
        """The same numbers. On the host a row takes some 15 µs, which is as long as a GPU's steps for it."""
        from linattn.ops.triton import draw
        from linattn.ops.triton.launch import launch

        if self._counters is None:
            key = torch.from_numpy(np.array([self._seed], np.uint64).view(np.int64))
            self._counters = tuple(torch.as_tensor(x).to(self._device) for x in (key, self._rows, self._places))
        key, rows, places = self._counters
        block = torch.empty(AHEAD, len(rows), dtype=torch.float64, device=self._device)
        programs = AHEAD * -(-len(rows) // DRAWN)
        launch(draw.uniforms, programs, (key, rows, places + self._begin, block, len(rows)), (DRAWN, AHEAD), 4)
        return block
