"""linattn train copy_task
linattn train copy_task attention=softmax      # or attention=reformer rounds=4

Can attention address sharply? A word of random symbols, a separator, and the same word again (Katharopoulos et al.
2020, section 4.1): length 128, 10 symbols, batch 64, RAdam at 1e-3 and after 3,000 updates at 1e-4. The loss is that
of the second word, which is known exactly: 0 bits is perfect, and log₂ 10 = 3.32 is what guessing among ten symbols
costs.
"""

from linattn.train.config import Run

RUN = Run(
    preset="copy",
    data="copy",
    data_options={"length": 128, "symbols": 10},
    steps=10_000,
    batch=64,
    optimizer="radam",
    lr=1e-3,
    weight_decay=0.0,
    schedule="step",
    drops=(3_000,),
    lr_decay=0.1,
    log_every=20,
    eval_every=500,
    eval_examples=640,
)
