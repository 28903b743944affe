"""Pure functions of tensors: the operator, its implementations, and its rivals under the same call."""

from linattn.ops.attention import backends, check, linear_attention
from linattn.ops.step import Step

__all__ = ["Step", "backends", "check", "linear_attention"]
