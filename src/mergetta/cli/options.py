"""Options that several verbs share, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergetta.errors import MergettaError

if TYPE_CHECKING:
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

NAMES = (
    "`fashion-bn`, `fashion-vit`, `resnet-20`, `resnet-50`, … (docs/reference/suites.md), `timm:NAME`, `hf:NAME` or "
    "`hf:FOLDER`, `module:function` for one's own, or a mergetta checkpoint FILE."
)
Family = Annotated[str, typer.Option(help=f"The model: {NAMES}")]
MaybeFamily = Annotated[str | None, typer.Option("--family", help=f"The model: {NAMES}")]
Checkpoint = Annotated[Path | None, typer.Option(help="Weights for the family: a state dict or safetensors file.")]
Keep = Annotated[float, typer.Option(help="Share of each task vector that survives (NWS).")]
MaxRank = Annotated[int, typer.Option(help="Most coefficients per group (RR).")]
Tolerance = Annotated[float, typer.Option(help="Recovery error per entry that decides the rank (ARS).")]
Members = Annotated[
    int, typer.Option(min=0, help="Most members of a bundle: experts, or clusters of similar ones (0: none).")
]
Method = Annotated[str, typer.Option(help="race-merge (ours), or zo-merge (the paper's steps).")]
DeviceModel = Annotated[Path | None, typer.Option(help="The ONNX file that `mergetta export` wrote.")]


Threads = Annotated[int | None, typer.Option(min=1, help="Threads (default: ONNX Runtime's choice).")]


def device_runtime(
    model: Path | None, family: str | None, checkpoint: Path | None, threads: int | None = None
) -> OnnxRuntime:
    """What a device runs: an exported file, or a family exported on the spot."""
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

    if (model is None) == (family is None):
        raise MergettaError("Give one of --model (an exported ONNX file) and --family.")
    if model is not None:
        if checkpoint is not None:
            raise MergettaError("An exported model has its weights: leave out --checkpoint.")
        return OnnxRuntime(model, threads)
    from mergetta.models.family import load_family
    from mergetta.runtimes.export import to_onnx

    return OnnxRuntime(to_onnx(load_family(str(family), checkpoint)).SerializeToString(), threads)
