"""linattn train mnist                                          # the recipe `paper`
linattn train mnist recipe=best
linattn train mnist attention=softmax minutes=5              # a rival, everything else the same, in as much time

MNIST, 784 bytes in raster order, on an accelerator. The budget is the clock: `minutes` says when the run ends, and the
learning rate comes down to its end by then, whatever the speed, so rivals are compared at equal wall-clock.

paper    the architecture and the loss of Katharopoulos et al. 2020 (section 4.2.1): 8 post-norm layers of width 256,
         sine and cosine beside the value, a mixture of ten logistics, dropout 0.1, RAdam. Theirs ran 250 epochs at
         1e-4; the larger batch with a higher rate, the cosine, averaged weights and bfloat16 products are ours.
best     no more parameters (6,333,184 against 6,359,070) and the same task, from what digits taught
         (docs/decisions.md): pixels know their row and column, norms come first, AdamW; 256-way softmax, since MNIST's
         grey levels are not smooth; four heads of 64, whose sums hold twice as much as eight of 32.

Expected: the paper reports 0.644 bits/dim for linear attention (0.621 for softmax) on the test set. `paper` is to reach
0.644 within 20 minutes of one H200, `best` 0.60. Neither has been run yet; `linattn eval RUN` is the figure.
"""

from dataclasses import replace

from linattn.train.config import Run

PAPER = Run(
    preset="mnist",
    data="mnist",
    minutes=20.0,
    batch=128,
    optimizer="radam",
    lr=5e-4,
    schedule="cosine",
    warmup=500,
    lr_decay=0.02,
    clip=1.0,
    ema=0.9995,
    precision="bf16",
    log_every=50,
    eval_every=500,
    eval_examples=1_000,
    checkpoint_every=1_000,
    sample_every=5_000,
)
BEST = replace(
    PAPER,
    changes={
        "norm_first": True,
        "activation": "gelu",
        "position": "row_column_channel",
        "head": "categorical",
        "num_heads": 4,
        "ff_width": 992,
    },
    minutes=40.0,
    optimizer="adamw",
    lr=1.5e-3,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    lr_decay=0.01,
)
RECIPES = {"paper": PAPER, "best": BEST}
RUN = PAPER
