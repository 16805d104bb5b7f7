"""`mergetta adapt`: on a strong device, unlabelled images → expert."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from mergetta.cli.run import Authorities, Token
from mergetta.errors import MergettaError

if TYPE_CHECKING:
    import numpy as np

    from mergetta.device.hub_client import HubClient
    from mergetta.expert import Expert
    from mergetta.models.family import Family
    from mergetta.runtimes.torch_runtime import TorchRuntime


def command(
    images: Annotated[str, typer.Argument(help="FILE.npz, a folder of images, or `fashion:fog@5` for embedded ones.")],
    out: Annotated[Path, typer.Option(help="The expert file to write.")],
    family: Annotated[
        str, typer.Option(help="An embedded or public family, `module:function` for one's own, or a checkpoint.")
    ] = "fashion-bn",
    method: Annotated[str, typer.Option(help="`roid`, `deyo`, `tent`, or `hybrid` (with --bundle).")] = "roid",
    bundle: Annotated[Path | None, typer.Option(help="The bundle that `hybrid` starts from.")] = None,
    memory_budget: Annotated[
        float | None,
        typer.Option(min=1, help="Megabytes that this process may take with `hybrid`: so many layers learn."),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=0, help="Norm layers that learn with `hybrid`, instead of --memory-budget.")
    ] = None,
    domain: Annotated[str | None, typer.Option(help="What to call the domain (default: after the images).")] = None,
    optimizer: Annotated[str, typer.Option(help="`adam` or `sgd` (Nesterov).")] = "sgd",
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per step.")] = 200,
    seed: Annotated[int, typer.Option(help="Order of the images and random views.")] = 0,
    hub: Annotated[str | None, typer.Option(help="Address of a hub to share the expert with.")] = None,
    token: Token = None,
    ca: Authorities = None,
) -> None:
    """Adapt a model to unlabelled images by back-propagation, and save what is worth sharing as an expert.

    With little memory, `--method hybrid --bundle B --memory-budget MB` back-propagates through as many of the last norm
    layers as fit (measured first), and tunes the merge of the others by forward passes.

    Example: `mergetta adapt fashion:fog@5 --out fog.safetensors`
    """
    from mergetta.adapters.backprop.expert_training import train_expert
    from mergetta.data.images import load_images
    from mergetta.data.streams import as_input
    from mergetta.models.family import load_family
    from mergetta.runtimes.torch_runtime import TorchRuntime
    from mergetta.seeds import generator

    client = None
    if hub is not None:
        from mergetta.device.hub_client import HubClient

        client = HubClient(hub, token, ca=ca)
    source = load_family(family)
    runtime = TorchRuntime(source)
    pixels = load_images(images, len(source.preprocessing.mean), source.preprocessing.size)
    order = generator(seed, 0, "adapt").permutation(len(pixels))
    starts = range(0, len(order), batch_size)
    batches = (
        as_input(pixels[order[start : start + batch_size]])
        for start in track(starts, description=f"adapting by {method}", transient=True)
    )
    options: dict[str, Any] = {"optimizer": optimizer, "lr": lr}
    if method == "hybrid":
        options |= hybrid_options(bundle, memory_budget, layers, source, as_input(pixels[order[:batch_size]]))
    elif any(given is not None for given in (bundle, memory_budget, layers)):
        raise MergettaError("--bundle, --memory-budget and --layers are for --method hybrid.")
    name = domain or Path(images.rpartition(":")[2].removesuffix(".npz")).name
    expert = train_expert(runtime, batches, method, name, seed, **options)
    expert.save(out)
    Console().print(f"{out}: expert {name!r} of {runtime.family}, {len(pixels)} images, {out.stat().st_size:,} bytes")
    if client is not None:
        known = share(client, expert, runtime, source)
        Console().print(f"{hub}: {known.get('state', 'taken')}, as {known.get('id', '')[:12]}", highlight=False)


def hybrid_options(
    bundle: Path | None, memory_budget: float | None, layers: int | None, source: Family, first: np.ndarray
) -> dict[str, Any]:
    from mergetta.bundle import Bundle

    if bundle is None:
        raise MergettaError("--method hybrid starts from a merge: give --bundle FILE.")
    if memory_budget is not None and layers is not None:
        raise MergettaError("Give either --memory-budget or --layers.")
    options: dict[str, Any] = {"bundle": Bundle.load(bundle, source.fingerprint)}
    if layers is not None:
        options["layers"] = layers
    elif memory_budget is not None:
        from mergetta.bench.budget import layers_within

        console = Console()
        with console.status("measuring memory"):
            options["layers"] = layers_within(source, memory_budget, first, console.print)
        console.print(f"{options['layers']} layers learn by back-propagation", highlight=False)
    return options


def share(client: HubClient, expert: Expert, runtime: TorchRuntime, source: Family) -> dict[str, Any]:
    """Upload an expert, if the hub merges it into the same source model; the first one brings the family along."""
    from mergetta.family_file import FamilyFile

    known = client.family_file(runtime.family)
    if known is not None:
        FamilyFile.from_bytes(known, "the hub's family file").check_base(runtime.groups)
        return client.upload_expert(expert)
    note = " ".join([source.architecture, *(f"{key}={value}" for key, value in source.options.items())])
    file = FamilyFile.of_runtime(runtime, note, dataclasses.asdict(source.preprocessing))
    client.register_family(file.to_bytes())
    return client.upload_expert(expert)
