"""What a run would do, before it does it: cells, what the cache has, time, what is missing and where to get it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mergetta.adapters import find_method
from mergetta.bench.protocol import expert_key, family_of, source_of, stored, target_of
from mergetta.bench.runner import cells_of
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite
from mergetta.errors import MergettaError
from mergetta.runtimes.torch_runtime import TorchRuntime

PASSES = {
    "source": 1,
    "bn-stats": 1,
    "t3a": 1,
    "cola": 1,
    "merge": 1,
    "zo-merge": 4.5,
    "tent": 3,
    "deyo": 4,
    "roid": 5.5,
}
"""Cost of each adapter in forward passes, roughly: a backward pass counts two, a second view what is kept of it."""


@dataclass
class Plan:
    title: str
    missing: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [self.title, *self.facts, *(f"missing: {sentence}" for sentence in self.missing)]


def plan_of(suite: Suite, expert: str, domains: Sequence[str], seeds: Sequence[int], cache: Path) -> Plan:
    plan = Plan(
        f"{suite.name}: {', '.join(suite.methods)} on {len(domains)} domains × {len(seeds)} seeds × {suite.samples:,} "
        f"images of {suite.family}, experts by {expert}"
    )
    for load in (family_of, source_of):
        try:
            load(suite)
        except MergettaError as error:
            plan.missing.append(str(error))
    if plan.missing:
        return plan
    store = Store(cache)
    cells = [cell for cell in cells_of(suite, expert, domains, seeds) if stored(suite, cell, store) is None]
    wanted = {(d, cell.seed) for cell in cells if cell.expert for d in suite.domains if d != cell.domain}
    experts = [key for key in wanted if store.expert(expert_key(suite, expert, *key)) is None]
    passes = sum(PASSES.get(suite.methods[cell.method].adapter, 3) for cell in cells) * suite.samples
    passes += len(experts) * PASSES.get(expert, 5) * (suite.expert_samples or suite.samples)
    total = len(domains) * len(seeds) * len(suite.methods)
    plan.facts += [
        f"images: {source_of(suite).description}",
        f"to measure: {len(cells)} of {total} results, {len(experts)} experts; the rest is in {cache}",
        f"about {passes * seconds_per_image(suite, domains[0]) / 3600:.1f} core-hours",
    ]
    if any(find_method(settings.adapter).backprop for settings in suite.methods.values()):
        plan.facts.append("back-propagation methods need several times the memory of inference")
    return plan


def seconds_per_image(suite: Suite, domain: str) -> float:
    """Of one forward pass, measured on one small batch."""
    runtime = TorchRuntime(family_of(suite))
    small = suite.model_copy(update={"samples": min(32, suite.samples)})
    images, _ = next(iter(target_of(small, domain).stream(0, 32)))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        runtime(images)
        times.append((time.perf_counter() - start) / len(images))
    return min(times)
