"""`mergetta adapt`: on a strong device, unlabelled images → expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from mergetta.cli.options import Checkpoint, Family
from mergetta.cli.run import Authorities, Token
from mergetta.cli.upload import introduce, share
from mergetta.data.streams import as_input
from mergetta.errors import MergettaError
from mergetta.seeds import generator

if TYPE_CHECKING:
    from mergetta.expert import Expert
    from mergetta.family_file import FamilyFile
    from mergetta.groups import GroupValues
    from mergetta.models import family as families
    from mergetta.runtimes.torch_runtime import TorchRuntime

MOST_HELD, FEWEST_HELD = 200, 10
"""Images held back to see whether an expert helps: a tenth, within these bounds."""
SHOWN = 3
"""Broken files that are named."""


def command(
    images: Annotated[str, typer.Argument(help="FILE.npz, a folder of images, or `fashion:fog@5` for embedded ones.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The expert file to write.")],
    family: Family = "fashion-bn",
    checkpoint: Checkpoint = None,
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
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 1,
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
    from mergetta.device.hub_client import HubClient
    from mergetta.models.family import load_family
    from mergetta.runtimes.torch_runtime import TorchRuntime

    source = load_family(family, checkpoint)
    runtime = TorchRuntime(source)
    model = described(source, runtime)
    client = None if hub is None else HubClient(hub, token, ca=ca)
    if client is not None:
        introduce(client, model)
    shuffled = ShuffledImages(read(images, source), seed)
    options: dict[str, Any] = {"optimizer": optimizer, "lr": lr}
    if method == "hybrid":
        options |= hybrid_options(bundle, memory_budget, layers, source, next(shuffled.batches(batch_size)))
    elif any(given is not None for given in (bundle, memory_budget, layers)):
        raise MergettaError("--bundle, --memory-budget and --layers are for --method hybrid.")
    count, stream = len(shuffled.order), shuffled.batches(batch_size, epochs)
    batches = track(stream, f"adapting by {method}", epochs * -(-count // batch_size), transient=True)
    expert = train_expert(runtime, batches, method, domain or name_of(images), seed, **options)
    expert = dataclasses.replace(expert, source=model, provenance={**expert.provenance, "epochs": epochs})
    expert.save(out)
    console = Console(highlight=False, markup=False)
    console.print(f"{out}: expert {expert.domain!r} of {runtime.family}, {count} images, {out.stat().st_size:,} bytes")
    console.print(word_on(runtime, expert, shuffled.held))
    if client is not None:
        share(client, expert)


def name_of(images: str) -> str:
    """What a domain is called after its images."""
    return Path(images.rpartition(":")[2].removesuffix(".npz")).name


class ShuffledImages:
    """Images in random order, some of which are held back."""

    def __init__(self, pixels: np.ndarray, seed: int) -> None:
        self.pixels, self.seed = pixels, seed
        order = generator(seed, 0, "adapt").permutation(len(pixels))
        held, self.order = np.split(order, [min(MOST_HELD, len(order) // 10)])
        self.held = [self._input(part) for part in np.array_split(held, 4)]

    def _input(self, chosen: np.ndarray) -> np.ndarray:
        return as_input(self.pixels[chosen])

    def batches(self, size: int, epochs: int = 1) -> Iterator[np.ndarray]:
        """Those that are not held back, in another order in every epoch."""
        for epoch in range(epochs):
            order = generator(self.seed, epoch, "epoch").permutation(self.order) if epoch else self.order
            for start in range(0, len(order), size):
                yield self._input(order[start : start + size])


def described(source: families.Family, runtime: TorchRuntime) -> FamilyFile:
    from mergetta.family_file import FamilyFile

    note = " ".join([source.architecture, *(f"{key}={value}" for key, value in source.options.items())])
    return FamilyFile.of_runtime(runtime, note, dataclasses.asdict(source.preprocessing))


def read(images: str, source: families.Family) -> np.ndarray:
    """The images that can be read; the others are told."""
    from mergetta.data.images import load_images

    console, broken = Console(stderr=True, highlight=False, soft_wrap=True), list[str]()
    with console.status(f"reading {images}"):
        pixels = load_images(images, len(source.preprocessing.mean), source.preprocessing.size, broken.append)
    for sentence in broken[:SHOWN]:
        console.print(f"left out: {sentence}", markup=False)
    if len(broken) > SHOWN:
        console.print(f"left out: {len(broken) - SHOWN} more")
    return pixels


def word_on(runtime: TorchRuntime, expert: Expert, held: list[np.ndarray]) -> str:
    """Whether predictions of images that the expert has not seen look better with it: certain of each, varied over
    all (information maximisation), both as shares of the most that there can be.
    """
    count = sum(map(len, held))
    if count < FEWEST_HELD:
        return f"too few images to say whether it helps: that takes {10 * FEWEST_HELD}"
    certain, diverse = seen_with(runtime, held, runtime.groups)
    surer, wider = seen_with(runtime, held, expert.groups)
    verdict = (
        "it helps, as far as can be seen without labels"
        if surer + wider > certain + diverse
        else "it does not seem to help: more images, another --lr or --method may"
    )
    return (
        f"on {count} images held back: certainty {certain:.2f} → {surer:.2f}, "
        f"diversity {diverse:.2f} → {wider:.2f}; {verdict}"
    )


def seen_with(runtime: TorchRuntime, held: list[np.ndarray], groups: GroupValues) -> tuple[float, float]:
    """Certainty and diversity of predictions with these groups, each between 0 and 1."""
    from mergetta.losses.information import entropy_of
    from mergetta.losses.probabilities import softmax

    predictions = np.concatenate([softmax(runtime(images, groups, given=1.0).logits) for images in held])
    most = np.log(predictions.shape[1])
    return 1 - float(entropy_of(predictions).mean() / most), float(entropy_of(predictions.mean(axis=0)) / most)


def hybrid_options(
    bundle: Path | None, memory_budget: float | None, layers: int | None, source: families.Family, first: np.ndarray
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
