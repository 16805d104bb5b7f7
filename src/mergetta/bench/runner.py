"""Runs the cells of a suite on a pool of processes, experts first; what is in the store is not run again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from mergetta.bench.protocol import Cell, make_expert, run_cell, stored
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite
from mergetta.workers import end_with_parent

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
    records = {cell: stored(suite, cell, Store(cache)) for cell in cells}
    missing = [cell for cell, record in records.items() if record is None]
    if missing:
        measure_all(suite, expert, missing, cache, jobs or max(1, os.cpu_count() or 1), progress)
    return [records[cell] or run_cell(suite, cell, Store(cache)) for cell in cells]


def measure_all(suite: Suite, expert: str, cells: Sequence[Cell], cache: Path, jobs: int, progress: Progress) -> None:
    """Experts first, then one task per stream, so that its images are corrupted once."""
    trained = dict.fromkeys(
        (domain, cell.seed) for cell in cells if cell.expert for domain in suite.domains if domain != cell.domain
    )
    streams: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        streams.setdefault((cell.domain, cell.seed), []).append(cell)
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, context, initializer=start_worker)
    try:
        stages: dict[str, list[Callable[[], None]]] = {
            f"{expert} experts": [partial(train, suite, expert, *key, cache) for key in trained],
            "streams": [partial(run_cells, suite, group, cache) for group in streams.values()],
        }
        for stage, tasks in stages.items():
            futures = [executor.submit(task) for task in tasks]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(stage, done, len(futures))
    finally:  # on Ctrl-C or a failure, what is queued is dropped; what was measured is in the store
        executor.shutdown(wait=False, cancel_futures=True)


def start_worker() -> None:
    """A process per core, a thread per process: small models gain nothing from more. Ctrl-C is the parent's.

    When the parent is killed, its workers end too; what they have measured is in the store.
    """
    import cv2
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)
    cv2.setNumThreads(1)


def train(suite: Suite, method: str, domain: str, seed: int, cache: Path) -> None:
    make_expert(suite, method, domain, seed, Store(cache))


def run_cells(suite: Suite, cells: Sequence[Cell], cache: Path) -> None:
    for cell in cells:
        run_cell(suite, cell, Store(cache))
