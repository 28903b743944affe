"""linattn train digits

Handwritten digits of 8 × 8 pixels, one pixel after the other: the whole way from data to pictures, on a laptop,
without a download. The data ships with the package: 1,397 images to learn from, by other writers than those it is
judged on.
"""

from linattn.train.config import Run

RUN = Run(
    preset="digits",
    data="digits",
    steps=700,
)
