"""Where generation stands, as a value: what the next values depend on, and how they are drawn.

Nothing else has a memory. The uniform numbers that values are drawn with are a function of (seed, row, place), see
uniforms.py, so the random state is the seed, `rows` and `counts`.

Axes:  N rows   V values of the longest row
"""

from __future__ import annotations

from linattn._typing import Bool, Int, Tensor
from linattn.nn.heads.sampling import check_options
from linattn.state import Value, value


@value
class Sampling(Value):
    """How a value is drawn (as in `Head.sample`), and after which values a row ends."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[int, ...] = ()

    def check(self, num_values: int) -> None:
        check_options(self.temperature, self.top_k, self.top_p)
        wrong = [v for v in self.stop if isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < num_values]
        if wrong:
            raise ValueError(
                f"stop holds {wrong[0]!r}, which the model never makes: its values are 0 … {num_values - 1}"
            )


@value
class Snapshot(Value):
    """A batch of sequences, half made. Save it, load it in another process, take rows of it with `select`, go on.

    counts     values of each row so far, those of the prompt among them; the state has read all but the last
    prompts    how many of them were given
    stopped    whether a row has met a stop value: it has then ended, and its state means nothing
    rows       the number of each row, which chooses its stream of random numbers
    pending    the last value of each row
    values     all values, rows padded at their ends; None for a stream, which forgets what it has handed out
    length     the values of a complete row, None for an endless stream
    """

    counts: Int[Tensor, " N"]
    prompts: Int[Tensor, " N"]
    stopped: Bool[Tensor, " N"]
    rows: Int[Tensor, " N"]
    pending: Int[Tensor, " N"]
    values: Int[Tensor, "N V"] | None
    state: Value
    seed: int
    length: int | None
    sampling: Sampling
