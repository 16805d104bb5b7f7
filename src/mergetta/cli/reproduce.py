"""`mergetta reproduce WHAT`: the paper's tables and figures, measured here."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mergetta.cli.bench import Cache, Data, Family, Jobs, Severity, split, wide_console
from mergetta.cli.options import Checkpoint
from mergetta.cli.sweeps import Address, ExecutorName, bars, executor_of

if TYPE_CHECKING:
    from rich.console import Console

    from mergetta.bench.reproduce.setting import Setting
    from mergetta.bench.runner import Part


def command(
    what: Annotated[
        str,
        typer.Argument(
            help="`corruption-table`, `style-table`, `ablation`, `dimensions`, `memory`, `sensitivity`, "
            "`quantised`, or `all` of them."
        ),
    ],
    suite: Annotated[str, typer.Option(help="A suite of `mergetta bench`, or a YAML file.")] = "fashion-bn",
    family: Family = None,
    checkpoint: Checkpoint = None,
    data: Data = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    samples: Annotated[int | None, typer.Option(min=1, help="Images per domain (default: the suite's).")] = None,
    domains: Annotated[
        str | None,
        typer.Option(
            help="Only these target domains, separated by commas. By default `ablation`, `dimensions` and "
            "`sensitivity` take one of each kind, the others all; `all`: all everywhere."
        ),
    ] = None,
    severity: Severity = None,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be measured; run nothing.")] = False,
) -> None:
    """Measure a table or figure of the paper, write it as Markdown, CSV, SVG and PNG, with the paper's numbers beside.

    Results are cached one by one: an interrupted run resumes, a second one is instant. `mergetta report` makes one
    page of all that is in the folder.

    Example: `mergetta reproduce all --suite fashion-bn --out results`

    Example: `mergetta reproduce ablation --suite cifar10-c --family resnet-20 --checkpoint resnet20.th --data cifar10`
    """
    import json as json_format
    from dataclasses import asdict

    from mergetta.bench.reproduce import chosen_studies, reproduce
    from mergetta.bench.reproduce.setting import Setting
    from mergetta.bench.store import default_cache
    from mergetta.bench.suite import load_suite
    from mergetta.files import write_atomically

    console = wide_console()
    named = None if domains == "all" else split(domains)
    chosen = load_suite(suite, family, checkpoint, data).restricted(None, named, samples, severity)
    setting = Setting(chosen, tuple(range(seeds)), tuple(named or chosen.domains), asked=domains is not None)
    store = cache or default_cache()
    studies = chosen_studies(what)
    finished: list[dict[str, Any]] = []
    failed: list[str] = []
    if dry_run:
        show_plan(studies, setting, store, console)
        return
    words = shlex.join(["mergetta", *sys.argv[1:]])
    for study in studies:
        console.print(f"[bold]{study}[/]")
        with reported(study, studies, failed):
            with executor_of(executor, address, jobs) as workers, bars(console) as show:
                result, failures = reproduce(study, setting, store, workers, words, show)
            for path in result.write(out):
                if path.suffix == ".md":
                    console.print(f"written: {path}", highlight=False)
            finished.append(asdict(result))
            failed += failures
            if json:
                write_atomically(json, json_format.dumps(finished, indent=1).encode())
    for sentence in failed:
        console.print(f"[red]failed:[/] {sentence}", highlight=False)
    if failed:
        console.print("The rest is written and kept; the same command again tries only what failed.")
        raise typer.Exit(1)


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
