"""Training: a run as plain values, one loop for all models, checkpoints to go on from.

run = override(load_run("digits"), ["steps=200"])
result = train(run)                                      # Result(folder=runs/digits-1, …)
"""

from linattn.train.config import Run, override
from linattn.train.evaluate import evaluate, training_data
from linattn.train.loop import Result, train
from linattn.train.run_folder import load_run
from linattn.train.trainer import Sample

__all__ = ["Result", "Run", "Sample", "evaluate", "load_run", "override", "train", "training_data"]
