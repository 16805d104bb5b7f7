"""`mergetta bench SUITE`: compare methods by the protocol, print the table, write JSON and HTML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergetta.cli.options import NAMES, Checkpoint
from mergetta.cli.sweeps import Address, ExecutorName, bars, executor_of

if TYPE_CHECKING:
    from mergetta.bench.suite import Suite

QUICK_SAMPLES = 1000

Experts = Annotated[str, typer.Option(help="How the experts are made: `roid` or `deyo`.")]
Methods = Annotated[
    str | None, typer.Option(help="Only these methods, separated by commas; all: the suite's peers too.")
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
    suite: Annotated[
        str,
        typer.Argument(
            help="`fashion-bn`, `fashion-vit`, `cifar10-c`, `cifar100-c`, `imagenet-c`, "
            "`fashion-styles`, `cifar10-styles`, `imagenet-styles`, a YAML file; or `cost`."
        ),
    ],
    family: Family = None,
    checkpoint: Checkpoint = None,
    data: Data = None,
    styles: Annotated[int | None, typer.Option(help="How many style domains (styles suites only; default 10).")] = None,
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
    runtime: Annotated[
        str | None,
        typer.Option(help="`onnx` or `int8`: forward-only methods on the model that a device runs (default: PyTorch)."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"One seed, {QUICK_SAMPLES} images per domain.")] = False,
    json: Json = None,
    html: Html = None,
    cache: Cache = None,
    jobs: Jobs = None,
    executor: ExecutorName = "local",
    address: Address = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, its cost and what is missing; run nothing.")
    ] = False,
) -> None:
    """Compare methods on a suite: every target domain, the target's own expert left out, one pass, online error.

    Experts and results are cached by content: an interrupted run resumes, a second one is instant.
    `mergetta bench cost` measures time, forward passes and memory of every variant, as ratios to plain inference.

    Example: `mergetta bench cifar10-c --family wrn-28-10 --checkpoint Standard.pt --data CIFAR-10-C --dry-run`

    Example: `mergetta bench fashion-bn --methods bn-stats,zo-merge,roid --seeds 3 --html bench.html`

    Example: `mergetta bench fashion-bn --batch-size 1 --order sorted --methods source,bn-stats --samples 500`

    Example: `mergetta bench fashion-bn --continual` (with `--folds 2` instead: the same experts, with resets)

    Example: `mergetta bench cifar10-c --checkpoint Standard.pt --data /shared/CIFAR-10-C --executor ray --address auto`
    """
    from mergetta.bench.suite import load_suite

    if suite == "cost":
        if runtime is not None:
            raise typer.BadParameter("bench cost measures every runtime: leave --runtime out.")
        if batch_size or order or continual or folds:
            raise typer.BadParameter(
                "bench cost has no streams: leave --batch-size, --order, --continual, --folds out."
            )
        run_costs(split(methods), quick, json, html, jobs or 1)
        return
    if quick:
        seeds, samples = 1, min(samples or QUICK_SAMPLES, QUICK_SAMPLES)
    chosen = load_suite(suite, family, checkpoint, data, styles).with_streams(batch_size, order, continual, folds)
    if expert_samples is not None:
        chosen = chosen.model_copy(update={"expert_samples": expert_samples})
    if runtime is not None:
        chosen = chosen.on(runtime)
    if dry_run:
        show_plan(
            chosen.restricted(split(methods), split(domains), samples, severity), experts, split(domains), seeds, cache
        )
        return
    run(chosen, experts, methods, domains, seeds, samples, severity, json, html, cache, jobs, executor, address)


def run(
    whole: Suite,
    experts: str,
    methods: str | None,
    domains: str | None,
    seeds: int,
    samples: int | None,
    severity: int | None,
    json: Path | None,
    html: Path | None,
    cache: Path | None,
    jobs: int | None,
    executor: str = "local",
    address: str | None = None,
) -> None:
    from mergetta.bench.report import write_report
    from mergetta.bench.runner import Part, run_sweep
    from mergetta.bench.showcase import showcase
    from mergetta.bench.store import default_cache
    from mergetta.bench.tables import SPREAD, error_table, rich_table, settings_of, write_json

    console = wide_console()
    suite = whole.restricted(split(methods), split(domains), samples, severity)
    targets = split(domains) or list(suite.domains)
    seed_list = list(range(seeds))
    with executor_of(executor, address, jobs) as workers, bars(console) as show:
        part = Part(suite, experts, targets, seed_list)
        outcome = run_sweep([part], cache or default_cache(), workers, show)
    (records,) = outcome.records
    if outcome.failures:
        show_failures(outcome.failures)
        raise typer.Exit(1)
    apart = f" and {suite.expert_samples} others for its expert" if suite.expert_samples else ""
    devices = " and ".join(sorted({method.runtime for method in suite.methods.values() if method.runtime}))
    on = f", forward-only methods on {devices} models" if devices else ""
    note = (
        f"{suite.name}: {suite.family}{on}, {records[0]['data']}, {len(targets)} domains at severity {suite.severity}, "
        f"{suite.samples} images each{apart}, {suite.streams}, experts by {experts}, "
        f"{seeds} seed{'s' if seeds > 1 else ''}"
    )
    console.print(rich_table(error_table(records), note))
    if seeds > 1:
        console.print(SPREAD, style="dim")
    if json:
        write_json(json, suite, experts, seed_list, records)
        console.print(f"results: {json}")
    if html:
        settings, pictures = settings_of(suite, experts, seed_list), showcase(suite, targets, records)
        write_report(html, f"mergetta · {suite.name}", note, records, settings, pictures)
        console.print(f"page with figures: {html}")


def show_failures(failures: list[str]) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(f"failed: {failure}", markup=False)
    console.print(
        "No table, because results are missing. All others are kept: the same command tries only these again; "
        "--methods and --domains leave them out."
    )


def show_plan(suite: Suite, experts: str, domains: list[str] | None, seeds: int, cache: Path | None) -> None:
    """What a run would do."""
    from mergetta.bench.plan import plan_of
    from mergetta.bench.store import default_cache

    plan = plan_of(suite, experts, domains or list(suite.domains), list(range(seeds)), cache or default_cache())
    console = wide_console()
    for line in plan.lines():
        console.print(line, highlight=False)
    if plan.missing:
        raise typer.Exit(2)


def run_costs(models: list[str] | None, quick: bool, json: Path | None, html: Path | None, threads: int) -> None:
    """`bench cost`: here --methods names models and --jobs is the number of threads."""
    import json as json_format

    from rich.table import Table

    from mergetta.bench.cost import COLUMNS, MODELS, cells, cost_page, run_cost
    from mergetta.errors import MergettaError
    from mergetta.files import write_atomically

    chosen = models or (["fashion-bn"] if quick else list(MODELS))
    for model in chosen:
        if model not in MODELS:
            raise MergettaError(f"There is no model {model!r} to measure; choose from {', '.join(MODELS)}.")
    console = wide_console()
    rows = []
    with console.status("measuring") as status:
        for row in run_cost(chosen, quick, threads, lambda text: status.update(text)):
            rows.append(row)
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


def wide_console() -> Console:
    """Tables are wide: where there is no terminal to fit, they get the room."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def split(names: str | None) -> list[str] | None:
    return [name.strip() for name in (names or "").split(",") if name.strip()] or None
