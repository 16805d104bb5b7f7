"""The table of docs/results/peers.md: every adapter, what it gets wrong, what it costs and what it needs.

mergetta bench fashion-bn --methods all --json bn.json
mergetta bench fashion-vit --methods all --json vit.json
python scripts/peer_results.py bn.json vit.json     # costs: on the first suite that has the method; 10 minutes

Several files of one suite add up: slow methods may come with fewer seeds.

Time is that of whole streams, relative to plain inference, batch by batch in turn, by the very adapters of the error
column. Memory is the peak of a fresh process, with each method's defaults.
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
from mergetta.adapters import METHODS, Method
from mergetta.adapters.wrappers.mirrored import Mirrored
from mergetta.bench import cost
from mergetta.bench.cells import Cell
from mergetta.bench.inputs import family_of, target_of
from mergetta.bench.protocol import create, runtime_of
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import Suite, load_suite
from mergetta.bench.tables import ErrorTable, Record, best_rows, error_table
from mergetta.errors import MergettaError

DOMAIN, BATCHES = "fog", 20
ABLATIONS = (
    "-no-probe",
    "-no-similarity",
    "-no-scale",
    "-no-caution",
    "-no-moments",
    "-no-align",
)
KNOWLEDGE = {
    "bundle": "a bundle",
    "experts": "experts",
    "source": "mean and std of clean features",
    "fisher": "clean images, once",
    "prototypes": "labelled clean images, once",
}


class Peers:
    """One suite: its results, and the cost of its methods."""

    def __init__(self, name: str, records: list[Record]) -> None:
        self.name, self.records = name, records
        self.suite: Suite = load_suite(name).restricted(methods=["all"])
        self.table: ErrorTable = error_table(self.records)
        self.names = [name for name in self.table.methods if not name.endswith(ABLATIONS)]
        kinds = {group.kind for group in TorchRuntime(family_of(self.suite)).structure}
        self.norm = "BN" if "batch" in kinds else "LN"

    def method(self, name: str) -> Method:
        return METHODS[self.suite.methods[name].adapter]

    def variant(self, name: str) -> str:
        """What `bench.cost` calls it."""
        settings = self.suite.methods[name]
        return f"hybrid-{settings.options['layers']}" if settings.adapter == "hybrid" else settings.adapter

    def works(self, name: str) -> bool:
        """Whether its results differ from the source model's anywhere."""
        cells = self.table.cells
        return name == "source" or any(cells[d, name] != cells[d, "source"] for d in self.table.domains)

    def forwards(self, name: str) -> float:
        return float(np.mean([record["forwards"] for record in self.records if record["method"] == name]))

    def times(self, names: list[str]) -> dict[str, tuple[float, float]]:
        """Seconds relative to `source`, and backward passes per batch."""
        torch.set_num_threads(1)
        counts, backward, grad = {"backward": 0, "grad": 0}, torch.Tensor.backward, torch.autograd.grad

        def counted(*arguments: Any, **options: Any) -> None:
            counts["backward"] += 1
            backward(*arguments, **options)  # type: ignore[no-untyped-call]

        def counted_grad(*arguments: Any, **options: Any) -> Any:
            counts["grad"] += 1
            return grad(*arguments, **options)

        def runs() -> dict[str, Any]:
            return {name: self.run(name) for name in dict.fromkeys(("source", *names))}

        torch.Tensor.backward, torch.autograd.grad = counted, counted_grad  # type: ignore[method-assign,assignment]
        batch_size = self.suite.batch_size
        batches = [images for images, _ in target_of(self.suite, DOMAIN).stream(0, batch_size)][:BATCHES]
        for run in runs().values():  # warms up
            run(batches[0])
        predicts = runs()
        measured = {name: np.zeros(2) for name in predicts}
        for images in batches:
            for name, run in predicts.items():
                counts |= {"backward": 0, "grad": 0}
                start = time.perf_counter()
                run(images)
                seconds = time.perf_counter() - start
                # who asks for gradients hands them to the optimiser by a backward pass that sees no network
                measured[name] += seconds, counts["grad"] or counts["backward"]
        torch.Tensor.backward, torch.autograd.grad = backward, grad  # type: ignore[method-assign]
        return {n: (float(m[0] / measured["source"][0]), float(m[1] / len(batches))) for n, m in measured.items()}

    def run(self, name: str) -> Any:
        settings = self.suite.methods[name]
        runtime = runtime_of(self.suite, settings, 0)
        cell = Cell(name, "roid" if settings.uses_experts else None, DOMAIN, 0)
        adapter = create(self.suite, cell, runtime, Store(default_cache()))
        return (Mirrored(adapter) if settings.mirror else adapter).predict

    def memory(self, names: list[str]) -> dict[str, tuple[float, bool]]:
        """Peak relative to plain inference, and whether the method runs on int8."""
        with tempfile.TemporaryDirectory() as place:
            folder, model = Path(place), cost.Model(self.suite.family)
            cost.export_all(model.load(), folder, self.suite.batch_size)
            np.save(folder / "images.npy", next(target_of(self.suite, DOMAIN).stream(0, self.suite.batch_size))[0])
            plain = cost.peak_memory("torch", "inference", model, folder, 1)
            adapters = {name: self.suite.methods[name].adapter for name in names}
            peaks = {
                adapter: (cost.peak_memory("torch", variant, model, folder, 1) / plain, on_int8(adapter, folder))
                for adapter, variant in {adapters[name]: self.variant(name) for name in names}.items()
            }
        return {name: peaks[adapter] for name, adapter in adapters.items()}


def on_int8(name: str, folder: Path) -> bool:
    if METHODS[name].prompts:
        return False  # needs an input of its own, which the exported model does not have
    try:
        predict, _ = cost.onnx_variant(f"int8-{name}", folder, 1)
        return bool(np.isfinite(predict(np.load(folder / "images.npy"))).all())
    except MergettaError:
        return False


def main(*files: str) -> None:
    records: dict[str, list[Record]] = {}
    for file in files:
        content = json.loads(Path(file).read_text())
        records.setdefault(content["suite"], []).extend(content["results"])
    peers = [Peers(name, found) for name, found in records.items()]
    home: dict[str, Peers] = {}
    for each in peers:
        for name in each.names:
            home.setdefault(name, each)
    costs: dict[str, tuple[float, ...]] = {}
    for each in peers:
        names = [name for name, where in home.items() if where is each]
        times, memory = each.times(names), each.memory(names)
        costs |= {name: (*times[name], *memory[name]) for name in names}
    names = sorted(home, key=lambda name: home[name].method(name).backprop)
    errors = [[each.table.average.get(name) for name in names] for each in peers]
    forward_only = [[None if home[n].method(n).backprop else e for n, e in zip(names, c, strict=True)] for c in errors]
    best = best_rows(forward_only)
    titles = ["forward passes per image", "backward passes per batch", "time ×", "memory ×", "int8", "norms", "needs"]
    print(f"| | {' | '.join(f'{each.name}, error %' for each in peers)} | {' | '.join(titles)} |")
    print(f"|---|{'---:|' * (len(peers) + 4)}---|---|---|")
    for i, name in enumerate(names):
        cells = [
            "—" if column[i] is None else f"**{column[i]}**" if i in chosen else str(column[i])
            for column, chosen in zip(errors, best, strict=True)
        ]
        method, (seconds, backwards, peak, int8) = home[name].method(name), costs[name]
        cells += [f"{home[name].forwards(name):.2f}", f"{backwards:.0f}", f"{seconds:.1f}", f"{peak:.2f}"]
        cells += ["yes" if int8 else "no", ", ".join(e.norm for e in peers if name in e.names and e.works(name))]
        cells.append(", ".join(dict.fromkeys(KNOWLEDGE[n] for n in (method.needs, method.measured) if n)) or "nothing")
        print(f"| {f'*{name}*' if method.backprop else name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
