"""Linear attention: transformers trained in parallel and run as recurrent networks whose memory never grows."""

from linattn.features import FEATURE_MAPS, FeatureMap
from linattn.models import ImageModel, LanguageModel, SpeechModel, load
from linattn.nn import Attention, Block, Layer, Stack
from linattn.ops import backends, check, linear_attention
from linattn.state import State

__version__ = "0.1.0"
__all__ = [
    "FEATURE_MAPS",
    "Attention",
    "Block",
    "FeatureMap",
    "ImageModel",
    "LanguageModel",
    "Layer",
    "SpeechModel",
    "Stack",
    "State",
    "backends",
    "check",
    "linear_attention",
    "load",
]
