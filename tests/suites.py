"""Suites small enough for tests, and how they are swept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergetta.bench.executors import ProcessExecutor
from mergetta.bench.runner import Part, Progress, run_sweep
from mergetta.bench.suite import Suite, load_suite

THREE = ("fog", "contrast", "gaussian_noise")


def small(*methods: str, name: str = "fashion-bn", domains: tuple[str, ...] = THREE, samples: int = 60) -> Suite:
    suite = load_suite(name).restricted(methods=methods, samples=samples)
    return suite.model_copy(update={"domains": domains, "batch_size": 20})


def swept(
    suite: Suite,
    domains: Sequence[str],
    seeds: Sequence[int],
    cache: Path,
    jobs: int = 1,
    progress: Progress = lambda stage, done, total: None,
) -> list[dict[str, Any]]:
    """The records of a suite with ROID experts, by processes of this machine."""
    with ProcessExecutor(jobs) as executor:
        outcome = run_sweep([Part(suite, "roid", domains, seeds)], cache, executor, progress)
    assert not outcome.failures
    return outcome.records[0]
