"""The experiments on speech, as data: which recognisers are compared, each as what `linattn train speech` is told.

core     the paper's four (Katharopoulos et al. 2020, table 3), three seeds: 9 layers, 6 heads, no subsampling
gap      what may bring linear attention to softmax's error rate, at nearly equal parameters, one seed
speed    seconds of an epoch where sequences are long: utterances joined to 2,400 frames
stream   recognisers that transcribe as the sound arrives
"""

from __future__ import annotations

from dataclasses import dataclass

# What the paper measured on WSJ, which is licensed: error rate of phonemes on its validation set, seconds an epoch.
PAPER = {"lstm": (10.94, 1047), "softmax": (5.12, 2711), "reformer": (9.33, 2250), "linear": (8.08, 824)}

OFFLINE = (
    "preset=speech",
    "scaling=utterance",
    "speeds=0.9,1.0,1.1",
    "batch=128",
    "batch_frames=40000",
    "steps=8000",
    "warmup=500",
    "lr=1e-3",
    "precision=bf16",
    "eval_every=250",
    "checkpoint_every=500",
)
LONG = (*OFFLINE, "join=2400", "speeds=1.0", "augment=false", "steps=150", "warmup=10", "eval_every=0")
STREAM = (
    "batch=128",
    "batch_frames=60000",
    "steps=10000",
    "precision=bf16",
    "width=256",
    "num_heads=8",
    "depth=12",
    "eval_every=250",
)


@dataclass(frozen=True)
class Case:
    """One recogniser: its group, its name, what it is told beyond the group's settings, and how many seeds."""

    group: str
    name: str
    settings: tuple[str, ...]
    seeds: int = 1

    @property
    def told(self) -> tuple[str, ...]:
        return ({"speed": LONG, "stream": STREAM}.get(self.group, OFFLINE)) + self.settings


def hybrid(softmax: set[int], depth: int) -> str:
    """attentions= with softmax in some of the layers, linear in the others."""
    return "attentions=" + ",".join("softmax" if i in softmax else "linear" for i in range(depth))


LSTM = ("body=lstm", "depth=3", "width=320", "num_heads=10", "position=none", "precision=fp32")
REFORMER = ("attention=reformer", "rounds=4")
MAPS = ("relu", "squared_relu", "softplus", "exp", "softmax", "dpfp", "taylor", "hedgehog", "learned_elu")
NEEDS_WIDTH = {"taylor": ("head_width=16",)}  # its features are as many as the square of the width

CASES = (
    Case("core", "lstm", LSTM, seeds=3),
    Case("core", "softmax", ("attention=softmax",), seeds=3),
    Case("core", "reformer", REFORMER, seeds=3),
    Case("core", "linear", (), seeds=3),
    *(Case("gap", f"map-{name}", (f"feature_map={name}", *NEEDS_WIDTH.get(name, ()))) for name in MAPS),
    Case("gap", "causal", ("causal=true", "scaling=running")),
    Case("gap", "conv-4", ("conv=4",)),
    Case("gap", "conv-9", ("conv=9",)),
    Case("gap", "softmax-conv-9", ("attention=softmax", "conv=9")),
    Case("gap", "pre-norm", ("norm_first=true", "activation=gelu")),
    Case("gap", "position-none", ("position=none",)),
    Case("gap", "rotary-before", ("position=none", "rotary=before")),
    Case("gap", "rotary-after", ("position=none", "rotary=after")),
    Case("gap", "softmax-rotary", ("attention=softmax", "position=none", "rotary=before")),
    Case("gap", "softmax-pre-norm", ("attention=softmax", "norm_first=true", "activation=gelu")),
    Case("gap", "subsample-2", ("subsample=2",)),
    Case("gap", "subsample-4", ("subsample=4",)),
    Case("gap", "softmax-subsample-4", ("attention=softmax", "subsample=4")),
    Case("gap", "80-bins", ("bins=80",)),
    Case("gap", "hybrid-last", (hybrid({8}, 9),)),
    Case("gap", "hybrid-middle", (hybrid({4}, 9),)),
    Case("gap", "hybrid-thirds", (hybrid({2, 5, 8}, 9),)),
    Case("speed", "softmax", ("attention=softmax",)),
    Case("speed", "linear", ()),
    Case("speed", "reformer", REFORMER),
    Case("speed", "lstm", LSTM),
    Case("stream", "linear", ()),
    Case("stream", "linear-subsample-2", ("subsample=2",)),
    Case("stream", "linear-conv-4", ("conv=4",)),
    Case("stream", "softmax", ("attention=softmax",)),
    Case("stream", "lstm", ("body=lstm", "depth=4", "width=512", "precision=fp32")),
)


def chosen(only: str) -> list[Case]:
    """The cases of a group, or with a name; "all" for every one."""
    found = [case for case in CASES if only in ("all", case.group, case.name, f"{case.group}/{case.name}")]
    if not found:
        groups = ", ".join(dict.fromkeys(case.group for case in CASES))
        raise ValueError(
            f"no experiment {only!r}: choose all, a group ({groups}) or one of "
            + ", ".join(f"{case.group}/{case.name}" for case in CASES)
        )
    return found
