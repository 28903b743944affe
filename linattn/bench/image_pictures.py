"""The pictures of docs/results.md: sheets, completions and strips by the models that ship, and the curves of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from linattn.bench.image_record import ImageRun
from linattn.generate import generate
from linattn.models import ImageModel, load, shipped
from linattn.train.data import load as load_data
from linattn.train.painting import painted, strip
from linattn.train.sheets import write_png, write_sheet

SHEETS = {"digits": 64, "mnist": 64, "cifar10": 36}  # images on the sheet of each model
COMPLETED = {"digits": (3, 8, 15, 42), "mnist": (0, 1, 2, 3, 4), "cifar10": (0, 1, 2, 3, 4)}  # test images
COMPLETIONS, STRIPS, SEED = 7, 3, 1
COLOURS = {"linear": "#0b7285", "softmax": "#d9480f", "LSH-1": "#868e96", "LSH-4": "#343a40"}


def paint(folder: Path) -> list[tuple[str, Path]]:
    """A sheet, completions and strips of each model that ships: (heading, file)."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in [name for name in SHEETS if name in shipped()]:
        model = load(name)
        assert isinstance(model, ImageModel)
        images = model.to_images(generate(model, count=SHEETS[name], seed=SEED, progress=False).tensor)
        made.append((f"{name}, unconditional", write_sheet(folder / f"{name}.png", images)))
        made.append((f"{name}, being painted", write_png(folder / f"{name}-strip.png", strip(images[:STRIPS]))))
        try:
            test = load_data(name, split="test", download=False).data[list(COMPLETED[name])]
        except ValueError:  # the data is not on this machine: the picture stays as it was
            continue
        made.append(
            (f"{name}, completed from the upper half", completions(model, test, folder / f"{name}-completed.png"))
        )
    return made


def completions(model: ImageModel, wholes: torch.Tensor, path: Path) -> Path:
    """As in the paper: what is given, completions, the image itself."""
    given = model.config.length // 2
    made = generate(model, model.sequences(wholes)[:, :given], count=COMPLETIONS, seed=SEED, progress=False)
    rows = [painted(wholes, given), *model.to_images(made.tensor).unflatten(0, (-1, COMPLETIONS)).unbind(1), wholes]
    return write_sheet(path, torch.stack(rows, 1).flatten(0, 1), columns=COMPLETIONS + 2)


def draw_curves(runs: Sequence[ImageRun], folder: Path) -> list[tuple[str, Path]]:
    """Bits/dim on held-out images over time and over epochs, a figure for each data set that has runs."""
    made = []
    for data in sorted({run.data for run in runs if run.curve}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.2), facecolor="white")
        for axes, place, label in zip(figure.subplots(1, 2), (0, 1), ("minutes", "epochs"), strict=True):
            for run in runs:
                if run.data == data:
                    x = [point[place] / (60 if place == 0 else 1) for point in run.curve]
                    name = f"{run.method}, {run.name}" + (f", {run.minutes:g} min" if run.minutes else "")
                    colour = COLOURS.get(run.method)
                    axes.plot(x, [point[2] for point in run.curve], label=name, color=colour)
            axes.set_xlabel(label)
            axes.set_ylabel("bits/dim, held out")
            axes.set_xscale("log")
            axes.grid(True, color="#e9ecef")
        figure.axes[1].legend(fontsize=8)
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{data}-curves.png"
        figure.savefig(path, dpi=130)
        made.append((f"{data}, training", path))
    return made
