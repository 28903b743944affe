"""What models are trained on: uint8 images (N, H, W, C), uint8 token sequences (N, T), or one long text as bytes (T,).

    train = load("mnist")                         # or "cifar10", "digits", "copy", "enwik8", a text file, a folder
    steps = batches(train, 64, device="cuda")     # endless; steps.state_dict() is a place to go on from, bit for bit
    for batch in steps: ...                       # batch.data (B, H, W, C) uint8, selected on the device
    for batch in in_order(load("mnist", split="test"), 64): ...     # each example once: evaluation

`streams` reads a text as B parallel streams, for training that carries the state from one batch to the next.
"""

from linattn.train.data.catalogue import load
from linattn.train.data.dataset import Batch, Dataset
from linattn.train.data.loader import batches, in_order, streams

__all__ = ["Batch", "Dataset", "batches", "in_order", "load", "streams"]
