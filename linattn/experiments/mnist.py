"""linattn train mnist
linattn train mnist attention=softmax          # the rival, everything else the same

MNIST as in the paper (Katharopoulos et al. 2020, section 4.2.1): 784 bytes, 8 layers, a mixture of ten logistics,
RAdam at 1e-4, 250 epochs. The batch and the clip are ours, and so is bfloat16: an accelerator is assumed. The paper
reports 0.644 bits/dim for linear attention and 0.621 for softmax, on the test set; `linattn eval` measures it there.
"""

from linattn.train.config import Run

RUN = Run(
    preset="mnist",
    data="mnist",
    steps=250 * 55_000 // 64,
    batch=64,
    optimizer="radam",
    lr=1e-4,
    schedule="constant",
    clip=1.0,
    ema=0.9995,
    precision="bf16",
    log_every=100,
    eval_every=5_000,
    checkpoint_every=1_000,
    sample_every=5_000,
    keep="best",
)
