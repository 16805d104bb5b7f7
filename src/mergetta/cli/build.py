"""`mergetta build`: on the server, experts → bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergetta.cli.run import Authorities, Token, VerifyKey


def command(
    out: Annotated[Path, typer.Option(help="The bundle file to write.")],
    experts: Annotated[list[Path] | None, typer.Argument(help="Expert files, all of one family.")] = None,
    family: Annotated[
        str, typer.Option(help="An embedded or public family, `module:function` for one's own, or a checkpoint.")
    ] = "fashion-bn",
    keep: Annotated[float, typer.Option(help="Share of each task vector that survives (NWS).")] = 0.4,
    max_rank: Annotated[int, typer.Option(help="Most coefficients per group (RR).")] = 5,
    tolerance: Annotated[float, typer.Option(help="Recovery error per entry that decides the rank (ARS).")] = 1e-2,
    initial: Annotated[float, typer.Option(help="Initial coefficient of each expert.")] = 0.1,
    members: Annotated[
        int, typer.Option(min=0, help="Most members of the bundle: experts, or clusters of similar ones (0: none).")
    ] = 16,
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

    Example: `mergetta build fog.safetensors snow.safetensors --out bundle.safetensors`
    """
    from mergetta.expert import Expert
    from mergetta.groups import last_blocks, paper_frozen
    from mergetta.merging import build_bundle
    from mergetta.models.family import load_family
    from mergetta.runtimes.torch_runtime import TorchRuntime

    if hub is not None:
        if experts:
            raise typer.BadParameter("Give either expert files or --hub.")
        download(load_family(family).fingerprint, out, hub, token, verify_key, ca)
        return
    if not experts:
        raise typer.BadParameter("Missing argument: give expert files, or --hub to take the bundle of a hub.")
    runtime = TorchRuntime(load_family(family))
    loaded = [Expert.load(path, runtime.family) for path in experts]
    frozen = paper_frozen(runtime.structure) if frozen_blocks is None else last_blocks(runtime.structure, frozen_blocks)
    bundle = build_bundle(
        runtime.groups, loaded, keep, max_rank, tolerance, initial, frozen, members=members, family=runtime.family
    )
    bundle.save(out)
    Console().print(
        f"{out}: {len(loaded)} experts in {bundle.dimension} coefficients "
        f"({sum(v.size for v in bundle.base.values()):,} norm weights), {out.stat().st_size:,} bytes"
    )


def download(
    family: str, out: Path, hub: str, token: str | None, verify_keys: list[str] | None, ca: Path | None
) -> None:
    from mergetta.cli.run import client_of
    from mergetta.files import write_atomically

    fetched = client_of(hub, token, ca, verify_keys).bundle(family)
    assert fetched is not None  # only a conditional request can be answered with nothing
    write_atomically(out, fetched.data)
    Console().print(
        f"{out}: the hub's bundle {fetched.id[:12]}, {fetched.bundle.dimension} coefficients, "
        f"{len(fetched.data):,} bytes",
        highlight=False,
    )
