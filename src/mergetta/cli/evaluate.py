"""`mergetta evaluate`: labelled images → error before and after adaptation."""

from __future__ import annotations

import json as json_format
from html import escape as escape_html
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from mergetta.cli.options import Checkpoint, DeviceModel, MaybeFamily, Method, Threads, device_runtime
from mergetta.cli.run import Head, MethodOption, Mirror, Runs, parse_option

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
    method: Method = "race-merge",
    option: MethodOption = None,
    mirror: Mirror = False,
    runs: Runs = True,
    head: Head = True,
    threads: Threads = None,
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
    from mergetta.files import write_atomically

    runtime = device_runtime(model, family, checkpoint, threads)
    known = runtime.metadata
    domain = load_labelled(images, labels, known["channels"], known["size"], known["classes"])
    options = dict(parse_option(text) for text in option or ())
    adapter = create(method, runtime, Bundle.load(bundle, runtime.family), options, mirror, runs, head)
    broken: list[str] = []
    batches = readable(domain, seed, batch_size, cast("Order", order), broken.append)
    count, bar = -(-len(domain.labels) // batch_size), Console(stderr=True)
    before, after = evaluate(adapter, iter(track(batches, "predicting", count, console=bar, transient=True)))
    settings = {"method": method, "batch_size": batch_size, "order": order, "seed": seed, "images": images}
    if json:
        facts = {"family": runtime.family, "settings": settings, "images": len(after.labels), "broken": broken}
        both = {"before": before.facts(), "after": after.facts()}
        typer.echo(json_format.dumps({**facts, "classes": known["classes"], **both}))
    sheets, told = tables(before, after, known["classes"]), caption(settings, len(after.labels), broken)
    if not json:
        show(sheets, told, broken)
    if html is not None:
        write_atomically(html, page_of(before.error, after.error, method, sheets, told).encode())


class Sheet(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    ours: int
    """The column of what was adapted."""


def tables(before: Score, after: Score, classes: Sequence[str]) -> tuple[Sheet, Sheet]:
    """By class, and what is most often taken for something else."""
    counts, errors = after.confusion.sum(axis=1), [score.class_errors() for score in (before, after)]
    present = [number for number in np.argsort(-errors[1]) if counts[number]]
    rows = [changed(str(classes[i]), counts[i], errors[0][i], errors[1][i]) for i in present[:MOST_ROWS]]
    if len(present) > MOST_ROWS:
        rows.append((f"… {len(present) - MOST_ROWS} more with lower error", "", "", "", ""))
    rows.append(changed("all", len(after.labels), before.error, after.error))
    rows.append(changed("calibration (ECE)", len(after.labels), before.calibration_error, after.calibration_error))
    one, other = (score.confusion * (1 - np.eye(len(classes), dtype=int)) for score in (before, after))
    most = np.argsort(-np.maximum(one, other), axis=None)[: MOST_ROWS // 2]
    pairs = [np.unravel_index(place, one.shape) for place in most]
    taken = [
        (str(classes[i]), str(classes[j]), str(one[i, j]), str(other[i, j]))
        for i, j in pairs
        if one[i, j] or other[i, j]
    ]
    return (
        Sheet(("error, %", "images", "before", "after", "change"), rows, 3),
        Sheet(("images of", "taken for", "before", "after"), taken, 3),
    )


def changed(name: str, count: int, before: float, after: float) -> tuple[str, ...]:
    return name, str(count), f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}"


def caption(settings: dict[str, Any], count: int, broken: Sequence[str]) -> str:
    left = f", {len(broken)} could not be read" if broken else ""
    return (
        f"{settings['images']}: {count} images{left}; {settings['method']}, batches of {settings['batch_size']}, "
        f"{settings['order']} order"
    )


def show(sheets: Sequence[Sheet], told: str, broken: Sequence[str]) -> None:
    console = Console(highlight=False)
    for sentence in (*(f"left out: {sentence}" for sentence in broken[:3]), told):
        console.print(sentence, markup=False)
    for sheet in sheets:
        table = Table(*sheet.columns)
        for row in sheet.rows:
            table.add_row(*map(escape, row), style="bold" if row[0] in ("all", "calibration (ECE)") else None)
        console.print(table)


def page_of(before: float, after: float, method: str, sheets: Sequence[Sheet], told: str) -> str:
    from mergetta.bench.page import number, page, table

    by_class, confusions = (table(*sheet) for sheet in sheets)
    body = f"""{number(before, after)}
<p class=hero>of the predictions are wrong: with the model as it was deployed, and with <b class=ours>{method}</b>,
which adapts while it predicts, with forward passes alone.</p>
<p class=lead>{escape_html(told)}</p>
<h2>Error by class</h2>{by_class}
<h2>Most often taken for something else</h2>{confusions}"""
    return page("mergetta · evaluation", "", body)
