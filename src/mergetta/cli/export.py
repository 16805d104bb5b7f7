"""`mergetta export`: a torch family → the ONNX files of a weak device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console

from mergetta.cli.options import Checkpoint, Family

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
ENOUGH = 512
"""Images to measure on."""


class Int8(StrEnum):
    dynamic = "dynamic"
    static = "static"


def command(
    out: Annotated[Path, typer.Option(dir_okay=False, help="The ONNX file to write; the plain graph goes beside it.")],
    family: Family = "fashion-bn",
    checkpoint: Checkpoint = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Height and width of the images (default: the family's).")
    ] = None,
    int8: Annotated[
        Int8 | None, typer.Option(help="`dynamic`: weights of matrix products (ViT); `static`: convolutions too (CNN).")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Clean images: FILE.npz, a folder, or `fashion`; 512 are enough. `--int8 static` needs them, and "
            "transformers gain from them in `run`."
        ),
    ] = None,
) -> None:
    """Export a model with adjustable norm layers: one file for plain inference and for adaptation.

    Beside it stands a plain graph (`model.plain.onnx`) for a device that has settled, which costs there what a model
    costs that was never adjustable. An int8 model has none.

    Example: `mergetta export --family fashion-vit --int8 dynamic --out fashion-vit-int8.onnx`
    """
    from mergetta.adapters.forward_only.source_features import measure_source
    from mergetta.errors import MergettaError
    from mergetta.files import write_atomically
    from mergetta.models.family import load_family
    from mergetta.runtimes.export import set_metadata, to_onnx, to_plain_onnx, write_models
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    if int8 is Int8.static and calibration is None:
        raise MergettaError("`--int8 static` measures ranges on images: give some with --calibration.")
    console = Console()
    source = load_family(family, checkpoint)
    images = clean_images(calibration, len(source.preprocessing.mean), size or source.preprocessing.size)
    with console.status(f"exporting {family}"):
        model = to_onnx(source, size)
        plain = None if int8 else to_plain_onnx(source, size)
        if int8 is Int8.dynamic:
            model = quantize_dynamic(model)
        elif int8 is Int8.static and images is not None:
            model = quantize_static(model, batches(images))
    if images is not None:
        measured = measure_source(OnnxRuntime(model.SerializeToString()), batches(images))
        set_metadata(model, features=[values.tolist() for values in measured])
    if plain is None:
        write_atomically(out, model.SerializeToString())
    else:
        write_models(out, model, plain)
    console.print(f"{out}: {source.fingerprint}, {out.stat().st_size:,} bytes{f', int8 {int8}' if int8 else ''}")


def clean_images(source: str | None, channels: int, size: int | None) -> np.ndarray | None:
    """Evenly spaced ones: files are often sorted by class."""
    import numpy as np

    from mergetta.data.images import image_files, load_images, read_image
    from mergetta.errors import MergettaError

    if source is None:
        return None
    if Path(source).is_dir():
        images = [read_image(file, channels, size) for file in evenly(image_files(Path(source)))]
        if len({image.shape for image in images}) > 1:
            raise MergettaError(f"The images in {source} have different sizes: say which with --size.")
        return np.stack(images)
    loaded = load_images(source, channels, size)
    return loaded[evenly(range(len(loaded)))]


def evenly(things: Sequence[T]) -> list[T]:
    count = min(len(things), ENOUGH)
    return [things[i * len(things) // count] for i in range(count)]


def batches(images: np.ndarray) -> Iterator[np.ndarray]:
    from mergetta.data.streams import as_input

    return (as_input(images[i : i + 64]) for i in range(0, len(images), 64))
