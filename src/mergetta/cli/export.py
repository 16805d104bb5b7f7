"""`mergetta export`: a torch family → the ONNX file of a weak device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    out: Annotated[Path, typer.Option(help="The ONNX file to write.")],
    family: Annotated[str, typer.Option(help="An embedded family, or the path of a checkpoint.")] = "fashion-bn",
    size: Annotated[
        int | None, typer.Option(min=1, help="Height and width of the images (default: the family's).")
    ] = None,
) -> None:
    """Export a model with adjustable norm layers: one file for plain inference and for adaptation.

    Example: `mergetta export --family fashion-bn --out fashion-bn.onnx`
    """
    from mergetta.models.family import load_family
    from mergetta.runtimes.export import export_onnx

    console = Console()
    with console.status(f"exporting {family}"):
        source = load_family(family)
        export_onnx(source, out, size)
    console.print(f"{out}: {source.fingerprint}, {out.stat().st_size:,} bytes")
