"""What a hub pays per expert, for 10 to 10,000 of them, and how large bundles are; by default at the size of ViT-B/16.

python scripts/scale_results.py                      # experts of 15 domains plus noise; about 5 minutes
python scripts/scale_results.py --family fashion-bn  # BatchNorm, with moments
python scripts/scale_results.py --family resnet-50 --clusters    # the clusters alone, without scatter matrices
python scripts/scale_results.py --noise              # nothing in common: the hardest spectrum
python scripts/scale_results.py --rank 5             # five directions per group, where the paper's tolerance gives one
python scripts/scale_results.py --plot scale.svg

The first bundle after a jump starts from far away; "bundle" is the one after a single further expert.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mergetta import Bundle, Expert, build_bundle
from mergetta.merging.members import Clusters
from mergetta.merging.scatter import Pool

BOTTLENECKS = ((64, 3), (128, 4), (256, 6), (512, 3))
LAYERS = {
    "vit-b-16": [768] * 25,
    "fashion-bn": [16] * 5 + [32] * 5 + [64] * 5,
    "resnet-50": [64, *(size for width, n in BOTTLENECKS for size in ([width, width, 4 * width] * n + [4 * width]))],
}
"""Channels of each norm layer."""
DOMAINS, CHANNELS = 15, 64
COUNTS = (10, 30, 100, 300, 1000, 3000, 10000)
CHECKED = (30, 300)
"""Where the pool is compared with a rebuild: fewer experts than a Krylov space is large, and more."""
Values = dict[str, np.ndarray]


def layout(family: str) -> dict[str, int]:
    """Names and sizes of the groups; all but transformers have moments."""
    kinds = ["weight", "bias"] + ([] if family.startswith("vit") else ["running_mean", "running_var"])
    return {f"norm{i}.{kind}": size for i, size in enumerate(LAYERS[family]) for kind in kinds}


class Fabricated:
    """Expert number i, always the same: its domain's direction (unless noise only) plus noise, in every group."""

    def __init__(self, family: str, noise: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.noise, self.seed = noise, seed
        sizes = layout(family)
        self.base: Values = {
            name: 1 + 0.1 * rng.normal(size=n).clip(-5, 5).astype(np.float32) for name, n in sizes.items()
        }
        self.ends = np.cumsum(list(sizes.values()))
        self.domains = 0.02 * rng.normal(size=(DOMAINS, self.ends[-1])).astype(np.float32)

    def __getitem__(self, i: int) -> Expert:
        rng = np.random.default_rng((self.seed, i))
        domain = int(rng.integers(DOMAINS))
        moved = 0.01 * rng.standard_normal(self.ends[-1], dtype=np.float32)
        if not self.noise:
            moved += self.domains[domain]
        parts = zip(self.base.items(), np.split(moved, self.ends[:-1]), strict=True)
        signature = np.stack([np.full(CHANNELS, 0.01 * domain), np.ones(CHANNELS)])
        return Expert(
            {name: base + part for (name, base), part in parts}, domain=f"domain{domain}", signature=signature
        )

    def chunks(self, first: int, last: int, size: int = 256) -> Iterator[dict[int, Expert]]:
        for start in range(first, last, size):
            yield {i: self[i] for i in range(start, min(start + size, last))}


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def peak_mb() -> float:
    """VmHWM, the largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def difference(found: Bundle, expected: Bundle) -> float:
    assert [len(b) for b in found.basis.values()] == [len(b) for b in expected.basis.values()], "ranks differ"
    merged = expected.merge()
    return max(float(np.abs(values - merged[name]).max()) for name, values in found.merge().items())


def measure(experts: Fabricated, counts: Sequence[int], options: dict[str, Any]) -> list[dict[str, float]]:
    pool = Pool(experts.base)
    rows = []
    print("experts  catch-up s  first bundle s     add s  bundle s  without s  peak MB       bytes", flush=True)
    for count in counts:
        catch_up = 0.0
        for chunk in experts.chunks(pool.count, count - 1):
            catch_up += seconds(lambda chunk=chunk: pool.add_many(chunk))  # type: ignore[misc]
        initial = 1.0 / count
        first = seconds(lambda: pool.bundle(initial=initial, **options))  # noqa: B023
        newest, oldest = experts[count - 1], experts[0]
        row = {
            "experts": count,
            "catch-up": catch_up,
            "first": first,
            "add": seconds(lambda: pool.add(count - 1, newest)),  # noqa: B023
            "bundle": seconds(lambda: pool.bundle(initial=initial, **options)),  # noqa: B023
            "without": seconds(lambda: pool.bundle(initial=initial, without={0: oldest}, **options)),  # noqa: B023
            "peak": peak_mb(),
            "bytes": len(pool.bundle(initial=initial, **options).to_bytes()),
        }
        rows.append(row)
        print("{:7d}{:12.2f}{:16.2f}{:10.3f}{:10.2f}{:11.2f}{:9.0f}{:12,}".format(*row.values()), flush=True)
    return rows


def measure_clusters(experts: Fabricated, counts: Sequence[int]) -> None:
    """What members cost beside the scatter matrices, which in ResNet-50 have 0.9 GB; of 100 experts, the median."""
    rng = np.random.default_rng(0)
    basis = {name: np.linalg.qr(rng.normal(size=(base.size, 5)))[0].T for name, base in experts.base.items()}
    clusters = Clusters(experts.base)
    print("experts    add ms  members s  without s  memory MB       bytes", flush=True)
    for count in counts:
        times: list[float] = []
        for i in range(len(clusters), count):
            newest = experts[i]
            times = [*times[-99:], seconds(lambda i=i, newest=newest: clusters.add(i, newest))]  # type: ignore[misc]
        oldest = {0: experts[0]}
        members = seconds(lambda: clusters.members(basis))
        without = seconds(lambda: clusters.without(oldest))  # noqa: B023
        size = sum(tensor.nbytes for tensor in clusters.members(basis).tensors().values())
        row = (count, 1e3 * float(np.median(times)), members, without, clusters.nbytes / 2**20, size)
        print("{:7d}{:10.2f}{:11.3f}{:11.4f}{:11.2f}{:12,}".format(*row), flush=True)


def check(experts: Fabricated, count: int, options: dict[str, Any]) -> None:
    """Leaving an expert out, and removing it, against a rebuild from scratch without it."""
    pool = Pool(experts.base)
    for chunk in experts.chunks(0, count):
        pool.add_many(chunk)
    gone = count // 2
    options = {**options, "initial": 1.0 / count}
    rebuilt = build_bundle(experts.base, [experts[i] for i in range(count) if i != gone], **options)
    without = difference(pool.bundle(without={gone: experts[gone]}, **options), rebuilt)
    pool.remove(gone, experts[gone])
    removed = difference(pool.bundle(**options), rebuilt)
    moved = max(float(np.abs(v - experts.base[n]).max()) for n, v in rebuilt.merge().items())
    print(
        f"{count} experts, one left out: max difference to a rebuild {without:.1e} (without), {removed:.1e} (remove); "
        f"the merge moves weights by up to {moved:.1e}",
        flush=True,
    )


def plot(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (times, memory) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    counts = [row["experts"] for row in rows]
    for name, label in (("add", "add one expert"), ("bundle", "bundle"), ("without", "bundle without one")):
        times.plot(counts, [row[name] for row in rows], marker="o", label=label)
    memory.plot(counts, [row["peak"] for row in rows], marker="o")
    times.set(xscale="log", yscale="log", xlabel="experts", ylabel="seconds")
    memory.set(xscale="log", ylim=(0, None), xlabel="experts", ylabel="peak memory, MB")
    times.legend()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=LAYERS, default="vit-b-16", help="whose norm layers the experts have")
    parser.add_argument("--clusters", action="store_true", help="only what members cost")
    parser.add_argument("--noise", action="store_true", help="experts that have nothing in common")
    parser.add_argument("--rank", type=int, help="this many directions in every group instead of ARS")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    arguments = parser.parse_args()
    chosen: dict[str, Any] = {"tolerance": None, "max_rank": arguments.rank} if arguments.rank else {}
    fabricated = Fabricated(arguments.family, arguments.noise, arguments.seed)
    if arguments.clusters:
        measure_clusters(fabricated, arguments.counts)
        raise SystemExit
    measured = measure(fabricated, arguments.counts, chosen)
    for number in CHECKED:
        check(fabricated, number, chosen)
    if arguments.plot:
        plot(measured, arguments.plot)
