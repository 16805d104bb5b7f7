"""Records → tables: domains × methods, mean and spread over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from mergetta.bench.suite import Suite
from mergetta.files import write_atomically

Record = dict[str, Any]
SPREAD = "spread: standard deviation over seeds"


@dataclass(frozen=True)
class Number:
    """A mean over seeds, with the standard deviation if there was more than one."""

    mean: float
    spread: float | None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.spread is None else f"{self.mean:.1f} ± {self.spread:.1f}"


def number(values: Sequence[float]) -> Number:
    return Number(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class ErrorTable:
    """Errors in percent; `average` is the mean over domains per seed, then over seeds."""

    methods: tuple[str, ...]
    domains: tuple[str, ...]
    cells: dict[tuple[str, str], Number]
    average: dict[str, Number]


def error_table(records: Iterable[Record]) -> ErrorTable:
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        errors.setdefault((record["domain"], record["method"]), {})[record["seed"]] = record["error"]
    domains = tuple(dict.fromkeys(domain for domain, _ in errors))
    methods = tuple(dict.fromkeys(method for _, method in errors))
    seeds = sorted({seed for by_seed in errors.values() for seed in by_seed})
    average = {
        method: number([float(np.mean([errors[domain, method][seed] for domain in domains])) for seed in seeds])
        for method in methods
    }
    cells = {key: number(list(by_seed.values())) for key, by_seed in errors.items()}
    return ErrorTable(methods, domains, cells, average)


def rich_table(table: ErrorTable, title: str) -> Table:
    """For the terminal; the best of each row in bold."""
    view = Table(title=title, title_justify="left", show_footer=True, pad_edge=False)
    view.add_column("error, %", "average", no_wrap=True)
    best = min(number.mean for number in table.average.values())
    for method in table.methods:
        mean = table.average[method]
        view.add_column(method, emphasise(mean, best), justify="right", footer_style="")
    for domain in table.domains:
        row = [table.cells[domain, method] for method in table.methods]
        best = min(number.mean for number in row)
        view.add_row(domain.replace("_", " "), *(emphasise(cell, best) for cell in row))
    return view


def emphasise(value: Number, best: float) -> str:
    return f"[bold green]{value}[/]" if round(value.mean, 1) <= round(best, 1) else str(value)


def markdown_table(table: ErrorTable) -> str:
    lines = ["| error, % | " + " | ".join(table.methods) + " |", "|---|" + "---:|" * len(table.methods)]
    for domain in table.domains:
        cells = [str(table.cells[domain, method]) for method in table.methods]
        lines.append(f"| {domain.replace('_', ' ')} | " + " | ".join(cells) + " |")
    lines.append("| **average** | " + " | ".join(f"**{table.average[method]}**" for method in table.methods) + " |")
    return "\n".join(lines) + "\n"


def settings_of(suite: Suite, expert: str, seeds: Sequence[int]) -> dict[str, Any]:
    """What a reader must know to compare or repeat the numbers."""
    return {**suite.model_dump(mode="json"), "expert": expert, "seeds": list(seeds)}


def write_json(path: Path, suite: Suite, expert: str, seeds: Sequence[int], records: Sequence[Record]) -> None:
    content = {
        "suite": suite.name,
        "family": records[0]["family"] if records else "",
        "settings": settings_of(suite, expert, seeds),
        "results": records,
    }
    write_atomically(path, json.dumps(content, indent=1).encode())
