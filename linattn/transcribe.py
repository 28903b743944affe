"""Sound to text with a trained recogniser: a whole file, or a stream as it arrives.

    model = load("runs/speech-1")
    transcribe(model, "question.wav").text
    for text in stream(model, pieces, rate=16_000):      # pieces: an iterator of samples, of any sizes
        print(text, end="")

A causal model remembers a state of fixed size and some milliseconds of sound, however long the stream. What it says
does not depend on how the sound was cut, and is what it says of the whole.

Axes:  N samples   T frames   U frames after subsampling   P labels and the blank
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from linattn._typing import Float, Tensor
from linattn.audio import BadSound, FrontEnd, chunks, read
from linattn.audio.sound import Source, check_samples
from linattn.generate.native import SpeechStep, why_not
from linattn.models import SpeechModel
from linattn.models.speech import AnyState
from linattn.nn.heads.beam import beam_search
from linattn.nn.heads.ctc import BLANK

PIECE = 10.0  # seconds of a file at a time
FEW = 20  # frames after subsampling: of more, torch's products of matrices are faster (docs/speech.md)
IMPLS = ("auto", "native", "torch")


class Transcript(NamedTuple):
    """What was heard: as text, and as numbers of labels; and how long it took to say."""

    text: str
    labels: list[int]
    seconds: float


class Transcriber:
    """One stream of sound. `push` takes the next samples and returns the text that they complete."""

    def __init__(self, model: SpeechModel, *, rate: int | None = None, impl: str = "auto"):
        """rate: of the samples to come, None: that of the model's front end.

        impl: how a few frames are read on a CPU: by the "native" library (see `backends()`) or by "torch". "auto" takes
        the native one for the models that it knows, and `why_torch` says what is in the way of others. It reads the
        weights as they are at the first piece.
        """
        front = front_of(model)
        if not model.config.layer.causal:
            raise ValueError(
                "this model reads whole utterances (causal=False) and cannot stream: use transcribe(model, file), or "
                "train one with causal=true"
            )
        self.model, self.rate = model.eval(), front.rate if rate is None else rate
        self.front = front.stream(self.rate)
        self.state = model.empty_state(1)
        self.why_torch = _why_torch(model, impl)
        self._step: SpeechStep | None = None
        self.labels: list[int] = []  # of what `text` has not yet taken
        self.path_end = BLANK  # the last frame's label, which the next may repeat
        self.samples, self.said_something, self.loudest = 0, False, 0.0

    @property
    def seconds(self) -> float:
        """Of sound so far."""
        return self.samples / self.rate

    @property
    def nbytes(self) -> int:
        """What is remembered: the model's state, and the sound and statistics of the front end."""
        kept = [self.front.bank.kept]
        kept += [] if self.front.resampler is None else [self.front.resampler.kept]
        kept += [] if self.front.running is None else [self.front.running.moments]
        return self.state.nbytes + sum(x.numel() * x.element_size() for x in kept)

    def push(self, samples: Float[Tensor, " N"]) -> str:
        """The text that these samples complete, "" where they complete none."""
        self.hear(samples)
        return self.text()

    def finish(self) -> str:
        """The end of the stream: the text that was still held back."""
        self.end()
        return self.text()

    def end(self) -> None:
        """No more sound comes. What was held back waits in `labels`."""
        self._read(self.front.finish())

    def hear(self, samples: Float[Tensor, " N"]) -> None:
        """The next samples. What they say waits in `labels`."""
        if len(samples):
            loudest = float(samples.abs().max())
            if not loudest < float("inf"):
                raise BadSound(f"the stream holds samples that are no finite numbers, after {self.seconds:.2f} s")
            self.loudest = max(self.loudest, loudest)
        self.samples += len(samples)
        self._read(self.front.push(samples))

    def text(self) -> str:
        """The labels that wait, as text; then none wait."""
        text = self.model.text(self.labels)
        if text and self.said_something:
            text = self.model.separator + text
        self.said_something = self.said_something or bool(text)
        self.labels = []
        return text

    @torch.no_grad()
    def _read(self, frames: Float[Tensor, "T F"]) -> None:
        if not len(frames):
            return
        log_probs, self.state = self._heard(frames[None])
        for label in log_probs[0].argmax(-1).tolist():
            if label not in (BLANK, self.path_end):
                self.labels.append(label)
            self.path_end = label

    def _heard(self, frames: Float[Tensor, "1 T F"]) -> tuple[Float[Tensor, "1 U P"], AnyState]:
        if self.why_torch is None and frames.shape[1] <= FEW * self.model.config.subsample:
            self._step = self._step or SpeechStep(self.model)
            return self._step(frames, self.state)
        log_probs, state = self.model(frames.to(self.model.device), self.state, donate=True)
        assert state is not None
        return log_probs, state


def _why_torch(model: SpeechModel, impl: str) -> str | None:
    """Why torch reads every frame; None: a few at a time are read natively."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, got {impl!r}")
    reason = "impl='torch' was asked for" if impl == "torch" else why_not(model)
    if reason is not None and impl == "native":
        raise ValueError(f"impl='native' cannot run here: {reason}. Pass impl='auto' or impl='torch'")
    return reason


def stream(model: SpeechModel, pieces: Iterable[Tensor], *, rate: int | None = None) -> Iterator[str]:
    """The text of a stream of samples, as it comes: joined together it is the whole transcript."""
    heard = Transcriber(model, rate=rate)
    for piece in pieces:
        if text := heard.push(piece):
            yield text
    if text := heard.finish():
        yield text


def transcribe(
    model: SpeechModel,
    source: Source | Tensor,
    *,
    rate: int | None = None,
    beam: int = 0,
    max_seconds: float | None = None,
) -> Transcript:
    """A sound file (its path, or its bytes), or samples (N,) at `rate`, None: that of the model's front end.

    beam: label sequences that are followed, instead of the best path. Without one a causal model reads a file of any
    length piece by piece. A sound that cannot be used raises BadSound.
    """
    front = front_of(model)
    if isinstance(source, torch.Tensor):
        check_samples(source)
        return _whole(model, source, front.rate if rate is None else rate, beam)
    if rate is not None:
        raise ValueError(f"a file says itself at which rate it was sampled, got rate={rate}: leave it out")
    if model.config.layer.causal and not beam and max_seconds is None:
        return _in_pieces(model, source)
    sound = read(source, max_seconds=max_seconds)
    return _whole(model, sound.samples, sound.rate, beam)


def front_of(model: SpeechModel) -> FrontEnd:
    if model.config.front is None:
        raise ValueError("this model does not say how sound becomes its frames (its config has no front)")
    return model.config.front


def _in_pieces(model: SpeechModel, source: Source) -> Transcript:
    rate, pieces = chunks(source, PIECE)
    heard = Transcriber(model, rate=rate)
    for piece in pieces:
        heard.hear(piece)
    heard.end()
    name = "the sound" if isinstance(source, bytes) else str(source)
    check_samples(torch.full((min(heard.samples, 1),), heard.loudest), name)
    return Transcript(model.text(heard.labels), heard.labels, heard.seconds)


@torch.no_grad()
def _whole(model: SpeechModel, samples: Float[Tensor, " N"], rate: int, beam: int) -> Transcript:
    frames = front_of(model).whole(samples, rate)
    log_probs, _ = model.eval()(frames[None].to(model.device))
    labels = beam_search(log_probs[0], width=beam)[0].labels if beam else model.head.decode(log_probs)[0]
    return Transcript(model.text(labels), labels, len(samples) / rate)
