"""Records → tables: domains × methods, mean and spread over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mergetta.bench.keys import code_of
from mergetta.bench.suite import Suite
from mergetta.files import write_atomically

Record = dict[str, Any]
BY_PASS = "The same by pass, means over domains."
SPREAD = "spread: standard deviation over seeds"
ENDLESS = Console(width=10**4).options
"""Of a terminal in which every table has room."""
OURS, SOURCE = "race-merge", "source"


def is_ours(name: str) -> bool:
    """Whether a row or a column is our own method, whatever is told after a comma.

    >>> is_ours("race-merge, ROID experts")
    True
    """
    return name.partition(",")[0] == OURS


@dataclass(frozen=True)
class Number:
    """A mean over seeds, with the standard deviation if there was more than one."""

    mean: float
    spread: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.spread is None else f"{self.mean:.1f} ± {self.spread:.1f}"


def number(values: Sequence[float]) -> Number:
    return Number(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def best_rows(columns: Sequence[Sequence[Number | None]]) -> list[set[int]]:
    """Per column, the rows that are best: nobody is better than these by more than the larger of the two spreads."""

    def beats(one: Number, other: Number) -> bool:
        return other.mean - one.mean > max(one.spread or 0.0, other.spread or 0.0, 0.05)

    chosen = []
    for column in columns:
        present = {i: number for i, number in enumerate(column) if number is not None}
        chosen.append({i for i, it in present.items() if not any(beats(other, it) for other in present.values())})
    return chosen


@dataclass(frozen=True)
class ErrorTable:
    """Errors in percent; `average` is the mean over domains per seed, then over the method's seeds."""

    methods: tuple[str, ...]
    domains: tuple[str, ...]
    """With the number of the visit before the name, in a continual run."""
    cells: dict[tuple[str, str], Number]
    average: dict[str, Number]


def error_table(records: Iterable[Record]) -> ErrorTable:
    """Records of several streams (batch sizes, orders) have columns of their own."""
    records = list(records)
    several = len({stream_of(record) for record in records}) > 1
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        visit = f"{record['visit']} " if record.get("visit") else ""
        method = f"{record['method']}, {stream_of(record)}" if several else record["method"]
        errors.setdefault((visit + record["domain"], method), {})[record["seed"]] = record["error"]
    domains = tuple(dict.fromkeys(domain for domain, _ in errors))
    methods = tuple(dict.fromkeys(method for _, method in errors))
    average = {
        method: number(
            [
                float(np.mean([errors[domain, method][seed] for domain in domains]))
                for seed in sorted(errors[domains[0], method])
            ]
        )
        for method in methods
    }
    cells = {key: number(list(by_seed.values())) for key, by_seed in errors.items()}
    return ErrorTable(methods, domains, cells, average)


def stream_of(record: Record) -> str:
    return f"batch {record.get('batch_size')}, {record.get('order')} order"


def pass_table(records: Iterable[Record]) -> ErrorTable:
    """Passes × methods, as means over domains: what a long stream teaches."""
    errors: dict[tuple[int, str, int], list[float]] = {}
    for record in records:
        for turn, error in enumerate(record["passes"], 1):
            errors.setdefault((turn, record["method"], record["seed"]), []).append(error)
    return error_table(
        {"domain": f"pass {turn}", "method": method, "seed": seed, "error": float(np.mean(found))}
        for (turn, method, seed), found in sorted(errors.items(), key=lambda item: item[0][0])
    )


def rich_tables(table: ErrorTable, console: Console) -> Iterator[Table]:
    """For the terminal, with as many methods side by side as it has room for; in bold what no other method beats by
    more than the spread.
    """
    averages = emphasised(table.average)
    rows = {domain: emphasised({m: table.cells[domain, m] for m in table.methods}) for domain in table.domains}

    def of(methods: Sequence[str]) -> Table:
        view = Table(show_footer=True, pad_edge=False)
        view.add_column("error, %", "average", no_wrap=True)
        for method in methods:
            view.add_column(method, averages[method], justify="right", footer_style="", no_wrap=True)
        for domain, row in rows.items():
            view.add_row(domain.replace("_", " "), *(row[method] for method in methods))
        return view

    left = list(table.methods)
    while left:
        count = len(left)
        while count > 1 and console.measure(of(left[:count]), options=ENDLESS).maximum > console.width:
            count -= 1
        yield of(left[:count])
        left = left[count:]


def emphasised(row: Mapping[str, Number]) -> dict[str, str]:
    (best,) = best_rows([list(row.values())])
    return {name: f"[bold green]{it}[/]" if i in best else str(it) for i, (name, it) in enumerate(row.items())}


def settings_of(suite: Suite, expert: str, seeds: Sequence[int]) -> dict[str, Any]:
    """What a reader must know to compare or repeat the numbers."""
    return {**suite.model_dump(mode="json"), "folds": suite.fold_count, "expert": expert, "seeds": list(seeds)}


def write_json(path: Path, suite: Suite, expert: str, seeds: Sequence[int], records: Sequence[Record]) -> None:
    content = {
        "suite": suite.name,
        "family": records[0]["family"] if records else "",
        "settings": settings_of(suite, expert, seeds),
        "code": {name: code_of(settings, expert) for name, settings in suite.methods.items()},
        "results": [{name: value for name, value in record.items() if name != "predicted"} for record in records],
    }
    write_atomically(path, json.dumps(content, indent=1).encode())
