"""Prompts, in whatever form they come, as rows of values.

Axes:  N rows   T values of the longest
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from linattn._typing import Int, Tensor
from linattn.nn.checks import INTEGERS

Row = Tensor | bytes | Sequence[int]
Prompt = Row | Sequence[Row]
FORMS = "a tensor (values) or (rows, values), bytes, a list of values, or a list with one of these for each row"


def read_prompts(prompt: Any, num_values: int) -> list[Tensor]:
    """The rows of a prompt, int64 on the CPU, checked."""
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and any(isinstance(row, str) for row in prompt)):
        raise ValueError("a prompt is values, not a str: encode it, for a model of bytes with text.encode()")
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        several = not all(isinstance(x, int) for x in prompt)
        rows = list(prompt) if several else [prompt]
    else:
        rows = list(prompt) if isinstance(prompt, torch.Tensor) and prompt.dim() == 2 else [prompt]
    if not rows:
        raise ValueError("the prompt has no rows: leave it out (None) to begin with the model's own first values")
    return [_row(i, row, num_values) for i, row in enumerate(rows)]


def padded(rows: list[Tensor]) -> tuple[Int[Tensor, "N T"], Int[Tensor, " N"]]:
    """Rows as one tensor, with zeros at their ends, and their lengths."""
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def _row(i: int, row: Any, num_values: int) -> Tensor:
    if isinstance(row, bytes):
        row = list(row)
    if isinstance(row, Sequence) and not all(isinstance(x, int) for x in row):
        raise ValueError(f"prompt row {i} holds something else than integers: {row!r:.80}; pass {FORMS}")
    if not isinstance(row, (torch.Tensor, Sequence)):
        raise ValueError(f"prompt row {i} is a {type(row).__name__}: pass {FORMS}")
    values = row if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=torch.int64)
    if values.dim() != 1 or values.dtype not in INTEGERS:
        raise ValueError(
            f"prompt row {i} is {tuple(values.shape)} {values.dtype}, expected integers (values,): pass {FORMS}"
        )
    values = values.detach().to("cpu", torch.int64)
    if not len(values):
        raise ValueError(
            f"prompt row {i} is empty: give it a value, or leave the prompt out to begin with first values"
        )
    outside = values[(values < 0) | (values >= num_values)]
    if len(outside):
        raise ValueError(f"prompt row {i} holds {int(outside[0])}, the model's values are 0 … {num_values - 1}")
    return values
