"""`mergetta export`: a torch family → the ONNX files of a weak device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from mergetta.cli.options import Checkpoint, Family
from mergetta.errors import MergettaError
from mergetta.runtimes.onnx_metadata import plain_path

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
ENOUGH, FEW = 2000, 512
"""Images to measure a signature on, and all else."""


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
            help="Clean images, as the model was made for: FILE.npz, a folder, or `fashion`; of more than 2,000, every "
            "so many-th. An own model learns from them where it is at home and to be left as it is; transformers gain "
            "from them in `run`; `--int8 static` needs them."
        ),
    ] = None,
) -> None:
    """Export a model with adjustable norm layers: one file for plain inference and for adaptation.

    Beside it stands a plain graph (`model.plain.onnx`) for a device that has settled, which costs there what a model
    costs that was never adjustable. An int8 model has none.

    Example: `mergetta export --family fashion-vit --int8 dynamic --out fashion-vit-int8.onnx`

    Example: `mergetta export --family own_model:family --checkpoint weights.pt --calibration clean/ --out model.onnx`
    """
    if int8 is Int8.static and calibration is None:
        raise MergettaError("`--int8 static` measures ranges on images: give some with --calibration.")
    stages = Console(stderr=True, highlight=False, emoji=False)
    stages.print(f"exporting {escape(family)}: two graphs are traced, which may take a minute")
    with stages.status("loading") as status:
        said = export(out, family, checkpoint, size, int8, calibration, status.update)
    Console(highlight=False, soft_wrap=True, emoji=False).print(escape(said))


def export(
    out: Path,
    family: str,
    checkpoint: Path | None,
    size: int | None,
    int8: Int8 | None,
    calibration: str | None,
    tell: Callable[[str], None],
) -> str:
    """Write the files, and say which."""
    from mergetta.adapters.forward_only.source_features import measure_source
    from mergetta.files import write_atomically
    from mergetta.models.family import load_family
    from mergetta.runtimes.export import set_metadata, to_onnx, to_plain_onnx, write_models
    from mergetta.runtimes.home import with_home
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    source = load_family(family, checkpoint)
    images = clean_images(calibration, len(source.preprocessing.mean), size or source.preprocessing.size)
    few = None if images is None else images[evenly(range(len(images)), FEW)]
    if images is not None and source.signature is None:
        tell(f"measuring {len(images)} clean images")
        source = with_home(source, batches(images))
    tell("tracing the adjustable graph")
    model = to_onnx(source, size)
    if int8 is Int8.dynamic:
        model = quantize_dynamic(model)
    elif int8 is Int8.static and few is not None:
        tell("quantising")
        model = quantize_static(model, batches(few))
    if few is not None:
        measured = measure_source(OnnxRuntime(model.SerializeToString()), batches(few))
        set_metadata(model, features=[values.tolist() for values in measured])
    if int8:
        write_atomically(out, model.SerializeToString())
    else:
        tell("tracing the plain graph")
        write_models(out, model, to_plain_onnx(source, size))
    files = [out] if int8 else [out, plain_path(out)]
    home = "" if source.signature is not None else "; without --calibration, a device adapts to clean images too"
    return (
        f"{' and '.join(f'{file} ({file.stat().st_size:,} bytes)' for file in files)}: {source.fingerprint}"
        f"{f', int8 {int8}' if int8 else ''}{home}"
    )


def clean_images(source: str | None, channels: int, size: int | None) -> np.ndarray | None:
    """Evenly spaced ones: files are often sorted by class."""
    import numpy as np

    from mergetta.data.images import image_files, load_images, read_image

    if source is None:
        return None
    if Path(source).is_dir():
        images = [read_image(file, channels, size) for file in evenly(image_files(Path(source)), ENOUGH)]
        if len({image.shape for image in images}) > 1:
            raise MergettaError(f"The images in {source} have different sizes: say which with --size.")
        return np.stack(images)
    loaded = load_images(source, channels, size)
    return loaded[evenly(range(len(loaded)), ENOUGH)]


def evenly(things: Sequence[T], most: int) -> list[T]:
    count = min(len(things), most)
    return [things[i * len(things) // count] for i in range(count)]


def batches(images: np.ndarray) -> Iterator[np.ndarray]:
    from mergetta.data.streams import as_input

    return (as_input(images[i : i + 64]) for i in range(0, len(images), 64))
