"""The table of docs/results/peers.md: every adapter, what it gets wrong, what it costs and what it needs.

mergetta bench fashion-bn --methods all --json bn.json
mergetta bench fashion-vit --methods all --json vit.json
python scripts/peer_results.py bn.json vit.json           # costs: on the first family that has the method; 10 minutes
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergetta import TorchRuntime
from mergetta.adapters import METHODS
from mergetta.bench import cost
from mergetta.bench.protocol import load_domain
from mergetta.bench.tables import ErrorTable, best_rows, error_table
from mergetta.errors import MergettaError

BATCHES = 20
KNOWLEDGE = {
    "bundle": "a bundle",
    "experts": "experts",
    "source": "means of clean features",
    "fisher": "clean images, once",
    "prototypes": "labelled clean images, once",
}


def costs(model: str, batch_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Time relative to plain inference (interleaved, one stream of real images), passes, memory, int8."""
    domain = load_domain("fashion", None, "fog", 5, 0, BATCHES * batch_size)
    backwards, backward = [0], torch.Tensor.backward

    def counted(*arguments: Any, **options: Any) -> None:
        backwards[0] += 1
        backward(*arguments, **options)  # type: ignore[no-untyped-call]

    torch.Tensor.backward = counted  # type: ignore[method-assign]
    rows: dict[str, dict[str, Any]] = {name: dict.fromkeys(("seconds", "backwards"), 0) for name in names}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cost.export_all(model, folder, batch_size)
        runs = {name: cost.torch_variant(name, model, 1) for name in names}
        for images, _ in domain.stream(0, batch_size):
            np.save(folder / "images.npy", images)  # what memory is measured with
            for name, (predict, _) in runs.items():
                backwards[0], start = 0, time.perf_counter()
                predict(images)
                rows[name]["seconds"] += time.perf_counter() - start
                rows[name]["backwards"] += backwards[0]
        for name, (_, forwarded) in runs.items():
            rows[name]["forwards"] = forwarded() / len(domain.labels)
        runs.clear()
        for name, row in rows.items():
            row["peak"] = cost.peak_memory("torch", name, model, folder, 1).peak
            row["int8"] = name == "inference" or on_int8(name, folder)
    plain = rows["inference"]
    return {
        name: {
            **row,
            "backwards": row["backwards"] / BATCHES,
            "time": row["seconds"] / plain["seconds"],
            "memory": row["peak"] / plain["peak"],
        }
        for name, row in rows.items()
    }


def on_int8(name: str, folder: Path) -> bool:
    if METHODS[name].prompts:
        return False  # needs an input of its own, which the exported model does not have
    try:
        predict, _ = cost.onnx_variant(f"int8-{name}", folder, 1)
        return bool(np.isfinite(predict(np.load(folder / "images.npy"))).all())
    except MergettaError:
        return False


def norms(tables: list[ErrorTable], suites: list[str], name: str) -> str:
    """Where it does something: its results are not those of the source model."""
    found = {}
    for table, suite in zip(tables, suites, strict=True):
        batch_norm = any(group.kind == "batch" for group in TorchRuntime(cost.family_of(suite)).structure)
        if name in table.methods:
            same = all(table.cells[domain, name] == table.cells[domain, "source"] for domain in table.domains)
            found["BN" if batch_norm else "LN"] = name == "source" or not same
    return ", ".join(kind for kind, works in found.items() if works)


def main(*files: str) -> None:
    contents = [json.loads(Path(file).read_text()) for file in files]
    tables = [error_table(content["results"]) for content in contents]
    suites = [content["suite"] for content in contents]
    methods = [name for name in METHODS if any(name in table.methods for table in tables)]
    measured: dict[str, dict[str, Any]] = {}
    for suite, table, content in zip(suites, tables, contents, strict=True):
        new = [name for name in methods if name in table.methods and name not in measured]
        measured |= costs(suite, content["results"][0]["batch_size"], ["inference", *new]) if new else {}
    errors = [[table.average.get(name) for name in methods] for table in tables]
    best = best_rows([[None if METHODS[methods[i]].backprop else e for i, e in enumerate(column)] for column in errors])
    titles = ["forward passes per image", "backward passes per batch", "time ×", "memory ×", "int8", "norms", "needs"]
    print(f"| | {' | '.join(f'{suite}, error %' for suite in suites)} | {' | '.join(titles)} |")
    print(f"|---|{'---:|' * (len(suites) + 4)}---|---|---|")
    for i, name in enumerate(methods):
        method, row = METHODS[name], measured[name]
        cells = [
            "—" if column[i] is None else f"**{column[i]}**" if i in chosen else str(column[i])
            for column, chosen in zip(errors, best, strict=True)
        ]
        cells += [f"{row['forwards']:.2f}", f"{row['backwards']:.0f}", f"{row['time']:.1f}", f"{row['memory']:.2f}"]
        cells += ["yes" if row["int8"] else "no", norms(tables, suites, name)]
        cells.append(", ".join(dict.fromkeys(KNOWLEDGE[n] for n in (method.needs, method.measured) if n)) or "nothing")
        print(f"| {f'*{name}*' if method.backprop else name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
