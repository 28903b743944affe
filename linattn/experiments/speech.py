"""linattn train speech                                   # speechocean762, found in LINATTN_DATA or data_dir=
linattn train speech data=recordings                   # your own: NAME.wav with its transcript in NAME.txt
linattn train speech data=recordings units=characters minutes=60

A recogniser that transcribes as the sound arrives, in constant memory: causal linear attention over 40 ms tokens, CTC
over phonemes (where there is a lexicon) or characters. Small enough for two CPU cores; what a short run of it reaches
there is in docs/speech.md. The paper's experiment and its rivals are a grid of their own: `linattn bench speech`.
"""

from linattn.train.config import Run

RUN = Run(
    preset="transcriber",
    data="speechocean762",
    data_options={"speeds": (0.9, 1.0, 1.1), "batch_frames": 16_000},
    steps=10_000,
    batch=64,
    optimizer="adamw",
    lr=2e-3,
    betas=(0.9, 0.98),
    weight_decay=0.05,
    schedule="cosine",
    warmup=200,
    lr_decay=0.02,
    clip=1.0,
    ema=0.995,
    log_every=20,
    eval_every=200,
    checkpoint_every=100,
    keep="best",
)
