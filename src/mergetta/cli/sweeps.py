"""What the verbs that run sweeps have in common: where they run, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mergetta.errors import MergettaError

if TYPE_CHECKING:
    from mergetta.bench.executors import Executor

DAY = 24 * 3600
ExecutorName = Annotated[str, typer.Option("--executor", help="`local` (processes of this machine) or `ray`.")]
Address = Annotated[
    str | None,
    typer.Option(help="The Ray cluster, as HOST:PORT or `auto` (default: a Ray of this machine alone is started)."),
]


def executor_of(name: str, address: str | None, jobs: int | None) -> Executor:
    from mergetta.bench.executors import ProcessExecutor, RayExecutor

    if name not in ("local", "ray"):
        raise MergettaError(f"There is no executor {name!r}; choose local or ray.")
    if name == "ray":
        return RayExecutor(address, jobs)
    if address:
        raise MergettaError("--address names a Ray cluster: add --executor ray.")
    return ProcessExecutor(jobs)


@contextmanager
def bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar per stage, with the time left."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, speed_estimate_period=DAY) as progress:  # one result may take an hour
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        try:
            yield show
        except KeyboardInterrupt:
            progress.console.print("Stopped. What was measured is kept: the same command continues.")
            raise
