"""Runs the cells of a suite on a pool of processes, experts first; what is in the store is not run again."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from mergetta.bench.protocol import Cell, make_expert, run_cell
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


def cells_of(suite: Suite, expert: str, domains: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(method, expert if settings.uses_experts else None, domain, seed)
        for seed in seeds
        for domain in domains
        for method, settings in suite.methods.items()
    ]


def run_suite(
    suite: Suite,
    expert: str,
    domains: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    jobs: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """All records, in the order of the cells."""
    cells = cells_of(suite, expert, domains, seeds)
    trained = {
        (domain, cell.seed) for cell in cells if cell.expert for domain in suite.domains if domain != cell.domain
    }
    jobs = jobs or max(1, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=one_thread) as executor:
        experts = [
            executor.submit(train, suite, expert, domain, seed, cache)
            for seed in seeds
            for domain in suite.domains
            if (domain, seed) in trained
        ]
        for done, _ in enumerate(completed(experts), 1):
            progress(f"{expert} experts", done, len(experts))
        # one task per stream, so that its images are corrupted once
        streams = {
            (cell.domain, cell.seed): [c for c in cells if (c.domain, c.seed) == (cell.domain, cell.seed)]
            for cell in cells
        }
        futures = [executor.submit(run_cells, suite, group, cache) for group in streams.values()]
        for done, _ in enumerate(completed(futures), 1):
            progress("streams", done, len(futures))
        records = [record for future in futures for record in future.result()]
    return records


def completed(futures: Iterable[Future[Any]]) -> Iterator[Future[Any]]:
    """Futures as they finish; the first failure cancels the rest."""
    pending = set(futures)
    while pending:
        finished, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in finished:
            try:
                future.result()
            except BaseException:
                for other in pending:
                    other.cancel()
                raise
            yield future


def one_thread() -> None:
    """A process per core, a thread per process: small models gain nothing from more."""
    import cv2
    import torch

    torch.set_num_threads(1)
    cv2.setNumThreads(1)


def train(suite: Suite, method: str, domain: str, seed: int, cache: Path) -> None:
    make_expert(suite, method, domain, seed, Store(cache))


def run_cells(suite: Suite, cells: Sequence[Cell], cache: Path) -> list[dict[str, Any]]:
    return [run_cell(suite, cell, Store(cache)) for cell in cells]
