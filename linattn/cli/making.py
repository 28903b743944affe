"""`linattn generate` and `linattn complete`: new images and text from a trained model, streamed as they come."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from linattn.cli.sampling import BYTES, image_file, load_model, text_prompt
from linattn.cli.show import complain, say, show_sheet
from linattn.generate import generate as run_generation
from linattn.generate import stream
from linattn.models import ImageModel, LanguageModel
from linattn.state import write_atomically
from linattn.train.data import load as load_data
from linattn.train.painting import gif as gif_of
from linattn.train.painting import painted
from linattn.train.painting import strip as strip_of
from linattn.train.run_folder import writing
from linattn.train.sheets import write_png

Weights = Annotated[str, typer.Argument(help="A run's folder, a weights file, or the name of a shipped model.")]
Count = Annotated[int, typer.Option(help="How many.")]
Out = Annotated[Path, typer.Option(help="Where the PNG goes.")]
Seed = Annotated[int | None, typer.Option(help="The same seed makes the same bytes; default: a new one.")]
Temperature = Annotated[float, typer.Option(help="Below 1 safer, above 1 bolder, 0 always the likeliest.")]
TopK = Annotated[int | None, typer.Option(help="Only among the k likeliest values.")]
TopP = Annotated[float | None, typer.Option(help="Only among the likeliest values that hold this probability.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Impl = Annotated[str, typer.Option(help="Steps on the CPU: auto, native (the compiled library) or torch.")]
Gif = Annotated[bool, typer.Option("--gif", help="Also a GIF of the painting, beside the PNG.")]
Strip = Annotated[bool, typer.Option("--strip", help="Also a strip: a few images at eight stages, as NAME-strip.png.")]
Narrow = Annotated[str, typer.Option("--weights", help="As the native step reads them: fp32, bf16 or int8 (faster).")]


def generate(
    weights: Weights,
    count: Annotated[int | None, typer.Option(help="How many images. Default: 16. (Text is one stream.)")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from.")] = None,
    length: Annotated[int | None, typer.Option(help="Bytes of text to make (images have their own length).")] = None,
    out: Out = Path("out/generated.png"),
    gif: Gif = False,
    strip: Strip = False,
    seed: Seed = None,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    device: Device = "auto",
    impl: Impl = "auto",
    narrow: Narrow = "fp32",
) -> None:
    """Make images or text.

    Images become one sheet, a PNG; text is printed as it comes.

        linattn generate digits --count 64 --gif
        linattn generate runs/digits-1 --count 64
        linattn generate runs/text-1 --prompt "ROMEO:" --length 500 --temperature 0.8

    Ctrl-C keeps what was made.
    """
    model = load_model(weights, device)
    options = {"seed": seed, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"impl": impl, "weights": narrow}
    if isinstance(model, ImageModel):
        if prompt is not None or length is not None:
            raise ValueError(f"{weights} makes images: --prompt and --length are for text (see `linattn complete`)")
        images = _made_images(model, None, 16 if count is None else count, options)
        show_sheet(images, out)
        _show_painting(images, out, gif, strip)
    elif isinstance(model, LanguageModel):
        if count is not None or gif or strip:
            raise ValueError(f"{weights} makes text, one stream of it: --count, --gif and --strip are for images")
        _stream_text(model, prompt, 400 if length is None else length, options)
    else:
        raise ValueError(f"{weights} holds a model of kind {type(model).__name__}, which generates nothing")


def complete(
    weights: Weights,
    image: Annotated[Path | None, typer.Option(help="A picture; its top part is kept.")] = None,
    data: Annotated[str | None, typer.Option(help="Or take test images of this dataset, such as digits.")] = None,
    index: Annotated[str, typer.Option(help="Which test images, with commas between them.")] = "0",
    rows: Annotated[int | None, typer.Option(help="Rows that are kept. Default: the upper half.")] = None,
    count: Count = 7,
    out: Out = Path("out/completed.png"),
    gif: Gif = False,
    strip: Strip = False,
    seed: Seed = None,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = None,
    device: Device = "auto",
    impl: Impl = "auto",
    narrow: Narrow = "fp32",
) -> None:
    """Give the top part of an image, get several completions.

    A row of the sheet begins with what was given and ends with the image itself.

        linattn complete digits --data digits --index 3,5,8
        linattn complete runs/digits-1 --data digits --index 3
        linattn complete runs/mnist-1 --image seven.png --rows 14 --count 7

    A picture of any size is scaled to the model's.
    """
    model = load_model(weights, device)
    if not isinstance(model, ImageModel):
        raise ValueError(f"{weights} holds a model of kind {type(model).__name__}: only image models complete images")
    if (image is None) == (data is None):
        raise ValueError("give one of --image FILE and --data NAME (a dataset, whose test images --index are taken)")
    wholes = image_file(image, model)[None] if image is not None else _test_images(str(data), index, model)
    height, width, channels = model.config.shape
    rows = height // 2 if rows is None else rows
    if not 1 <= rows < height:
        raise ValueError(f"--rows must lie between 1 and {height - 1} for images {height} high, got {rows}")
    options = {"seed": seed, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    options |= {"impl": impl, "weights": narrow}
    given = rows * width * channels
    made = _made_images(model, wholes[:, :given], count, options)
    originals = model.to_images(wholes)
    sheet_rows = torch.stack([painted(originals, given), *made.unflatten(0, (-1, count)).unbind(1), originals], 1)
    show_sheet(sheet_rows.flatten(0, 1), out, columns=count + 2)
    _show_painting(made, out, gif, strip, given)


def _made_images(model: ImageModel, prompts: torch.Tensor | None, count: int, options: dict) -> torch.Tensor:
    """New images (N, H, W, C), `count` of each prompt; what an interruption left of them."""
    made = run_generation(model, prompts, count=count, **options)
    length = model.config.length
    rows = [torch.nn.functional.pad(row.cpu(), (0, length - len(row))) for row in made.values]
    if made.interrupted:
        complain("interrupted: the sheet holds what was made until then")
    return model.to_images(torch.stack(rows))


def _show_painting(images: torch.Tensor, out: Path, as_gif: bool, as_strip: bool, begin: int = 0) -> None:
    made = []
    with writing(out):
        if as_gif:
            made.append(out.with_suffix(".gif"))
            write_atomically(made[-1], gif_of(images, begin))
        if as_strip:
            made.append(write_png(out.with_name(f"{out.stem}-strip.png"), strip_of(images[:4], begin)))
    for path in made:
        say(f"wrote {path}")


def _stream_text(model: LanguageModel, prompt: str | None, length: int, options: dict) -> None:
    given = text_prompt(prompt, model) if prompt else None
    sys.stdout.write(prompt or "")
    pending, whole = b"", length + (0 if given is None else len(given))
    try:
        for tokens in stream(model, given, length=whole, **options):
            if model.config.vocabulary != BYTES:
                text = f"{int(tokens[0])} "
            else:
                text, pending = _decoded(pending + bytes([int(tokens[0])]))
            sys.stdout.write(text)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")


def _decoded(data: bytes) -> tuple[str, bytes]:
    """The characters that these bytes are, and those that may be the beginning of one."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data" and len(data) < 4:
            return "", data
        return data.decode(errors="replace"), b""


def _test_images(data: str, index: str, model: ImageModel) -> torch.Tensor:
    """Test images as values (N, L), in the order of `index`."""
    images = load_data(data, split="test").data
    if tuple(images.shape[1:]) != tuple(model.config.shape):
        raise ValueError(f"images of {data} are {tuple(images.shape[1:])}, this model makes {model.config.shape}")
    chosen = [int(part) if part.strip().isdigit() else -1 for part in index.split(",")]
    if not all(0 <= i < len(images) for i in chosen):
        raise ValueError(
            f"--index must lie between 0 and {len(images) - 1} for the test images of {data}, as in 3 or 3,5,8; "
            f"got {index}"
        )
    return images[chosen].flatten(1).long()


def register(app: typer.Typer) -> None:
    app.command()(generate)
    app.command()(complete)
