"""`mergetta calibrate`: find the δ that fits a device model, and write it into the model's metadata."""

from __future__ import annotations

import json as json_format
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mergetta.cli.options import Checkpoint, DeviceModel, MaybeFamily, device_runtime
from mergetta.errors import MergettaError


def command(
    bundle: Annotated[Path, typer.Option(help="The bundle that the device will tune.")],
    images: Annotated[
        str, typer.Option(help="Unlabelled images: FILE.npz, a folder, or `fashion:fog@3`; 64 are used.")
    ],
    model: DeviceModel = None,
    family: MaybeFamily = None,
    checkpoint: Checkpoint = None,
    loss: Annotated[
        str | None,
        typer.Option(help="`entropy`, `roid` or `deyo` (default: the one that `run --method zo-merge` uses)."),
    ] = None,
    write: Annotated[
        bool, typer.Option(help="Write δ into the metadata of --model, where `mergetta run` finds it.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Measure, without labels, from which δ on the loss difference rises above rounding noise.

    With `--family` instead of `--model`, δ is printed and nothing is written.

    Example: `mergetta calibrate --model model-int8.onnx --bundle bundle.safetensors --images photos/`
    """
    from mergetta.adapters.wrappers.governed import Governed
    from mergetta.bundle import Bundle
    from mergetta.data.images import load_images
    from mergetta.data.streams import as_input
    from mergetta.device.methods import create
    from mergetta.zeroth_order.calibrate import calibrate_delta

    runtime = device_runtime(model, family, checkpoint)
    if write and model is not None:
        import_module("onnx")  # before the work
    governed = create(
        "zo-merge", runtime, Bundle.load(bundle, runtime.family), {"loss": loss} if loss else {}, runs=False, head=False
    )
    assert isinstance(governed, Governed)
    adapter = governed.adapter
    batch = as_input(load_images(images, runtime.metadata["channels"], runtime.metadata["size"])[:64])
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        found = calibrate_delta(
            lambda w: adapter.loss_at(w, batch),
            adapter.point,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    told = {"delta": found.delta, "loss": type(adapter.loss).__name__, "agreement": list(found.agreement.items())}
    if json:
        typer.echo(json_format.dumps(told))
    else:
        table = Table("δ", f"agreement of the slopes of {told['loss']} at δ and 2δ")
        for delta, agreement in found.agreement.items():
            table.add_row(f"{delta:.4g}", f"{agreement:.3f}{'  ◄' if delta == found.delta else ''}")
        Console().print(table)
    if found.delta is None:
        raise MergettaError("The slopes at δ and 2δ agree nowhere, so nothing was written: try other images or --loss.")
    if write and model is not None:
        write_delta(model, found.delta)
    if not json:
        Console().print(f"δ = {found.delta:.4g}{f', written to {model}' if write and model else ''}")


def write_delta(model: Path, delta: float) -> None:
    import onnx

    from mergetta.files import write_atomically
    from mergetta.runtimes.export import set_metadata

    proto = onnx.load(model)
    set_metadata(proto, delta=delta)
    write_atomically(model, proto.SerializeToString())
