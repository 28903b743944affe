"""linattn train folder data=photos
linattn train folder data=photos size=64 minutes=600 batch=8

A folder of your own images, in any format that pillow reads: cropped to the centre square and scaled to size × size.
The learning rate follows the clock, so a run of any length comes to its end: minutes says how long it may take. Fewer
than some hundred images are learnt by heart; the evaluation shows it, and the best weights are the ones that are
kept.
"""

from linattn.train.config import Run

RUN = Run(
    preset="cifar10",
    changes={
        "depth": 6,
        "norm_first": True,
        "activation": "gelu",
        "position": "row_column_channel",
    },
    data="photos",
    data_options={"size": 32},
    minutes=120.0,
    batch=16,
    optimizer="adamw",
    lr=5e-4,
    betas=(0.9, 0.95),
    weight_decay=0.1,
    schedule="cosine",
    warmup=100,
    ema=0.995,
    log_every=20,
    eval_every=250,
    eval_examples=200,
    checkpoint_every=100,
    sample_every=500,
    samples=16,
    keep="best",
)
