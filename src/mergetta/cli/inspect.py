"""`mergetta inspect FILE`: what is in a file, or in a family."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mergetta.bundle import FORMAT as BUNDLE
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import FORMAT as EXPERT
from mergetta.expert import Expert
from mergetta.files import read_bytes, read_header

Rows = list[dict[str, Any]]


def command(
    file: Annotated[str, typer.Argument(help="An expert, a bundle, a checkpoint, or the name of an embedded family.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Show what a file holds: family, provenance, members, groups and blocks, ranks.

    Example: `mergetta inspect bundle.safetensors`
    """
    facts, tables = describe(file)
    if json:
        typer.echo(json_format.dumps({**facts, **tables}, indent=1))
        return
    console = Console()
    for key, value in facts.items():
        console.print(f"[bold]{escape(key)}[/]: {escape(str(value))}", highlight=False)
    for rows in tables.values():
        if rows:
            console.print(table_of(rows))


def table_of(rows: Rows) -> Table:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else escape(str(value)) for value in row.values()))
    return table


def describe(file: str) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Facts, and tables by their names."""
    if not Path(file).is_file():
        return describe_family(file)
    data = read_bytes(file)
    kind = read_header(data, file).get("format")
    if kind == EXPERT:
        expert = Expert.from_bytes(data, file)
        facts = {
            "format": kind,
            "family": expert.family,
            "domain": expert.domain,
            "provenance": dict(expert.provenance),
        }
        groups = [
            {"group": name, "size": v.size, "mean": float(v.mean()), "std": float(v.std())}
            for name, v in expert.groups.items()
        ]
        return facts, {"groups": groups}
    if kind == BUNDLE:
        bundle = Bundle.from_bytes(data, file)
        facts = {
            "format": kind,
            "family": bundle.family,
            "dimension": bundle.dimension,
            "settings": dict(bundle.settings),
        }
        moving = set(bundle.moving)
        groups = [
            {"group": name, "size": v.size, "rank": len(bundle.basis[name]), "moves": name in moving}
            for name, v in bundle.base.items()
        ]
        return facts, {"members": [] if bundle.members is None else bundle.members.listed(), "groups": groups}
    return describe_family(file)


def describe_family(name: str) -> tuple[dict[str, Any], dict[str, Rows]]:
    from mergetta.groups import paper_frozen
    from mergetta.models.discovery import find_groups
    from mergetta.models.family import load_family

    family = load_family(name)
    found = find_groups(family.model)
    try:
        frozen = set(paper_frozen(found))
    except MergettaError:
        frozen = set()
    facts = {
        "format": "family",
        "family": family.fingerprint,
        "architecture": family.architecture,
        "mean": family.preprocessing.mean,
        "std": family.preprocessing.std,
        "parameters": sum(p.numel() for p in family.model.parameters()),
        "norm weights": sum(group.size for group in found),
    }
    groups = [
        {
            "group": g.name,
            "size": g.size,
            "block": g.block,
            "kind": g.kind,
            "frozen by default": g.name in frozen,
        }
        for g in found
    ]
    return facts, {"groups": groups}
