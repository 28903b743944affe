"""linattn train text                             # Shakespeare's plays, 1.1 MB, downloaded where missing
linattn train text data=notes.txt              # any file, as bytes: .txt, .xz, .gz, .zip
linattn train text data=notes.txt stateful=true

A language model of bytes: no tokeniser, any language, any format. With stateful=true the text is read in order, and
each window goes on from the state that the one before left: what the model remembers is then longer than the window.

A short convolution before attention (conv=0: without) tells each byte its neighbours, which linear attention alone is
slow to learn: docs/decisions.md has the runs beside each other.
"""

from linattn.train.config import Run

RUN = Run(
    preset="text",
    changes={"conv": 4},
    data="tinyshakespeare",
    steps=2_000,
    batch=32,
    window=256,
    optimizer="adamw",
    lr=2e-3,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    schedule="cosine",
    warmup=100,
    ema=0.99,
    log_every=20,
    eval_every=250,
    eval_examples=100,
    checkpoint_every=250,
    keep="best",
)
