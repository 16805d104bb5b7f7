"""`mergetta cost`: what adaptation costs on this machine, in time and memory."""

from __future__ import annotations

import json as json_format
from typing import Annotated

import typer

from mergetta.cli.bench import Html, Json, wide_console
from mergetta.cli.options import Checkpoint, Family


def command(
    family: Family = "fashion-bn",
    checkpoint: Checkpoint = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated (default: 1 and 64).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every variant is measured.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Per operator.")] = 1,
    json: Json = None,
    html: Html = None,
) -> None:
    """Measure time, forward passes and memory of a model as it adapts, relative to a plain export of the same model.

    Rounds are interleaved, so that a slow moment of the machine hits all variants alike.

    Example: `mergetta cost --family resnet-20 --checkpoint resnet20.th --batch-size 1`
    """
    from rich.table import Table

    from mergetta.bench.cost import COLUMNS, Model, cells, cost_page, measure_model
    from mergetta.files import write_atomically

    console = wide_console()
    model, rows = Model(family, str(checkpoint) if checkpoint else None), []
    with console.status("measuring") as status:
        for batch in batch_size or (1, 64):
            rows += measure_model(model, batch, rounds, threads, status.update)
            if json:
                write_atomically(json, json_format.dumps(rows, indent=1).encode())
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if json:
        console.print(f"results: {json}")
    if html:
        write_atomically(html, cost_page(rows).encode())
        console.print(f"chart: {html}")
