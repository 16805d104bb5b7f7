"""The measurements behind docs/results/beyond.md that are no cells of a suite.

python scripts/beyond_results.py safety fashion-bn            # small batches, sorted classes, clean images: 10 minutes
python scripts/beyond_results.py safety cifar10-c resnet-20 CHECKPOINT DATA
python scripts/beyond_results.py length RESULTS.json          # error over the first 250, 500, … images of each method
python scripts/beyond_results.py hybrid fashion-bn            # error and measured memory by how many layers learn
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mergetta import TorchRuntime
from mergetta.adapters.backprop.hybrid import layers_of
from mergetta.bench.cost import peak_memory, some_images
from mergetta.bench.protocol import Cell, create, family_of, source_of, target_of
from mergetta.bench.runner import run_suite
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import MethodSettings, Suite, load_suite
from mergetta.bench.tables import error_table
from mergetta.data.streams import Batch, Domain, as_input

METHODS = ("source", "bn-stats", "cola", "zo-merge-plus-no-guard", "zo-merge-plus")
LENGTHS = (250, 500, 1000, 2000, 4000, 5000, 10_000)


def suite_of(name: str, family: str | None = None, checkpoint: str | None = None, data: str | None = None) -> Suite:
    return load_suite(name, family, checkpoint and Path(checkpoint), data and Path(data))


def in_classes(domain: Domain, suite: Suite) -> Iterator[Batch]:
    """One class after the other."""
    order = np.argsort(domain.labels, kind="stable")
    for start in range(0, len(order), suite.batch_size):
        chosen = order[start : start + suite.batch_size]
        yield as_input(domain.images[chosen]), domain.labels[chosen]


def error_of(suite: Suite, cell: Cell, stream: Iterator[Batch], store: Store) -> float:
    runtime = TorchRuntime(family_of(suite))
    adapter = create(suite, cell, runtime, store)
    wrong = total = 0
    for images, labels in stream:
        wrong += int(np.count_nonzero(np.argmax(adapter.predict(images), axis=1) != labels))
        total += len(labels)
    return 100 * wrong / total


def safety(*place: str) -> None:
    """Online error of a method on streams that are not what the suite has."""
    whole, store = suite_of(*place), Store(default_cache())
    suite = whole.restricted(methods=["all"])
    small, long = suite.restricted(["all"], samples=500), suite.restricted(["all"], samples=2000)
    clean = source_of(suite).clean(2000)
    assert clean is not None
    print(f"| {whole.name} {whole.family} | {' | '.join(METHODS)} |\n|---|{'---:|' * len(METHODS)}", flush=True)

    def row(title: str, domains: tuple[str, ...], stream: Callable[[str, int], Iterator[Batch]]) -> None:
        cells = []
        for name in METHODS:
            expert = "roid" if suite.methods[name].uses_experts else None
            errors = [
                np.mean([error_of(suite, Cell(name, expert, d, seed), stream(d, seed), store) for d in domains])
                for seed in range(3)
            ]
            cells.append(f"{np.mean(errors):.1f} ± {np.std(errors, ddof=1):.1f}")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)

    for size in (1, 8, 16):
        row(f"batches of {size}, 500 images", suite.domains, lambda d, s, n=size: target_of(small, d).stream(s, n))
    row("one class after the other, 2,000 images", suite.domains, lambda d, s: in_classes(target_of(long, d), whole))
    row("clean, 2,000 images, all but one expert", suite.domains[:1], lambda d, s: clean.stream(s, suite.batch_size))


def length(file: str) -> None:
    """Error over the first images of the stream, averaged over domains and seeds, from a `bench --json` file."""
    records = json.loads(Path(file).read_text())["results"]
    methods = list(dict.fromkeys(record["method"] for record in records))
    known = [n for n in LENGTHS if n <= max(record["samples"] for record in records)]
    print(f"| first images | {' | '.join(methods)} |\n|---|{'---:|' * len(methods)}")
    for count in known:
        cells = []
        for method in methods:
            by_seed: dict[int, list[float]] = {}
            for record in records:
                if record["method"] == method:
                    sizes, wrong = (np.cumsum([0, *record[name]]) for name in ("sizes", "wrong"))
                    errors = np.interp(count, sizes, wrong)  # the last batch counts by the share that is meant
                    by_seed.setdefault(record["seed"], []).append(100 * float(errors) / count)
            means = [np.mean(errors) for errors in by_seed.values()]
            cells.append(f"{np.mean(means):.1f}" + (f" ± {np.std(means, ddof=1):.1f}" if len(means) > 1 else ""))
        print(f"| {count:,} | {' | '.join(cells)} |")


def hybrid(*place: str) -> None:
    """Error against peak memory, from the paper's method (0 layers) to back-propagation through all of them."""
    suite, lr = suite_of(*place), 1e-3
    family = family_of(suite)
    norms = len(layers_of(TorchRuntime(family).structure))
    counts = sorted({round(share * norms) for share in (0, 0.15, 0.3, 0.5, 0.75, 1)})
    merge = suite.methods["zo-merge"]
    steps = {"zo_lr" if name == "lr" else name: value for name, value in merge.options.items()}
    methods = {
        f"{n} layers": MethodSettings(adapter="hybrid", bundle=merge.bundle, options={"layers": n, "lr": lr, **steps})
        for n in counts
    }
    whole = suite.model_copy(update={"methods": methods})
    errors = error_table(run_suite(whole, "roid", whole.domains, range(3), default_cache())).average
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family.save(folder / "family.safetensors")
        np.save(folder / "images.npy", some_images(family, suite.batch_size))
        print("| layers that learn | peak memory, MB | error, % |\n|---:|---:|---:|")
        for n in counts:
            family_file = str(folder / "family.safetensors")
            peaks = [peak_memory("torch", f"hybrid-{n}", family_file, folder, 1).peak for _ in range(3)]
            print(f"| {n} | {np.mean(peaks):.0f} ± {np.std(peaks, ddof=1):.0f} | {errors[f'{n} layers']} |", flush=True)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:] or ["help"]
    tasks = {"safety": safety, "length": length, "hybrid": hybrid}
    if what not in tasks:
        sys.exit(__doc__)
    tasks[what](*arguments)
