"""`mergetta inspect FILE`: what is in a file, or in a family."""

from __future__ import annotations

import csv
import json as json_format
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mergetta.bundle import FORMAT as BUNDLE
from mergetta.bundle import Bundle
from mergetta.cli.options import NAMES, Checkpoint
from mergetta.errors import MergettaError
from mergetta.expert import FORMAT as EXPERT
from mergetta.expert import Expert
from mergetta.files import decode, read_bytes, read_header

Rows = list[dict[str, Any]]
CHECKPOINT = "mergetta.checkpoint"  # of mergetta.models.family, which imports torch
LONG = 300
"""Characters of an entry beyond which only its length is told."""


def command(
    file: Annotated[
        str,
        typer.Argument(help=f"Any file that mergetta writes (experts, bundles, ONNX, state, …), or a model: {NAMES}"),
    ],
    checkpoint: Checkpoint = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Show what a file holds: family, provenance, members, groups and blocks, ranks.

    Example: `mergetta inspect bundle.safetensors`
    """
    facts, tables = describe(file, checkpoint)
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


def describe(file: str, checkpoint: Path | None = None) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Facts, and tables by their names."""
    path = Path(file)
    if not path.is_file() or checkpoint is not None:
        return describe_family(file, checkpoint)
    if path.suffix in READERS:
        return READERS[path.suffix](path)
    data = read_bytes(file)
    header = read_header(data, file)
    kind = header.get("format")
    if kind == EXPERT:
        expert = Expert.from_bytes(data, file)
        facts = {
            "format": kind,
            "family": expert.family,
            "domain": expert.domain,
            "provenance": dict(expert.provenance),
            "source model": "included" if expert.source else "not included",
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
    if kind == CHECKPOINT:
        return describe_family(file)
    tensors, _ = decode(data, str(kind), header.get("version", 0), file)
    rows = [{"tensor": name, "type": str(t.dtype), "shape": str(t.shape)} for name, t in tensors.items()]
    return shortened(header), {"tensors": rows}


def shortened(header: dict[str, Any]) -> dict[str, Any]:
    """Long entries by their number."""
    return {
        key: f"{len(value)} entries" if isinstance(value, list | dict) and len(str(value)) > LONG else value
        for key, value in header.items()
    }


def describe_onnx(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    from mergetta.runtimes.onnx_session import metadata_of, open_session

    try:
        header = metadata_of(open_session(path, str(path), 1, ["CPUExecutionProvider"]))
    except MergettaError:  # so it is with a plain graph, which no session opens without a device's groups
        header = metadata_in(path)
        if not header:
            raise
    groups = [
        {"group": name, "size": size, "block": block, "kind": kind}
        for name, size, block, kind, *_ in header.pop("groups", [])
    ]
    return shortened({"format": "ONNX, not by mergetta", **header}), {"groups": groups}


def metadata_in(path: Path) -> dict[str, Any]:
    """What `mergetta export` wrote into a graph, without opening it: JSON after the key, in an entry of protobuf."""
    _, _, value = read_bytes(path).rpartition(b"\x0a\x08mergetta\x12")
    _, _, text = value.decode(errors="replace").partition("{")
    try:
        found: dict[str, Any] = json_format.JSONDecoder().raw_decode("{" + text)[0]
    except ValueError:
        return {}
    return found


def describe_json(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Results of `bench` and `evaluate`, settings of `corrupt`."""
    try:
        content = json_format.loads(read_bytes(path))
    except ValueError as error:
        raise MergettaError(f"{path} is not JSON: {error}.") from error
    return shortened(content if isinstance(content, dict) else {"entries": content}), {}


def describe_predictions(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    """How many images `run` put into each class."""
    lines = read_bytes(path).decode(errors="replace").splitlines()
    try:
        found = list(csv.DictReader(lines)) if path.suffix == ".csv" else [json_format.loads(line) for line in lines]
        classes = Counter(str(row["class"]) for row in found if not row.get("error"))
    except (ValueError, AttributeError, KeyError) as error:
        raise MergettaError(f"{path} does not hold predictions of `mergetta run`: {error}.") from error
    facts = {"format": "predictions", "images": len(found), "errors": len(found) - classes.total()}
    return facts, {"classes": [{"class": name, "images": count} for name, count in classes.most_common()]}


def describe_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Rows]]:
    """Weights that PyTorch saved."""
    from mergetta.models.checkpoints import read_tensors

    tensors = read_tensors(path)
    facts = {
        "format": "checkpoint of PyTorch",
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "use": f"--family module:function --checkpoint {path}",
    }
    rows = [{"tensor": name, "type": str(t.dtype), "shape": str(tuple(t.shape))} for name, t in tensors.items()]
    return facts, {"tensors": rows}


READERS = {
    **dict.fromkeys((".pt", ".pth", ".th", ".ckpt"), describe_checkpoint),
    ".onnx": describe_onnx,
    ".json": describe_json,
    ".jsonl": describe_predictions,
    ".csv": describe_predictions,
}


def describe_family(name: str, checkpoint: Path | None = None) -> tuple[dict[str, Any], dict[str, Rows]]:
    from mergetta.groups import paper_frozen
    from mergetta.models.discovery import find_classifier, find_groups
    from mergetta.models.family import load_family

    family = load_family(name, checkpoint)
    found, classifier = find_groups(family.model), find_classifier(family.model)
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
        "size": family.preprocessing.size,
        "classifier": f"{classifier.in_features} features to {classifier.out_features} classes",
        "classes": list(family.classes),
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
    return shortened(facts), {"groups": groups}
