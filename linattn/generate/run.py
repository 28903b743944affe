"""Whole sequences: `generate`, what it returns, and how it is interrupted.

Axes:  N rows   L values of a complete row
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from linattn._typing import Bool, Int, Tensor
from linattn.generate.progress import Progress
from linattn.generate.prompts import Prompt
from linattn.generate.request import Request, generating, start
from linattn.generate.snapshot import Snapshot
from linattn.generate.stream import Stream, begun_stream
from linattn.models import Model, SequenceModel


def generate(
    model: Model | SequenceModel,
    prompt: Prompt | None = None,
    *,
    count: int = 1,
    length: int | None = None,
    seed: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[int] | None = None,
    first_row: int = 0,
    snapshot: Snapshot | None = None,
    cache: bool = True,
    graph: bool | str = "auto",
    impl: str = "auto",
    weights: str = "fp32",
    progress: bool | None = None,
) -> Generated:
    """Sequences from a model: of its own, or continuing prompts.

    Args:
        prompt: what rows begin with: (values,) or (rows, values) integers, bytes, or a list of rows of different
            lengths. An image's is its top part, images[:, :14].flatten(1). None: first values are the model's own.
        count: how many sequences; with a prompt, how many of each (they are neighbours in the result).
        length: values of a complete row, its prompt among them. An image has its own.
        seed: the same seed, model and prompts give the same values. None: one is drawn, as torch.manual_seed decides.
        temperature, top_k, top_p: as in `Head.sample`: None is 1, all values, all of their mass.
        stop: values that end a row, which keeps the one that it has met.
        first_row: the number of the first row. Row r is drawn with the random numbers (seed, r), so a thousand images
            can be made in batches of any size.
        snapshot: go on from there, instead of prompt, count, seed and first_row; other options stay as they were
            unless given.
        cache: False forgets the state and reads the whole prefix for each value (the paper's baseline, and Reformer's).
        graph: True makes a step one CUDA graph, "auto" does so on a GPU where the model's state allows it.
        impl: how steps are made on a CPU: by the "native" library (see `backends()`) or by "torch". "auto" takes the
            native one for the models that it knows, whose numbers are the same to within rounding.
        weights: how the native step reads the model's: "fp32"; "bf16" or "int8" (a scale for each output) are smaller,
            so faster where memory is slow, and change the model a little (docs/performance.md says how much).
        progress: a line on stderr; None: if that is a terminal.

    Ctrl-C ends it after the value at hand and keeps what was made; a second one raises.

    >>> from linattn.models import build, preset
    >>> model = build(preset("text", width=16, num_heads=2, depth=1))
    >>> made = generate(model, [b"Once", b"It was a"], length=20, seed=1, temperature=0.8)
    >>> [bytes(row.tolist())[:4] for row in made.values]
    [b'Once', b'It w']
    >>> longer = generate(model, snapshot=made.snapshot, length=40)
    >>> bool((longer.tensor[:, :20] == made.tensor).all())
    True
    """
    model = generating(model)
    options = (length, seed, temperature, top_k, top_p, stop, first_row, snapshot, cache, graph, impl, weights)
    request = Request(prompt, count, *options)
    with CtrlC() as ctrl_c:
        begin = start(model, request)
        if begin.length is None:
            raise ValueError("length is missing: a language model has no length of its own (stream() needs none)")
        if begin.values is None:
            raise ValueError("this snapshot is a stream's, which keeps no values: go on with stream(model, snapshot=…)")
        run = begun_stream(model, request, begin)
        values, interrupted = _collect(run, begin.values, begin.length, progress, ctrl_c)
    end = run.stands()
    if interrupted and int(end.counts.min()):  # perhaps between a step and the entry of its values
        values.scatter_(1, (end.counts - 1).to(values.device).unsqueeze(1), end.pending.unsqueeze(1))
    return Generated(replace(end, values=values[:, : int(end.counts.max())]), run.finished, interrupted)


@dataclass(frozen=True, eq=False)
class Generated:
    """What was made, and where to go on.

    finished       which rows are complete, or have met a stop value
    interrupted    whether Ctrl-C ended it
    snapshot       to be saved, and passed to `generate` again
    """

    snapshot: Snapshot
    finished: Bool[Tensor, " N"]
    interrupted: bool

    @property
    def values(self) -> list[Tensor]:
        """The values of each row, its prompt and a stop value among them."""
        assert self.snapshot.values is not None
        return [row[:count] for row, count in zip(self.snapshot.values, self.snapshot.counts.tolist(), strict=True)]

    @property
    def made(self) -> list[Tensor]:
        """The values of each row behind its prompt."""
        return [row[count:] for row, count in zip(self.values, self.prompt_lengths.tolist(), strict=True)]

    @property
    def tensor(self) -> Int[Tensor, "N L"]:
        """All rows as one tensor, if they are equally long: `model.to_images(made.tensor)`."""
        counts = self.snapshot.counts
        if (counts != counts[0]).any():
            raise ValueError(f"the rows have {counts.tolist()} values: take the list `values`, or complete them first")
        return torch.stack(self.values)

    @property
    def prompt_lengths(self) -> Int[Tensor, " N"]:
        return self.snapshot.prompts

    @property
    def seed(self) -> int:
        return self.snapshot.seed


def _collect(
    run: Stream, begun: Int[Tensor, "N V"], length: int, progress: bool | None, ctrl_c: CtrlC
) -> tuple[Int[Tensor, "N L"], bool]:
    """All values, and whether it was interrupted."""
    values = F.pad(begun, (0, length - begun.shape[1]))
    place = run.counts.to(values.device)
    bar = Progress(length - int(place.min()), len(place), progress)
    steps = Pace()
    try:
        while not ctrl_c.asked:
            made = run.take(steps.now())
            if not len(made):
                return values, False
            place += _enter(values, place, made)
            bar.step(len(made))
        return values, not bool(run.finished.all())
    except KeyboardInterrupt:
        if ctrl_c.asked:
            raise  # the second one: whoever asks twice does not want to wait for the result either
        _enter(values, place, run.take(0))
        return values, True
    finally:
        bar.close()


def _enter(values: Int[Tensor, "N L"], place: Int[Tensor, " N"], made: Int[Tensor, "S N"]) -> Int[Tensor, " N"]:
    """Write each row's new values behind the `place` that it has; how many they are."""
    real = made.T >= 0
    row, step = real.nonzero(as_tuple=True)
    values[row, place[row] + step] = made.T[real]  # a row that has ended makes no more: its values are the first ones
    return real.sum(1)


class Pace:
    """How many steps a call is to make, so that it takes no longer than a person who presses Ctrl-C likes to wait."""

    CALL = 0.05  # seconds
    MOST = 256

    def __init__(self) -> None:
        self._steps, self._since = 1, time.perf_counter()

    def now(self) -> int:
        now = time.perf_counter()
        spent, self._since = now - self._since, now
        if spent < self.CALL / 2:
            self._steps = min(2 * self._steps, self.MOST)
        elif spent > self.CALL:
            self._steps = max(self._steps // 2, 1)
        return self._steps


class CtrlC:
    """Within the block a first Ctrl-C only asks to stop, a second one raises.

    Only in the main thread, where signals arrive, and only where nobody else handles them.
    """

    asked = False

    def __enter__(self) -> CtrlC:
        in_main = threading.current_thread() is threading.main_thread()
        self._ours = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
