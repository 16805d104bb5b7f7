"""The measurements behind docs/results/beyond.md that are no cells of a suite.

python scripts/beyond_results.py safety fashion-bn            # small batches, sorted classes, clean images: 10 minutes
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from mergetta.bench.tables import Record, error_table, number
from mergetta.data.streams import Batch, Domain, as_input

METHODS = ("source", "bn-stats", "cola", "zo-merge-plus-no-guard", "zo-merge-plus-no-caution", "zo-merge-plus")
ROWS = ("1", "8", "16", "sorted", "clean")
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


def in_classes(domain: Domain, suite: Suite, seed: int) -> Iterator[Batch]:
    """One class after the other, the images of each in an order by the seed."""
    mixed = np.random.default_rng(seed).permutation(len(domain.labels))
    order = mixed[np.argsort(domain.labels[mixed], kind="stable")]
    for start in range(0, len(order), suite.batch_size):
        chosen = order[start : start + suite.batch_size]
        yield as_input(domain.images[chosen]), domain.labels[chosen]


def in_batches(suite: Suite, size: int, domain: str, seed: int) -> Iterator[Batch]:
    return target_of(suite, domain).stream(seed, size)


def error_of(suite: Suite, cell: Cell, stream: Iterator[Batch], store: Store) -> float:
    adapter = create(suite, cell, runtime_of(suite, suite.methods[cell.method], cell.seed), store)
    wrong = total = 0
    for images, labels in stream:
        wrong += int(np.count_nonzero(np.argmax(adapter.predict(images), axis=1) != labels))
        total += len(labels)
    return 100 * wrong / total


def safety(*place: str) -> None:
    """Online error of a method on streams that are not what the suite has, in ONNX Runtime."""
    whole, store = suite_of(*place).on("onnx"), Store(default_cache())
    suite, seeds = whole.restricted(methods=["all"]), range(option("--seeds", place, 3))
    small, large = (suite.restricted(["all"], samples=min(count, suite.samples)) for count in (500, 2000))
    found = source_of(suite).clean(STATISTICS + 2000)
    assert found is not None
    clean = Domain("clean", found.images[np.arange(2000)], found.labels[:2000])  # the last ones have been measured on
    methods = [name for name in choice("--methods", place, METHODS) if name in suite.methods]
    rows = choice("--rows", place, ROWS)
    if unknown := set(rows) - set(ROWS):
        sys.exit(f"There are no rows {', '.join(sorted(unknown))}; choose from {', '.join(ROWS)}.")
    print(f"| {whole.name} {whole.family} | {' | '.join(methods)} |\n|---|{'---:|' * len(methods)}", flush=True)

    def row(title: str, domains: tuple[str, ...], stream: Callable[[str, int], Iterator[Batch]]) -> None:
        cells = []
        for name in methods:
            expert = "roid" if suite.methods[name].uses_experts else None
            errors = [
                float(np.mean([error_of(suite, Cell(name, expert, d, seed), stream(d, seed), store) for d in domains]))
                for seed in seeds
            ]
            cells.append(str(number(errors)))
        print(f"| {title} | {' | '.join(cells)} |", flush=True)

    for size in (1, 8, 16):
        if str(size) in rows:
            title = f"batches of {size}, {small.samples:,} images"
            row(title, suite.domains, partial(in_batches, small, size))
    if "sorted" in rows:
        title = f"one class after the other, {large.samples:,} images"
        row(title, suite.domains, lambda d, s: in_classes(target_of(large, d), whole, s))
    if "clean" in rows:
        title = "clean, 2,000 images, all but one expert"
        row(title, suite.domains[:1], lambda d, s: clean.stream(s, suite.batch_size))


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
