"""Measurements of zo-merge-plus that are no cells of a suite.

python scripts/beyond_results.py safety fashion-bn            # small batches, orders of classes, clean images
python scripts/beyond_results.py safety cifar10-c resnet-20 CHECKPOINT DATA --samples 5000 --seeds 1
                                                              # … --methods source,zo-merge-plus --rows 8,sorted
python scripts/beyond_results.py length RESULTS.json          # error over the first 250, 500, … images of each method
python scripts/beyond_results.py long cifar10-c resnet-20 CHECKPOINT DATA     # the same up to 10,000 images
python scripts/beyond_results.py averages RESULTS.json …      # methods in rows, suites in columns, forward passes
python scripts/beyond_results.py hybrid fashion-bn            # error on one domain of each kind, memory by budget
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from mergetta import TorchRuntime
from mergetta.bench.cost import of_process
from mergetta.bench.protocol import (
    STATISTICS,
    Cell,
    build,
    create,
    family_of,
    online,
    pool,
    runtime_of,
    source_of,
    target_of,
)
from mergetta.bench.reproduce.setting import FEW, averages
from mergetta.bench.runner import run_suite
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import MethodSettings, Suite, load_suite
from mergetta.bench.tables import Number, Record, error_table, number
from mergetta.data.streams import Domain

METHODS = ("source", "bn-stats", "cola", "zo-merge-plus-no-mirror", "zo-merge-plus")
LENGTHS = (250, 500, 1000, 2000, 4000, 5000, 10_000)


def suite_of(name: str, *place: str) -> Suite:
    """A suite by its name, then perhaps family, checkpoint and data, then options."""
    given = list(takewhile(lambda word: not word.startswith("--"), place))
    family, checkpoint, data = [*given, None, None, None][:3]
    whole = load_suite(name, family, Path(checkpoint) if checkpoint else None, Path(data) if data else None)
    return whole.restricted(samples=option("--samples", place, whole.samples))


def option(name: str, options: Sequence[str], default: int) -> int:
    return int(options[options.index(name) + 1]) if name in options else default


def choice(name: str, options: Sequence[str], default: Sequence[str]) -> Sequence[str]:
    return options[options.index(name) + 1].split(",") if name in options else default


def streams_of(suite: Suite) -> dict[str, Suite]:
    """Row → the suite in such a stream. Experts are those of the suite."""
    short = suite.model_copy(update={"first": min(500, suite.samples)})
    small = {str(size): short.with_streams(batch_size=size) for size in (1, 8, 16)}
    return small | {order: suite.with_streams(order=order) for order in ("sorted", "correlated")}


def safety(*place: str) -> None:
    """Online error of methods on streams that are not what the suite has, in ONNX Runtime."""
    every = suite_of(*place).on("onnx").restricted(methods=["all"])
    suite = every.restricted([name for name in choice("--methods", place, METHODS) if name in every.methods])
    seeds, streams = range(option("--seeds", place, 3)), streams_of(suite)
    rows = choice("--rows", place, (*streams, "clean"))
    if unknown := set(rows) - {*streams, "clean"}:
        sys.exit(f"There are no rows {', '.join(sorted(unknown))}; choose from {', '.join(streams)}, clean.")
    print(f"| {suite.name} {suite.family} | {' | '.join(suite.methods)} |\n|---|{'---:|' * len(suite.methods)}")
    for name in rows:
        if name == "clean":
            title, errors = "clean, 2,000 images, all but one expert", clean_errors(suite, seeds)
        else:
            stream = streams[name]
            title = f"{stream.streams}, {stream.first or stream.samples:,} images"
            errors = error_table(run_suite(stream, "roid", stream.domains, seeds, default_cache())).average
        print(f"| {title} | {' | '.join(str(errors[method]) for method in suite.methods)} |", flush=True)


def clean_errors(suite: Suite, seeds: Sequence[int]) -> dict[str, Number]:
    found, store = source_of(suite).clean(STATISTICS + 2000), Store(default_cache())
    assert found is not None
    clean = Domain("clean", found.images[np.arange(2000)], found.labels[:2000])  # the last ones have been measured on

    def error(method: str, seed: int) -> float:
        settings = suite.methods[method]
        cell = Cell(method, "roid" if settings.uses_experts else None, suite.domains[0], seed)
        adapter = create(suite, cell, runtime_of(suite, settings, seed), store)
        stream = clean.stream(seed, suite.batch_size)
        wrong = [np.argmax(adapter.predict(images), axis=1) != labels for images, labels in stream]
        return 100 * float(np.mean(np.concatenate(wrong)))

    return {method: number([error(method, seed) for seed in seeds]) for method in suite.methods}


def length(file: str) -> None:
    """Error over the first images of the stream, averaged over domains and seeds, from a `bench --json` file."""
    print_lengths(json.loads(Path(file).read_text())["results"])


def print_lengths(records: list[Record]) -> None:
    methods, domains = (list(dict.fromkeys(record[name] for record in records)) for name in ("method", "domain"))
    print(f"| first images | {' | '.join(methods)} |\n|---|{'---:|' * len(methods)}")
    for count in LENGTHS:
        if count <= max(record["samples"] for record in records):
            means = averages(records, domains, count)
            print(f"| {count:,} | {' | '.join(str(means[method]) for method in methods)} |")


def long(*place: str) -> None:
    """Error over the first images of streams of 10,000 on one domain of each kind, one seed, with the experts of the
    tables (from the first 5,000 images).
    """
    suite = suite_of(*place).restricted(["cola", "zo-merge-plus", "zo-merge-plus-no-mirror", "deyo", "roid"])
    short, store, records = suite.restricted(samples=5000), Store(default_cache()), []
    for domain in FEW:
        for name, settings in suite.methods.items():
            cell = Cell(name, "roid" if settings.uses_experts else None, domain, 0)
            runtime = TorchRuntime(family_of(suite))
            records.append(online(suite, cell, create(short, cell, runtime, store), runtime))
    print_lengths(records)


def averages_of(*files: str) -> None:
    """Average error of each method and its forward passes per image; `bench --json` files of one family add up."""
    found: dict[str, dict[tuple[str, str, int], Record]] = {}
    for file in files:
        content = json.loads(Path(file).read_text())
        records = found.setdefault(f"{content['suite']} {content['settings']['family']}", {})
        records |= {(r["method"], r["domain"], r["seed"]): r for r in content["results"]}
    tables = {title: error_table(list(records.values())) for title, records in found.items()}
    methods = dict.fromkeys(method for table in tables.values() for method in table.methods)
    print(f"| | {' | '.join(f'{title} | passes' for title in tables)} |\n|---|{'---:|---:|' * len(tables)}")
    for method in methods:
        cells = []
        for title, table in tables.items():
            passes = [record["forwards"] for (name, _, _), record in found[title].items() if name == method]
            cells.append(f"{table.average[method]} | {np.mean(passes):.2f}" if passes else "|")
        print(f"| {method} | {' | '.join(cells)} |")


def hybrid(*place: str) -> None:
    """Error against a budget of memory, from the paper's method (0 layers) to back-propagation through all of them: how
    many layers `mergetta adapt --memory-budget` lets learn, the peak of that process, and their error on the suite, on
    one domain of each kind.
    """
    suite = suite_of(*place)
    family, merge = family_of(suite), suite.methods["zo-merge"]
    assert merge.bundle is not None
    steps = {"zo_lr" if name == "lr" else name: value for name, value in merge.options.items()}
    print("| budget, MB | layers that learn | peak, MB | error, % |\n|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family.save(folder / "family.safetensors")
        runtime, domain = TorchRuntime(family), suite.domains[0]
        pool_of = pool(suite, Cell("zo-merge", "roid", domain, 0), Store(default_cache()))
        build(runtime, merge.bundle, pool_of, 0).save(folder / "bundle.safetensors")
        np.savez(folder / "images.npz", images=target_of(suite, domain).images[np.arange(3 * suite.batch_size)])
        least, most = (adapted(folder, suite.batch_size, budget)[1] for budget in (None, 1_000_000.0))
        for share in (0, 0.1, 0.25, 0.5, 0.75, 1):
            budget = round(least + 25 + share * (most - least))
            layers, peak = adapted(folder, suite.batch_size, budget)
            options = {"layers": layers, **suite.experts["roid"], **steps}
            methods = {"hybrid": MethodSettings(adapter="hybrid", bundle=merge.bundle, options=options)}
            whole = suite.model_copy(update={"methods": methods})
            error = error_table(run_suite(whole, "roid", FEW, range(3), default_cache())).average["hybrid"]
            print(f"| {budget} | {layers} | {peak:.0f} | {error} |", flush=True)


def adapted(folder: Path, batch_size: int, budget: float | None) -> tuple[int, float]:
    """Layers that learn and peak memory of the command; without a budget, with none of them."""
    command = ["mergetta", "adapt", "images.npz", "--out", "e.safetensors", "--family", "family.safetensors"]
    command += ["--method", "hybrid", "--bundle", "bundle.safetensors", "--batch-size", str(batch_size)]
    command += ["--layers", "0"] if budget is None else ["--memory-budget", str(budget)]
    peak = 0.0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError, StopIteration):  # it is about to end
                peak = max(peak, of_process("VmHWM", process.pid))
            time.sleep(0.02)
        said = process.stdout.read() if process.stdout else ""
    if process.returncode:
        sys.exit(said)
    learn = re.search(r"(\d+) layers learn", said)
    return int(learn[1]) if learn else 0, peak


if __name__ == "__main__":
    what, *arguments = sys.argv[1:] or ["help"]
    tasks: dict[str, Callable[..., None]] = {
        "safety": safety,
        "length": length,
        "long": long,
        "averages": averages_of,
        "hybrid": hybrid,
    }
    if what not in tasks:
        sys.exit(__doc__)
    tasks[what](*arguments)
