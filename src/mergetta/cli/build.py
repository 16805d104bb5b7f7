"""`mergetta build`: on the server, experts → bundle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergetta.cli.options import Checkpoint, Keep, MaxRank, MaybeFamily, Members, Tolerance
from mergetta.cli.run import Authorities, Token, VerifyKey
from mergetta.errors import MergettaError

if TYPE_CHECKING:
    from mergetta.device.hub_client import HubClient
    from mergetta.family_file import FamilyFile

FINGERPRINT = re.compile(r".+-[0-9a-f]{16}")
"""What hubs call a family: its name and a digest."""


def command(
    out: Annotated[Path, typer.Option(dir_okay=False, help="The bundle file to write.")],
    experts: Annotated[list[Path] | None, typer.Argument(help="Expert files, all of one family.")] = None,
    family: MaybeFamily = None,
    checkpoint: Checkpoint = None,
    keep: Keep = 0.4,
    max_rank: MaxRank = 5,
    tolerance: Tolerance = 1e-2,
    initial: Annotated[float, typer.Option(help="Initial coefficient of each expert.")] = 0.1,
    members: Members = 16,
    frozen_blocks: Annotated[
        int | None,
        typer.Option(help="Last blocks that do not move (default: 1 for CNNs, 3 for transformers)."),
    ] = None,
    hub: Annotated[str | None, typer.Option(help="Take the current bundle of this hub, build none.")] = None,
    token: Token = None,
    verify_key: VerifyKey = None,
    ca: Authorities = None,
) -> None:
    """Condense experts into the bundle that a weak device merges and tunes.

    Experts know their source model. `--family` is for experts that Python code saved without their source, and for a
    hub that has several families: a model, or what the hub calls it.

    Example: `mergetta build fog.safetensors snow.safetensors --out bundle.safetensors`

    Example: `mergetta build --hub https://hub.example --token … --out bundle.safetensors`
    """
    from mergetta.expert import Expert
    from mergetta.merging import build_bundle

    if hub is not None:
        if experts:
            raise typer.BadParameter("Give either expert files or --hub.")
        download(family, checkpoint, out, hub, token, verify_key, ca)
        return
    if not experts:
        raise typer.BadParameter("Missing argument: give expert files, or --hub to take the bundle of a hub.")
    source = source_model(experts, family, checkpoint)
    loaded = [Expert.load(path, source.family) for path in experts]
    frozen = source.frozen if frozen_blocks is None else source.last_blocks(frozen_blocks)
    bundle = build_bundle(
        source.base, loaded, keep, max_rank, tolerance, initial, frozen, members=members, family=source.family
    )
    bundle.save(out)
    Console().print(
        f"{out}: {len(loaded)} experts in {bundle.dimension} coefficients "
        f"({sum(v.size for v in bundle.base.values()):,} norm weights), {out.stat().st_size:,} bytes"
    )


def source_model(experts: list[Path], family: str | None, checkpoint: Path | None) -> FamilyFile:
    """As the experts know it, or of the family that is named, which needs PyTorch."""
    from mergetta.expert import Expert
    from mergetta.family_file import FamilyFile

    if family is None and checkpoint is None:
        known = [source for path in experts if (source := Expert.load(path).source)]
        if known:
            return known[0]
        raise MergettaError(f"{experts[0]} does not say what its source model is like: name it with --family.")
    from mergetta.models.family import load_family
    from mergetta.runtimes.torch_runtime import TorchRuntime

    return FamilyFile.of_runtime(TorchRuntime(load_family(family or "fashion-bn", checkpoint)))


def download(
    family: str | None,
    checkpoint: Path | None,
    out: Path,
    hub: str,
    token: str | None,
    verify_keys: list[str] | None,
    ca: Path | None,
) -> None:
    from mergetta.device.hub_client import HubClient, read_key
    from mergetta.files import write_atomically

    client = HubClient(hub, token, ca=ca, verify_keys=[read_key(key) for key in verify_keys or ()])
    fetched = client.bundle(family_at(client, family, checkpoint))
    assert fetched is not None  # only a conditional request can be answered with nothing
    write_atomically(out, fetched.data)
    Console().print(
        f"{out}: the hub's bundle {fetched.id[:12]} of {fetched.bundle.family}, {fetched.bundle.dimension} "
        f"coefficients, {len(fetched.data):,} bytes",
        highlight=False,
    )


def family_at(client: HubClient, family: str | None, checkpoint: Path | None) -> str:
    """What a hub calls the family: its only one, the one that is named so, or that of a model, which needs PyTorch."""
    if family is None and checkpoint is None:
        known = client.families()
        if len(known) == 1:
            return known[0]
        told = f"has the families {', '.join(known)}: name one with --family" if known else "shows this token no family"
        raise MergettaError(f"The hub {told}.")
    if family and checkpoint is None and FINGERPRINT.fullmatch(family):
        return family
    from mergetta.models.family import load_family

    return load_family(family or "fashion-bn", checkpoint).fingerprint
