"""Whole sequences: `generate`, what it returns, and how it is interrupted.

Axes:  N rows   L values of a complete row
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from linattn._typing import Bool, Int, Tensor
from linattn.generate.progress import Progress
from linattn.generate.prompts import Prompt
from linattn.generate.request import Request, generating, start, wants_graph
from linattn.generate.snapshot import Snapshot
from linattn.generate.stream import Stream
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
    request = Request(prompt, count, length, seed, temperature, top_k, top_p, stop, first_row, snapshot, cache, graph)
    with CtrlC() as ctrl_c:
        begin = start(model, request)
        if begin.length is None:
            raise ValueError("length is missing: a language model has no length of its own (stream() needs none)")
        if begin.values is None:
            raise ValueError("this snapshot is a stream's, which keeps no values: go on with stream(model, snapshot=…)")
        run = Stream(model, begin, wants_graph(model, request) and graph)
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
    place = run.counts.to(values.device).unsqueeze(1)
    bar = Progress(length - int(place.min()), len(place), progress)
    try:
        while not ctrl_c.asked:
            step = next(run, None)
            if step is None:
                return values, False
            entered, here = step.unsqueeze(1), place.clamp_max(length - 1)
            values.scatter_(1, here, torch.where(entered < 0, values.gather(1, here), entered))
            place += entered >= 0
            bar.step()
        return values, not bool(run.finished.all())
    except KeyboardInterrupt:
        if ctrl_c.asked:
            raise  # the second one: whoever asks twice does not want to wait for the result either
        return values, True
    finally:
        bar.close()


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
