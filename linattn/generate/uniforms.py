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

AHEAD = 64  # places that are drawn at once: a generator for a row costs as much as a few hundred words of it
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

    def at(self, step: int) -> Float[Tensor, " N"]:
        """u(seed, row, place + step) of each row."""
        if not 0 <= step - self._begin < AHEAD:
            self._begin = step - step % AHEAD
            starts = [place + self._begin for place in self._places]
            drawn = [uniforms(self._seed, *of, AHEAD) for of in zip(self._rows, starts, strict=True)]
            self._block = torch.from_numpy(np.stack(drawn, 1)).to(self._device)
        return self._block[step - self._begin]

    def between(self, step: int, count: int) -> Float[Tensor, "S N"]:
        """The numbers of `count` steps."""
        return torch.stack([self.at(step + i) for i in range(count)])
