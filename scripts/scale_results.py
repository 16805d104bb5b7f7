"""What a hub pays per expert, for 10 to 10,000 of them: a pool of 50 groups × 768, the norm layers of a ViT-B/16.

python scripts/scale_results.py                      # experts of 15 domains plus noise; about 5 minutes
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

from mergetta import Bundle, build_bundle
from mergetta.merging.scatter import Pool

GROUPS, SIZE, DOMAINS = 50, 768, 15
COUNTS = (10, 30, 100, 300, 1000, 3000, 10000)
CHECKED = (30, 300)
"""Where the pool is compared with a rebuild: fewer experts than a Krylov space is large, and more."""
Values = dict[str, np.ndarray]


class Fabricated:
    """Expert number i, always the same: its domain's direction (unless noise only) plus noise, in every group."""

    def __init__(self, noise: bool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.noise, self.seed = noise, seed
        self.base: Values = {f"group{g}": 1 + 0.1 * rng.normal(size=SIZE).astype(np.float32) for g in range(GROUPS)}
        self.domains = 0.02 * rng.normal(size=(DOMAINS, GROUPS, SIZE)).astype(np.float32)

    def __getitem__(self, i: int) -> Values:
        rng = np.random.default_rng((self.seed, i))
        moved = 0.01 * rng.standard_normal((GROUPS, SIZE), dtype=np.float32)
        if not self.noise:
            moved += self.domains[rng.integers(DOMAINS)]
        return {name: base + moved[g] for g, (name, base) in enumerate(self.base.items())}

    def chunks(self, first: int, last: int, size: int = 256) -> Iterator[list[Values]]:
        for start in range(first, last, size):
            yield [self[i] for i in range(start, min(start + size, last))]


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
    print("experts  catch-up s  first bundle s     add s  bundle s  without s  peak MB", flush=True)
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
            "add": seconds(lambda: pool.add(newest)),  # noqa: B023
            "bundle": seconds(lambda: pool.bundle(initial=initial, **options)),  # noqa: B023
            "without": seconds(lambda: pool.bundle(initial=initial, without=[oldest], **options)),  # noqa: B023
            "peak": peak_mb(),
        }
        rows.append(row)
        print("{:7d}{:12.2f}{:16.2f}{:10.3f}{:10.2f}{:11.2f}{:9.0f}".format(*row.values()), flush=True)
    return rows


def check(experts: Fabricated, count: int, options: dict[str, Any]) -> None:
    """Leaving an expert out, and removing it, against a rebuild from scratch without it."""
    pool = Pool(experts.base)
    for chunk in experts.chunks(0, count):
        pool.add_many(chunk)
    gone = count // 2
    options = {**options, "initial": 1.0 / count}
    rebuilt = build_bundle(experts.base, [experts[i] for i in range(count) if i != gone], **options)
    without = difference(pool.bundle(without=[experts[gone]], **options), rebuilt)
    pool.remove(experts[gone])
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
    parser.add_argument("--noise", action="store_true", help="experts that have nothing in common")
    parser.add_argument("--rank", type=int, help="this many directions in every group instead of ARS")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    arguments = parser.parse_args()
    chosen: dict[str, Any] = {"tolerance": None, "max_rank": arguments.rank} if arguments.rank else {}
    fabricated = Fabricated(arguments.noise, arguments.seed)
    measured = measure(fabricated, arguments.counts, chosen)
    for number in CHECKED:
        check(fabricated, number, chosen)
    if arguments.plot:
        plot(measured, arguments.plot)
