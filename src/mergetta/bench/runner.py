"""Runs the cells of a sweep, experts first; what is in the store is not run again, what fails stops nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mergetta.bench.cells import Cell, members
from mergetta.bench.executors import Executor, Task
from mergetta.bench.keys import cell_key, expert_key
from mergetta.bench.pools import make_expert
from mergetta.bench.protocol import run_cell, stored
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
ELSEWHERE = "it ran, but with other code, data or library versions than those of this process: make them the same"


@dataclass(frozen=True)
class Part:
    """One comparison of a sweep: the methods of a suite, with experts made in one way, on these domains and seeds."""

    suite: Suite
    expert: str
    domains: Sequence[str]
    seeds: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    records: list[list[dict[str, Any]]]
    """Of each part, in the order of its cells; without those that failed."""
    failures: list[str]
    """A sentence each."""


def cells_of(suite: Suite, expert: str, domains: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(method, expert if settings.uses_experts else None, domain, seed, before)
        for seed in seeds
        for domain, before in visits_of(suite, domains)
        for method, settings in suite.methods.items()
    ]


def visits_of(suite: Suite, domains: Sequence[str]) -> list[tuple[str, tuple[str, ...] | None]]:
    """The targets, each with those that come before it without a reset: in a continual run those of its fold."""
    if not suite.continual:
        return [(domain, None) for domain in domains]
    sequences: dict[tuple[str, ...], list[str]] = {}
    for domain in domains:
        sequences.setdefault(suite.fold_of(domain), []).append(domain)
    return [(domain, tuple(met[:place])) for met in sequences.values() for place, domain in enumerate(met)]


def run_sweep(
    parts: Iterable[Part],
    cache: Path,
    executor: Executor,
    progress: Progress = lambda stage, done, total: None,
) -> Outcome:
    """Measure what the cache lacks of all parts. What several parts have in common is made once.

    Experts come first, then the cells; the cells of one stream run in one process, and so do the visits of one adapter.
    """
    wanted = [(at_hand(part.suite), cells_of(part.suite, part.expert, part.domains, part.seeds)) for part in parts]
    sweep = Sweep(cache, executor, progress)
    sweep.measure([(suite, cell) for suite, cells in wanted for cell in cells])
    found = [[stored(suite, cell, sweep.store) for cell in cells] for suite, cells in wanted]
    return Outcome([[record for record in records if record] for records in found], sweep.failures)


def at_hand(suite: Suite) -> Suite:
    """The suite with paths that mean the same in another working folder."""
    places = {"checkpoint": suite.checkpoint, "folder": suite.folder}
    return suite.model_copy(update={name: path.absolute() for name, path in places.items() if path})


class Origin(NamedTuple):
    """What an expert is made from."""

    suite: Suite
    method: str
    domain: str
    seed: int


@dataclass
class Sweep:
    cache: Path
    executor: Executor
    progress: Progress
    failures: list[str] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return Store(self.cache)

    def measure(self, cells: Iterable[tuple[Suite, Cell]]) -> None:
        by_key = {cell_key(suite, cell): (suite, cell) for suite, cell in cells}
        missing = {key: found for key, found in by_key.items() if self.store.result(key) is None}
        experts = {key: experts_of(suite, cell) for key, (suite, cell) in missing.items()}
        lost = self.train({key: origin for needed in experts.values() for key, origin in needed.items()})
        on_the_way = {cell_key(suite, visit) for suite, cell in missing.values() for visit in cell.visits()[:-1]}
        tasks = {}
        for key, (suite, cell) in missing.items():
            after = f" after {len(cell.before)} others" if cell.before else ""
            name = f"{suite.name}: {cell.method} on {cell.domain}{after} at severity {suite.severity}, seed {cell.seed}"
            without = [lost[expert] for expert in experts[key] if expert in lost]
            if key in on_the_way or self.store.result(key) is not None:  # as an earlier visit, or by making an expert
                continue
            if without:
                self.failures.append(f"{name}: not tried, because there is no {without[0]}")
                continue
            paths = [self.store.expert_path(expert) for expert in experts[key]]
            needs = tuple(path.relative_to(self.cache).as_posix() for path in paths)
            stream = (suite.data, suite.folder, suite.severity, suite.samples, cell.domain, cell.seed)
            together = stream if cell.before is None else None  # the images of one stream are corrupted once
            tasks[key] = Task(name, partial(measure, suite, cell), needs, together)
        self.run("results", tasks, self.store.result)

    def train(self, origins: dict[str, Origin]) -> dict[str, str]:
        """Make the experts that are not there. Names those that could not be made, by key."""
        tasks = {
            key: Task(
                f"{origin.suite.name}: {origin.method} expert of {origin.domain} at severity {origin.suite.severity}, "
                f"seed {origin.seed}",
                partial(train, *origin),
            )
            for key, origin in origins.items()
            if self.store.expert(key) is None
        }
        methods = " and ".join(dict.fromkeys(origin.method for origin in origins.values()))
        return self.run(f"{methods} experts", tasks, self.store.expert)

    def run(self, stage: str, tasks: Mapping[str, Task], find: Callable[[str], object]) -> dict[str, str]:
        """Run tasks by the keys of what they put into the store. Names those that did not, by key."""
        if tasks:
            self.progress(stage, 0, len(tasks))
        reasons = {}
        for done, (task, reason) in enumerate(self.executor.run(list(tasks.values()), self.cache), 1):
            reasons[task] = reason
            self.progress(stage, done, len(tasks))
        lost = {key: task.name for key, task in tasks.items() if reasons.get(task) or find(key) is None}
        self.failures += [f"{name}: {reasons.get(tasks[key]) or ELSEWHERE}" for key, name in lost.items()]
        return lost


def experts_of(suite: Suite, cell: Cell) -> dict[str, Origin]:
    """What the experts of a cell are made from, by key."""
    if cell.expert is None:
        return {}
    origins = [Origin(suite, cell.expert, domain, seed) for domain, seed in members(suite, cell)]
    return {expert_key(*origin): origin for origin in origins}


def train(suite: Suite, method: str, domain: str, seed: int, cache: Path) -> None:
    make_expert(suite, method, domain, seed, Store(cache))


def measure(suite: Suite, cell: Cell, cache: Path) -> None:
    run_cell(suite, cell, Store(cache))
