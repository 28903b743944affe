"""Sound: reading it, other rates, features for recognisers; whole or as it arrives. Knows no models."""

from linattn.audio.augment import SpecAugment
from linattn.audio.fbank import fbank
from linattn.audio.front import FrontEnd, FrontStream
from linattn.audio.resample import Resampler, at_speed, resample
from linattn.audio.sound import BadSound, Sound, chunks, from_pcm, read, read_all

__all__ = [
    "BadSound",
    "FrontEnd",
    "FrontStream",
    "Resampler",
    "Sound",
    "SpecAugment",
    "at_speed",
    "chunks",
    "fbank",
    "from_pcm",
    "read",
    "read_all",
    "resample",
]
