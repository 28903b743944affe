"""Generation: read a prompt in parallel, then one value after the other, from a state that a linear model never grows.

    x_{t+1} ~ p(· | x_1 … x_t)          params, state = model(x_t, state)

`generate` returns whole sequences, `stream` gives values as they come; both can be stopped anywhere and resumed from a
`Snapshot`. All of it knows models and their states as values, not what kind of attention is inside.
"""

from linattn.generate.run import Generated, generate
from linattn.generate.snapshot import Sampling, Snapshot
from linattn.generate.stream import Stream, stream

__all__ = ["Generated", "Sampling", "Snapshot", "Stream", "generate", "stream"]
