"""`mergetta reproduce WHAT`: the paper's tables and figures, measured here."""

from __future__ import annotations

import contextlib
import json as json_format
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergetta.cli.bench import (
    BatchSize,
    Cache,
    Data,
    DryRun,
    Family,
    Jobs,
    Passes,
    Samples,
    Seeds,
    Severity,
    split,
    wide_console,
)
from mergetta.cli.options import Checkpoint
from mergetta.cli.sweeps import Address, ExecutorName, bars, executor_of

if TYPE_CHECKING:
    from rich.console import Console

    from mergetta.bench.executors import Executor
    from mergetta.bench.reproduce.setting import Setting
    from mergetta.bench.runner import Part
    from mergetta.bench.sheets import Study

What = Annotated[
    str,
    typer.Argument(
        help="`corruption-table`, `style-table`, `ablation`, `dimensions`, `memory`, `sensitivity`, "
        "`quantised`, or `all` of them."
    ),
]
Domains = Annotated[
    str | None,
    typer.Option(
        help="Only these target domains, separated by commas. By default `ablation`, `dimensions` and "
        "`sensitivity` take one of each kind, the others all; `all`: all everywhere."
    ),
]


def command(
    what: What,
    suite: Annotated[str, typer.Option(help="A suite of `mergetta bench`, or a YAML file.")] = "fashion-bn",
    family: Family = None,
    checkpoint: Checkpoint = None,
    data: Data = None,
    seeds: Seeds = 3,
    samples: Samples = None,
    domains: Domains = None,
    severity: Severity = None,
    batch_size: BatchSize = None,
    passes: Passes = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for tables (Markdown, CSV) and figures (SVG, PNG).")
    ] = Path("results"),
    json: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all studies of this run here as well.")
    ] = None,
    cache: Cache = None,
    jobs: Jobs = None,
    executor: ExecutorName = "local",
    address: Address = None,
    dry_run: DryRun = False,
) -> None:
    """Measure a table or figure of the paper, write it as Markdown, CSV, SVG and PNG, with the paper's numbers beside.

    Results are cached one by one: an interrupted run resumes, a second one is instant. `mergetta report` makes one
    page of all that is in the folder.

    Example: `mergetta reproduce all --suite fashion-bn --out results`

    Example: `mergetta reproduce ablation --passes 10 --batch-size 64` (on streams as long as the paper's)

    Example: `mergetta reproduce ablation --suite cifar10-c --family resnet-20 --checkpoint resnet20.th --data cifar10`
    """
    from mergetta.bench.reproduce import chosen_studies
    from mergetta.bench.reproduce.setting import Setting
    from mergetta.bench.store import default_cache
    from mergetta.bench.suite import load_suite

    named = None if domains == "all" else split(domains)
    whole = load_suite(suite, family, checkpoint, data).with_streams(batch_size, passes=passes)
    chosen = whole.restricted(None, named, samples, severity)
    setting = Setting(chosen, tuple(range(seeds)), tuple(named or chosen.domains), asked=domains is not None)
    store, studies, console = cache or default_cache(), chosen_studies(what), wide_console()
    if dry_run:
        show_plan(studies, setting, store, console)
        return
    failed: list[str] = []
    finished: list[Study] = []
    for study in studies:
        console.print(f"[bold]{study}[/]")
        with reported(study, studies, failed), executor_of(executor, address, jobs) as workers:
            finished.append(measured(study, setting, store, workers, failed, console))
            write(finished, out, json, console)
    for sentence in failed:
        console.print(f"[red]failed:[/] {sentence}", highlight=False)
    if failed:
        console.print("The rest is written and kept; the same command again tries only what failed.")
        raise typer.Exit(1)


def measured(
    study: str, setting: Setting, store: Path, workers: Executor, failed: list[str], console: Console
) -> Study:
    """One table or figure; what could not be measured of it is added to `failed`."""
    from mergetta.bench.reproduce import reproduce

    with bars(console) as show:
        result, failures = reproduce(study, setting, store, workers, shlex.join(["mergetta", *sys.argv[1:]]), show)
    failed += failures
    return result


def write(finished: Sequence[Study], out: Path, json: Path | None, console: Console) -> None:
    """The last one to its own files, and all of them to one that a program reads."""
    from mergetta.files import write_atomically

    for path in finished[-1].write(out):
        if path.suffix == ".md":
            console.print(f"written: {path}", highlight=False)
    if json:
        write_atomically(json, json_format.dumps([asdict(study) for study in finished], indent=1).encode())


def show_plan(studies: Sequence[str], setting: Setting, store: Path, console: Console) -> None:
    """What would be measured."""
    from mergetta.bench.plan import plan_of_parts
    from mergetta.bench.reproduce import parts_of

    together: list[Part] = []
    failed: list[str] = []
    for study in studies:
        with reported(study, studies, failed):
            parts = list(parts_of(study, setting).values())
            console.print(plan_of_parts(study, parts, store), highlight=False)
            together += parts
    if len(studies) > 1:
        console.print(plan_of_parts("together", together, store), highlight=False)
    for sentence in failed:
        console.print(f"[red]cannot run:[/] {sentence}", highlight=False)


@contextlib.contextmanager
def reported(study: str, studies: Sequence[str], failed: list[str]) -> Iterator[None]:
    """One of several studies that cannot run here is noted and stops no other."""
    from mergetta.errors import MergettaError

    try:
        yield
    except (MergettaError, RuntimeError) as error:
        if len(studies) == 1:
            raise
        failed.append(f"{study}: {error}")
