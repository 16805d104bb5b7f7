"""`mergetta demo`: the whole mission on real images in a few minutes, with nothing to download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mergetta.cli import bench
from mergetta.cli.sweeps import executor_of

STORY = """[bold]mergetta demo[/]: a small image classifier meets 15 kinds of corruption it was never trained on.
 1. Strong devices adapt to one corruption each by back-propagation and share their norm-layer weights (experts).
 2. The server condenses the experts into a bundle; the target's own expert is always left out.
 3. A weak device asks with forward passes only which members of the bundle fit, merges those, and predicts.
All of it is compared online on the same streams; tent, deyo and roid back-propagate on the target itself."""


def command(
    experts: bench.Experts = "roid",
    methods: bench.Methods = None,
    domains: bench.Domains = None,
    seeds: bench.Seeds = 1,
    samples: bench.Samples = bench.QUICK_SAMPLES,
    quick: Annotated[bool, typer.Option("--quick", help="Even quicker: 400 images per domain.")] = False,
    json: bench.Json = None,
    html: bench.Html = Path("mergetta-demo.html"),
    cache: bench.Cache = None,
    jobs: bench.Jobs = None,
) -> None:
    """Show the method working on the embedded suite `fashion-bn`: experts, bundles, every method, one table.

    Uses one seed and 1,000 images per domain; `mergetta bench fashion-bn` takes all 4,000 and three seeds.

    Example: `mergetta demo --json demo.json`
    """
    bench.check_installed()
    from mergetta.bench.store import default_cache
    from mergetta.bench.suite import load_suite

    Console().print(STORY, highlight=False)
    samples = min(samples or 400, 400) if quick else samples
    part = bench.part_of(load_suite("fashion-bn"), experts, methods, domains, seeds, samples)
    bench.compare(part, cache or default_cache(), executor_of("local", None, jobs), json, html)
