"""`mergetta export`: a torch family → the ONNX file of a weak device."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    import numpy as np


class Int8(StrEnum):
    dynamic = "dynamic"
    static = "static"


def command(
    out: Annotated[Path, typer.Option(help="The ONNX file to write.")],
    family: Annotated[str, typer.Option(help="An embedded family, or the path of a checkpoint.")] = "fashion-bn",
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
            "transformers run by `run --experts` gain from them."
        ),
    ] = None,
) -> None:
    """Export a model with adjustable norm layers: one file for plain inference and for adaptation.

    Example: `mergetta export --family fashion-vit --int8 dynamic --out fashion-vit-int8.onnx`
    """
    from mergetta.adapters.forward_only.source_features import measure_source
    from mergetta.data.images import load_images
    from mergetta.errors import MergettaError
    from mergetta.files import write_atomically
    from mergetta.models.family import load_family
    from mergetta.runtimes.export import set_metadata, to_onnx
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    if int8 is Int8.static and calibration is None:
        raise MergettaError("`--int8 static` measures ranges on images: give some with --calibration.")
    console = Console()
    source = load_family(family)
    images = (
        load_images(calibration, len(source.preprocessing.mean), source.preprocessing.size) if calibration else None
    )
    with console.status(f"exporting {family}"):
        model = to_onnx(source, size)
        if int8 is Int8.dynamic:
            model = quantize_dynamic(model)
        elif int8 is Int8.static and images is not None:
            model = quantize_static(model, batches(images))
    write_atomically(out, model.SerializeToString())
    if images is not None:
        measured = measure_source(OnnxRuntime(out), batches(images))
        set_metadata(out, features=[values.tolist() for values in measured])
    console.print(f"{out}: {source.fingerprint}, {out.stat().st_size:,} bytes{f', int8 {int8}' if int8 else ''}")


def batches(images: np.ndarray) -> Iterator[np.ndarray]:
    from mergetta.data.streams import as_input

    return (as_input(images[i : i + 64]) for i in range(0, min(len(images), 512), 64))
