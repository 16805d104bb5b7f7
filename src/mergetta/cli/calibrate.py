"""`mergetta calibrate`: find the δ that fits a device model, and write it into the model's metadata."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def command(
    model: Annotated[Path, typer.Option(help="The ONNX file that `mergetta export` wrote.")],
    bundle: Annotated[Path, typer.Option(help="The bundle that the device will tune.")],
    images: Annotated[
        str, typer.Option(help="Unlabelled images: FILE.npz, a folder, or `fashion:fog@3`; 64 are used.")
    ],
    loss: Annotated[str, typer.Option(help="`entropy`, `roid` or `deyo`.")] = "entropy",
    write: Annotated[
        bool, typer.Option(help="Write δ into the model's metadata, where `mergetta run` finds it.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Measure, without labels, from which δ on the loss difference rises above rounding noise.

    Example: `mergetta calibrate --model model-int8.onnx --bundle bundle.safetensors --images photos/`
    """
    from mergetta.adapters.forward_only.zo_merge import ZOMerge
    from mergetta.bundle import Bundle
    from mergetta.data.images import load_images
    from mergetta.data.streams import as_input
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.zeroth_order.calibrate import calibrate_delta

    runtime = OnnxRuntime(model)
    adapter = ZOMerge(runtime, Bundle.load(bundle, runtime.family), loss)
    batch = as_input(load_images(images, runtime.metadata["channels"], runtime.metadata["size"])[:64])
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        found = calibrate_delta(
            lambda w: adapter.loss_at(w, batch),
            adapter.point,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if write:
        import onnx

        from mergetta.files import write_atomically
        from mergetta.runtimes.export import set_metadata

        proto = onnx.load(model)
        set_metadata(proto, delta=found.delta)
        write_atomically(model, proto.SerializeToString())
    if json:
        typer.echo(json_format.dumps({"delta": found.delta, "agreement": list(found.agreement.items())}))
        return
    table = Table("δ", "agreement of the slopes at δ and 2δ")
    for delta, agreement in found.agreement.items():
        table.add_row(f"{delta:.4g}", f"{agreement:.3f}{'  ◄' if delta == found.delta else ''}")
    console = Console()
    console.print(table)
    console.print(f"δ = {found.delta:.4g}{f', written to {model}' if write else ''}")
