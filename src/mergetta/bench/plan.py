"""What a run would do, before it does it: cells, what the cache has, time, what is missing and where to get it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mergetta.adapters import find_method
from mergetta.bench.cells import Cell, same_run
from mergetta.bench.inputs import family_of, source_of, target_of
from mergetta.bench.keys import cell_key
from mergetta.bench.runner import Origin, Part, cells_of, experts_of
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite
from mergetta.errors import MergettaError
from mergetta.runtimes.torch_runtime import TorchRuntime


@dataclass
class Plan:
    title: str
    missing: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        return [self.title, *self.facts, *(f"missing: {sentence}" for sentence in self.missing)]


def plan_of(part: Part, cache: Path) -> Plan:
    suite, expert, domains, seeds = part.suite, part.expert, part.domains, part.seeds
    apart = f" from {suite.expert_samples:,} other images" if suite.expert_samples else ""
    plan = Plan(
        f"{suite.name}: {', '.join(suite.methods)} on {counted(domains, 'domain')} × {counted(seeds, 'seed')} × "
        f"{suite.samples:,} images of {suite.family}, {suite.streams}, experts by {expert}{apart}"
    )
    for load in (family_of, source_of):
        try:
            load(suite)
        except MergettaError as error:
            plan.missing.append(str(error))
    if plan.missing:
        return plan
    todo = missing_of([part], cache)
    plan.missing += too_few(suite, todo)
    if plan.missing:
        return plan
    total = len(domains) * len(seeds) * len(suite.methods)
    known = total - len(todo.cells) - todo.along
    plan.facts += [
        f"images: {source_of(suite).description}",
        f"{total} results: {known} are in {cache}, {len(todo.cells)} are to be measured, "
        f"{todo.along} come with experts",
        f"experts to make: {len(todo.experts)}",
        f"about {todo.core_hours(suite, domains[0]):.1f} core-hours",
    ]
    if any(find_method(settings.adapter).backprop for settings in suite.methods.values()):
        plan.facts.append("back-propagation methods need several times the memory of inference")
    return plan


def plan_of_parts(name: str, parts: Sequence[Part], cache: Path) -> str:
    """What a study would measure."""
    todo = missing_of(parts, cache)
    hours = todo.core_hours(parts[0].suite, parts[0].domains[0]) if todo.cells else 0.0
    return f"{name}: {len(todo.cells)} results and {len(todo.experts)} experts to measure, about {hours:.1f} core-hours"


def counted(things: Sequence[object], name: str) -> str:
    """
    >>> counted(["fog"], "domain")
    '1 domain'
    """
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def too_few(suite: Suite, todo: Missing) -> list[str]:
    """Why it cannot be measured: a domain has fewer images, or a second pass would show the same."""
    targets = {(cell.domain, suite.samples, suite.passes - 1) for _, cell in todo.cells.values()}
    trained = suite.samples + (suite.expert_samples or 0)
    reasons = set()
    for domain, count, draw in targets | {(origin.domain, trained, 0) for origin in todo.experts.values()}:
        try:
            source_of(suite).enough(domain, suite.severity, count, draw)
        except MergettaError as error:
            reasons.add(str(error))
    return sorted(reasons)


@dataclass
class Missing:
    """What the cache lacks, by key."""

    cells: dict[str, tuple[Suite, Cell]]
    experts: dict[str, Origin]
    along: int = 0
    """Results that are measured on the way, because the method itself makes an expert that is missing."""

    def core_hours(self, suite: Suite, domain: str) -> float:
        """What it costs, by the time of a forward pass on a domain of a suite; in small batches it is longer."""
        methods = [
            (suite.methods[cell.method], suite.first or suite.samples * suite.passes)
            for suite, cell in self.cells.values()
        ]
        cells = sum((find_method(method.adapter).passes + bool(method.mirror)) * samples for method, samples in methods)
        made = [
            (origin.method, origin.suite.expert_samples or origin.suite.samples) for origin in self.experts.values()
        ]
        experts = sum(find_method(method).passes * samples for method, samples in made)
        slow, fast = (seconds_per_image(suite, domain, n) for n in (suite.batch_size, suite.training_batch_size))
        return (cells * slow + experts * fast) / 3600


def missing_of(parts: Sequence[Part], cache: Path) -> Missing:
    """What several parts share counts once."""
    store, missing = Store(cache), Missing({}, {})
    for part in parts:
        for cell in cells_of(part.suite, part.expert, part.domains, part.seeds):
            key = cell_key(part.suite, cell)
            if store.result(key) is None:
                missing.cells[key] = part.suite, cell
                missing.experts |= experts_of(part.suite, cell)
    missing.experts = {key: origin for key, origin in missing.experts.items() if store.expert(key) is None}
    for origin in missing.experts.values():
        own = same_run(*origin)
        if own and missing.cells.pop(cell_key(origin.suite, own), None):
            missing.along += 1
    return missing


def seconds_per_image(suite: Suite, domain: str, batch_size: int) -> float:
    """Of one core for one forward pass, measured on one batch of 32 at most; other work on the machine does not
    count.
    """
    runtime = TorchRuntime(family_of(suite))
    small = suite.model_copy(update={"samples": min(32, suite.samples)})
    images, _ = next(iter(target_of(small, domain).stream(0, min(32, batch_size))))
    times, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            start = time.process_time()
            runtime(images)
            times.append((time.process_time() - start) / len(images))
    finally:
        torch.set_num_threads(threads)
    return min(times)
