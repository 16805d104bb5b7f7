"""`mergetta evaluate`: labelled images → error before and after adaptation."""

from __future__ import annotations

import io
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from mergetta.cli.options import Checkpoint, DeviceModel, MaybeFamily, device_runtime
from mergetta.cli.run import MethodOption, Mirror, Runs, parse_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mergetta.bench.evaluation import Score
    from mergetta.data.streams import Order

MOST_ROWS = 20
"""Of a table for people; JSON has everything."""


def command(
    bundle: Annotated[Path, typer.Option(help="The bundle that `mergetta build` wrote.")],
    images: Annotated[
        str, typer.Option(help="A folder, FILE.npz with `images` and `labels`, or `fashion:fog@5` for embedded ones.")
    ],
    model: DeviceModel = None,
    family: MaybeFamily = None,
    checkpoint: Checkpoint = None,
    labels: Annotated[
        str,
        typer.Option(
            help="`by-folder`: one folder per class, named after it or numbered; or a CSV FILE with the columns `name` "
            "and `label`."
        ),
    ] = "by-folder",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch; 1 is a camera.")] = 64,
    order: Annotated[
        str, typer.Option(help="Of the classes: `mixed`, `sorted` (one after the other) or `correlated`.")
    ] = "mixed",
    seed: Annotated[int, typer.Option(help="Of the order.")] = 0,
    method: Annotated[str, typer.Option(help="race-merge (ours), or zo-merge (the paper's steps).")] = "race-merge",
    option: MethodOption = None,
    mirror: Mirror = False,
    runs: Runs = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the tables to this page.")] = None,
) -> None:
    """Predict labelled images as a device would, adapting on the way, and compare with the model left alone.

    Labels are used for scoring only.

    Example: `mergetta evaluate --model m.onnx --bundle b.safetensors --images photos/ --batch-size 1 --order sorted`
    """
    from mergetta.bench.evaluation import evaluate, readable
    from mergetta.bundle import Bundle
    from mergetta.data.labelled import load_labelled
    from mergetta.device.methods import create

    runtime = device_runtime(model, family, checkpoint)
    known = runtime.metadata
    domain = load_labelled(images, labels, known["channels"], known["size"], known["classes"])
    options = dict(parse_option(text) for text in option or ())
    adapter = create(method, runtime, Bundle.load(bundle, runtime.family), options, mirror, runs)
    broken: list[str] = []
    batches = readable(domain, seed, batch_size, cast("Order", order), broken.append)
    total = -(-len(domain.labels) // batch_size)
    shown = track(batches, "predicting", total, console=Console(stderr=True), transient=True)
    before, after = evaluate(adapter, iter(shown))
    settings = {"method": method, "batch_size": batch_size, "order": order, "seed": seed, "images": images}
    if json:
        facts = {"family": runtime.family, "settings": settings, "images": len(after.labels), "broken": broken}
        both = {"before": before.facts(), "after": after.facts()}
        typer.echo(json_format.dumps({**facts, "classes": known["classes"], **both}))
    console = Console(record=html is not None, file=io.StringIO() if json else None, highlight=False)
    show(console, before, after, known["classes"], settings, broken)
    if html is not None:
        from mergetta.files import write_atomically

        write_atomically(html, console.export_html().encode())


def show(
    console: Console,
    before: Score,
    after: Score,
    classes: Sequence[str],
    settings: dict[str, Any],
    broken: list[str],
) -> None:
    for sentence in broken[:3]:
        console.print(f"left out: {sentence}", markup=False)
    left = f", {len(broken)} could not be read" if broken else ""
    console.print(
        f"{settings['images']}: {len(after.labels)} images{left}; {settings['method']}, batches of "
        f"{settings['batch_size']}, {settings['order']} order",
        markup=False,
    )
    counts, gained = after.confusion.sum(axis=1), after.class_errors() - before.class_errors()
    table = Table("class", "images", "error before, %", "after, %", "change")
    present = [number for number in np.argsort(-after.class_errors()) if counts[number]]
    for number in present[:MOST_ROWS]:
        errors = (score.class_errors()[number] for score in (before, after))
        row = (*(f"{error:.1f}" for error in errors), f"{gained[number]:+.1f}")
        table.add_row(escape(str(classes[number])), str(counts[number]), *row)
    if len(present) > MOST_ROWS:
        table.add_row(f"… {len(present) - MOST_ROWS} more with lower error")
    table.add_section()
    for name, one, other in (
        ("all", before.error, after.error),
        ("calibration (ECE)", before.calibration_error, after.calibration_error),
    ):
        table.add_row(name, str(len(after.labels)), f"{one:.1f}", f"{other:.1f}", f"{other - one:+.1f}", style="bold")
    console.print(table)
    console.print(confusions(before, after, classes))


def confusions(before: Score, after: Score, classes: Sequence[str]) -> Table:
    """What is most often taken for something else."""
    one, other = (score.confusion * (1 - np.eye(len(classes), dtype=int)) for score in (before, after))
    table = Table("class", "taken for", "images before", "after")
    for place in np.argsort(-np.maximum(one, other), axis=None)[: MOST_ROWS // 2]:
        true, taken = np.unravel_index(place, one.shape)
        if one[true, taken] or other[true, taken]:
            names = (escape(str(classes[number])) for number in (true, taken))
            table.add_row(*names, str(one[true, taken]), str(other[true, taken]))
    return table
