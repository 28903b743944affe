"""Output heads: features of a model to the probabilities of what comes next.

    features (B T W)  →  params = head(features) (B T P)  →  log_prob, log_probs_all, sample

Heads of one value a token share this form (`Head`); `CTCHead` aligns a whole label sequence instead.
"""

from linattn.nn.heads.base import Head
from linattn.nn.heads.bits import FirstValue, bits_per_dim
from linattn.nn.heads.categorical import Categorical, TokenHead
from linattn.nn.heads.ctc import CTCHead
from linattn.nn.heads.logistics import MixtureOfLogistics

__all__ = ["CTCHead", "Categorical", "FirstValue", "Head", "MixtureOfLogistics", "TokenHead", "bits_per_dim"]
