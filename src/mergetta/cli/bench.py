"""`mergetta bench SUITE`: compare methods by the protocol, print the table, write JSON and HTML."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergetta.cli.options import NAMES, Checkpoint
from mergetta.cli.sweeps import Address, ExecutorName, bars, executor_of
from mergetta.errors import MergettaError

if TYPE_CHECKING:
    from mergetta.bench.executors import Executor
    from mergetta.bench.runner import Part
    from mergetta.bench.suite import Suite

QUICK_SAMPLES = 1000

SuiteName = Annotated[
    str,
    typer.Argument(
        help="`fashion-bn`, `fashion-vit`, `cifar10-c`, `cifar100-c`, `imagenet-c`, "
        "`fashion-styles`, `cifar10-styles`, `imagenet-styles`, or a YAML file."
    ),
]
Styles = Annotated[int | None, typer.Option(help="How many style domains (styles suites only; default 10).")]
RuntimeName = Annotated[
    str | None,
    typer.Option(help="`onnx` or `int8`: forward-only methods on the model that a device runs (default: PyTorch)."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, its cost and what is missing; run nothing.")]
Experts = Annotated[str, typer.Option(help="How the experts are made: `roid` or `deyo`.")]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Only these methods, separated by commas; all: the suite's peers too. NAME+mirror averages two views, "
        "NAME+runs filters over time where classes come in runs, NAME+head lets the classifier follow the stream."
    ),
]
Domains = Annotated[str | None, typer.Option(help="Only these target domains, separated by commas.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds.")]
Samples = Annotated[int | None, typer.Option(min=1, help="Images per domain (default: all of the suite's).")]
ExpertSamples = Annotated[
    int | None,
    typer.Option(
        min=1, help="Make experts from so many images after the targets' (default: from the same, otherwise corrupted)."
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, help="Images per batch of the targets' streams (default: the suite's); experts do not change."),
]
Order = Annotated[
    str | None,
    typer.Option(
        help="Classes in the targets' streams: `mixed` (default), `sorted` (one after the other) or `correlated` "
        "(Dirichlet 0.1, as NOTE and RoTTA have it)."
    ),
]
Continual = Annotated[
    bool,
    typer.Option("--continual", help="Targets one after the other without a reset, in two sequences (see --folds)."),
]
Folds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Deal the domains into so many folds: a target has the experts of the other folds. By default each domain "
        "is a fold (leave one out); with --continual there are 2, and each is a sequence.",
    ),
]
Passes = Annotated[
    int | None,
    typer.Option(
        min=1, help="Passes over each target, for long streams: each has corruptions and an order of its own."
    ),
]
Severity = Annotated[int | None, typer.Option(min=1, max=5, help="Severity of the corruptions.")]
Family = Annotated[str | None, typer.Option(help=f"Another model than the suite's own: {NAMES}")]
Data = Annotated[Path | None, typer.Option(help="The folder of the suite's images (default: below $MERGETTA_DATA).")]
Json = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write settings and results here.")]
Html = Annotated[Path | None, typer.Option("--html", dir_okay=False, help="Write a page with tables and figures here.")]
Cache = Annotated[
    Path | None, typer.Option(file_okay=False, help="Where experts and results are kept ($MERGETTA_CACHE).")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core).")]


def command(
    suite: SuiteName,
    family: Family = None,
    checkpoint: Checkpoint = None,
    data: Data = None,
    styles: Styles = None,
    experts: Experts = "roid",
    methods: Methods = None,
    domains: Domains = None,
    seeds: Seeds = 3,
    samples: Samples = None,
    expert_samples: ExpertSamples = None,
    severity: Severity = None,
    batch_size: BatchSize = None,
    order: Order = None,
    continual: Continual = False,
    folds: Folds = None,
    passes: Passes = None,
    runtime: RuntimeName = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"One seed, {QUICK_SAMPLES} images per domain.")] = False,
    json: Json = None,
    html: Html = None,
    cache: Cache = None,
    jobs: Jobs = None,
    executor: ExecutorName = "local",
    address: Address = None,
    dry_run: DryRun = False,
) -> None:
    """Compare methods on a suite: every target domain, the target's own expert left out, one pass, online error.

    Experts and results are cached by content: an interrupted run resumes, a second one is instant.

    Example: `mergetta bench cifar10-c --family wrn-28-10 --checkpoint Standard.pt --data CIFAR-10-C --dry-run`

    Example: `mergetta bench fashion-bn --methods bn-stats,zo-merge,roid --seeds 3 --html bench.html`

    Example: `mergetta bench fashion-bn --batch-size 1 --order sorted --methods source,bn-stats --samples 500`

    Example: `mergetta bench fashion-bn --continual` (with `--folds 2` instead: the same experts, with resets)

    Example: `mergetta bench fashion-bn --methods merge,zo-merge,roid --domains fog --passes 10 --seeds 1`

    Example: `mergetta bench cifar10-c --checkpoint Standard.pt --data /shared/CIFAR-10-C --executor ray --address auto`
    """
    check_installed()
    from mergetta.bench.store import default_cache
    from mergetta.bench.suite import load_suite

    whole = load_suite(suite, family, checkpoint, data, styles)
    if quick:
        seeds, samples = 1, min(samples or whole.samples, QUICK_SAMPLES)
    whole = whole.with_streams(batch_size, order, continual, folds, passes)
    whole = whole if runtime is None else whole.on(runtime)
    part = part_of(whole, experts, methods, domains, seeds, samples, severity, expert_samples)
    if dry_run:
        show_plan(part, cache or default_cache())
    else:
        compare(part, cache or default_cache(), executor_of(executor, address, jobs), json, html)


def check_installed() -> None:
    """What is missing is said before a suite is read, which would name its first method that needs PyTorch."""
    import_module("mergetta.bench.runner")


def part_of(
    whole: Suite,
    experts: str,
    methods: str | None,
    domains: str | None,
    seeds: int,
    samples: int | None,
    severity: int | None = None,
    expert_samples: int | None = None,
) -> Part:
    """What is asked for, of a suite."""
    from mergetta.bench.runner import Part

    suite = whole.restricted(split(methods), split(domains), samples, severity)
    if expert_samples is not None:
        suite = suite.model_copy(update={"expert_samples": expert_samples})
    return Part(suite, experts, split(domains) or list(suite.domains), list(range(seeds)))


def compare(part: Part, cache: Path, executor: Executor, json: Path | None, html: Path | None) -> None:
    """Measure what the cache lacks, and show it."""
    from mergetta.bench.plan import missing_of, too_few
    from mergetta.bench.report import write_report
    from mergetta.bench.runner import run_sweep
    from mergetta.bench.showcase import showcase
    from mergetta.bench.tables import BY_PASS, SPREAD, error_table, pass_table, rich_tables, settings_of, write_json

    for reason in too_few(part.suite, missing_of([part], cache)):
        raise MergettaError(reason)
    console = wide_console()
    with executor as workers, bars(console) as show:
        outcome = run_sweep([part], cache, workers, show)
    (records,) = outcome.records
    if outcome.failures:
        show_failures(outcome.failures)
        raise typer.Exit(1)
    suite, seeds, note = part.suite, part.seeds, caption(part, records[0]["data"])
    console.print(note, highlight=False, markup=False)
    console.print(*rich_tables(error_table(records), console), sep="\n")
    if suite.passes > 1:
        console.print(BY_PASS, *rich_tables(pass_table(records), console), sep="\n")
    if len(seeds) > 1:
        console.print(SPREAD, style="dim")
    if json:
        write_json(json, suite, part.expert, seeds, records)
        console.print(f"results: {json}")
    if html:
        settings, pictures = settings_of(suite, part.expert, seeds), showcase(suite, part.domains, records)
        write_report(html, f"mergetta · {suite.name}", note, records, settings, pictures)
        console.print(f"page with figures: {html}")


def caption(part: Part, data: str) -> str:
    """What a table was measured with."""
    suite, seeds, domains = part.suite, len(part.seeds), len(part.domains)
    apart = f" and {suite.expert_samples} others for its expert" if suite.expert_samples else ""
    devices = " and ".join(sorted({method.runtime for method in suite.methods.values() if method.runtime}))
    on = f", forward-only methods on {devices} models" if devices else ""
    return (
        f"{suite.name}: {suite.family}{on}, {data}, {domains} domain{'s' if domains > 1 else ''} at severity "
        f"{suite.severity}, "
        f"{suite.samples} images each{apart}, {suite.streams}, experts by {part.expert}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )


def show_failures(failures: list[str]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(f"failed: {failure}", markup=False)
    console.print(
        "No table, because results are missing. All others are kept: the same command tries only these again; "
        "--methods and --domains leave them out."
    )


def show_plan(part: Part, cache: Path) -> None:
    """What a run would do."""
    from mergetta.bench.plan import plan_of

    plan = plan_of(part, cache)
    console = wide_console()
    for line in plan.lines():
        console.print(line, highlight=False)
    if plan.missing:
        raise typer.Exit(2)


def wide_console() -> Console:
    """Tables are wide: where there is no terminal to fit, they get the room."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def split(names: str | None) -> list[str] | None:
    return [name.strip() for name in (names or "").split(",") if name.strip()] or None
