"""`mergetta corrupt`: a clean set → its -C set, in the published layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mergetta.errors import MergettaError

if TYPE_CHECKING:
    from mergetta.data.cifar_c import CifarMaker
    from mergetta.data.imagenet_c import FolderMaker

    Maker = CifarMaker | FolderMaker

Task = tuple[str, int, Callable[[], None]]
"""The corruption, how many images, and what to run."""


def command(
    source: Annotated[
        Path, typer.Argument(help="An npz file of CIFAR's shape (`x`, `y`), or a folder `[val/]WNID/*.JPEG`.")
    ],
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder of the -C set.")],
    corruptions: Annotated[str | None, typer.Option(help="Only these, separated by commas (default: all 15).")] = None,
    severities: Annotated[str, typer.Option(help="Which, separated by commas.")] = "1,2,3,4,5",
    seed: Annotated[int, typer.Option(min=0, help="Fixes every random choice.")] = 0,
    frost: Annotated[
        Path | None,
        typer.Option(help="Frost's textures, frost1 to frost5 (default: `frost` beside the images, or else drawn)."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core).")] = None,
) -> None:
    """Make a -C set in the published layout: stacked npy files from an npz file, JPEG folders from a folder.

    A run that was stopped goes on where it was when the same command is given again. The settings are kept in
    `mergetta-corrupt.json` beside the images, which do not depend on the number of processes.

    Example: `mergetta corrupt cifar10_test.npz --out CIFAR-10-C --corruptions fog,snow --severities 5`
    """
    import os

    from mergetta.data.corruptions import CORRUPTIONS

    names = chosen(corruptions, CORRUPTIONS, "corruption") if corruptions is not None else list(CORRUPTIONS)
    levels = sorted(int(level) for level in chosen(severities, map(str, range(1, 6)), "severity"))
    maker = open_maker(source, out, seed, frost)
    keep_settings(maker, names, levels)
    tasks = ((name, images, run) for name in names for images, run in maker.tasks(name, levels))
    run_with_progress(maker, list(tasks), levels, jobs or os.cpu_count() or 1)
    for name in names:
        maker.finish(name, levels)
    maker.end()
    Console().print(f"{out}: {len(names)} corruptions of {maker.facts['images']:,} images, severities {severities}")


def chosen(text: str, known: Iterable[str], what: str) -> list[str]:
    names, known = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())), list(known)
    for name in names:
        if name not in known:
            raise MergettaError(f"There is no {what} {name!r}; choose from {', '.join(known)}.")
    if not names:
        raise MergettaError(f"Name at least one {what} of {', '.join(known)}.")
    return names


def open_maker(source: Path, out: Path, seed: int, frost: Path | None) -> Maker:
    from mergetta.data.cifar_c import CifarMaker
    from mergetta.data.imagenet_c import FolderMaker

    if not source.exists():
        raise MergettaError(f"There is no file or folder {source}.")
    return (FolderMaker if source.is_dir() else CifarMaker)(source, out, seed, frost)


def keep_settings(maker: Maker, names: list[str], severities: list[int]) -> None:
    """Write the settings beside the images, or check that those there are the same: a set is made in one way."""
    import json

    from mergetta import __version__
    from mergetta.data.images import CORRUPT_SETTINGS, corrupt_settings
    from mergetta.files import write_atomically

    settings: dict[str, Any] = {
        "mergetta": __version__,
        "source": str(maker.source.resolve()),
        "seed": maker.seed,
        "severities": severities,
        **maker.facts,
    }
    before = corrupt_settings(maker.out)
    if before is None:
        for name in names:
            if maker.target(name).exists():
                raise MergettaError(f"{maker.target(name)} is not from `mergetta corrupt`: choose another --out.")
    else:
        for key in settings.keys() - {"source"}:
            if settings[key] != before.get(key):
                raise MergettaError(
                    f"{maker.out} was made with {key} {before.get(key)}, not {settings[key]}: choose another --out."
                )
        names = list(dict.fromkeys([*before.get("corruptions", []), *names]))
    maker.begin()
    text = json.dumps({**settings, "corruptions": names}, indent=1)
    write_atomically(maker.out / CORRUPT_SETTINGS, text.encode())


def run_with_progress(maker: Maker, tasks: list[Task], severities: list[int], jobs: int) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("images", total=sum(images for _, images, _ in tasks))
        for name, images in run_all(tasks, jobs):
            maker.finish(name, severities)
            progress.update(bar, advance=images, description=name)


def run_all(tasks: list[Task], jobs: int) -> Iterable[tuple[str, int]]:
    """Run the tasks in processes, a few at a time; (corruption, images) of each as it is done."""
    import multiprocessing
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool
    from itertools import islice

    executor = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=start_worker)
    remaining = iter(tasks)
    running: dict[Future[None], tuple[str, int]] = {}
    try:
        while True:
            for name, images, run in islice(remaining, 2 * jobs - len(running)):
                running[executor.submit(run)] = (name, images)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                future.result()
                yield running.pop(future)
    except BrokenProcessPool as error:
        raise MergettaError("A process was killed, perhaps for its memory: go on with fewer --jobs.") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def start_worker() -> None:
    """A thread per process; Ctrl-C ends it at once, as files are whole or not there; and so does its parent's end."""
    import signal

    import cv2

    from mergetta.workers import end_with_parent

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    cv2.setNumThreads(1)
    end_with_parent()
