"""`mergetta build`: on the server, experts → bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    experts: Annotated[list[Path], typer.Argument(help="Expert files, all of one family.")],
    out: Annotated[Path, typer.Option(help="The bundle file to write.")],
    family: Annotated[str, typer.Option(help="An embedded family, or the path of a checkpoint.")] = "fashion-bn",
    keep: Annotated[float, typer.Option(help="Share of each task vector that survives (NWS).")] = 0.4,
    max_rank: Annotated[int, typer.Option(help="Most coefficients per group (RR).")] = 5,
    tolerance: Annotated[float, typer.Option(help="Recovery error per entry that decides the rank (ARS).")] = 1e-2,
    initial: Annotated[float, typer.Option(help="Initial coefficient of each expert.")] = 0.1,
    frozen_blocks: Annotated[
        int | None,
        typer.Option(help="Last blocks that do not move (default: 1 for CNNs, 3 for transformers)."),
    ] = None,
) -> None:
    """Condense experts into the bundle that a weak device merges and tunes.

    Example: `mergetta build fog.safetensors snow.safetensors --out bundle.safetensors`
    """
    from mergetta.expert import Expert
    from mergetta.groups import last_blocks, paper_frozen
    from mergetta.merging import build_bundle
    from mergetta.models.family import load_family
    from mergetta.runtimes.torch_runtime import TorchRuntime

    runtime = TorchRuntime(load_family(family))
    loaded = [Expert.load(path, runtime.family) for path in experts]
    frozen = paper_frozen(runtime.structure) if frozen_blocks is None else last_blocks(runtime.structure, frozen_blocks)
    bundle = build_bundle(runtime.groups, loaded, keep, max_rank, tolerance, initial, frozen, family=runtime.family)
    bundle.save(out)
    Console().print(
        f"{out}: {len(loaded)} experts in {bundle.dimension} coefficients "
        f"({sum(v.size for v in bundle.base.values()):,} norm weights), {out.stat().st_size:,} bytes"
    )
