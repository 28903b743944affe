"""What the commands of the benchmark are given to choose from."""

import torch
import typer


def devices(wanted: str) -> list[str]:
    found = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if wanted == "all":
        return found
    if wanted not in found:
        raise typer.BadParameter(f"no device {wanted!r} here: choose 'all' or one of {', '.join(map(repr, found))}")
    return [wanted]
