"""Whole models: what goes in and comes out, their sizes as frozen configs, and their files."""

from linattn.models.base import SequenceModel
from linattn.models.files import Model, build, load, save, shipped
from linattn.models.image import ImageConfig, ImageModel
from linattn.models.lm import LanguageConfig, LanguageModel
from linattn.models.presets import PRESETS, Config, preset
from linattn.models.speech import SpeechConfig, SpeechModel

__all__ = [
    "PRESETS",
    "Config",
    "ImageConfig",
    "ImageModel",
    "LanguageConfig",
    "LanguageModel",
    "Model",
    "SequenceModel",
    "SpeechConfig",
    "SpeechModel",
    "build",
    "load",
    "preset",
    "save",
    "shipped",
]
