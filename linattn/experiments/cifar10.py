"""linattn train cifar10
linattn train cifar10 attention=softmax batch=32 accumulate=4

CIFAR-10 as in the paper (Katharopoulos et al. 2020, section 4.2.2): 3,072 bytes, r g b of each pixel in turn, 16
layers, a mixture of ten logistics, RAdam at 2e-4. There it was 500,000 updates of 10 images, for 7 days on one GPU,
and 3.40 bits/dim for linear attention (3.47 for softmax) on the test set. Here it is as many images in larger batches
and in bfloat16, which an accelerator can use better.
"""

from linattn.train.config import Run

RUN = Run(
    preset="cifar10",
    data="cifar10",
    steps=500_000 * 10 // 32,
    batch=32,
    optimizer="radam",
    lr=2e-4,
    schedule="cosine",
    warmup=1_000,
    clip=1.0,
    ema=0.9995,
    precision="bf16",
    log_every=100,
    eval_every=5_000,
    eval_examples=1_000,
    checkpoint_every=1_000,
    sample_every=5_000,
    samples=36,
    keep="best",
)
