"""The figures of docs/results/README.md, from the kept runs (docs/results/runs).

python scripts/findings.py     # draws docs/results/finding-*.svg; run it after `scripts/evidence.py add`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mergetta.bench.figures import ACCENT, GREY, INK, PALE, VARIANT, draw, label_ends
from mergetta.bench.tables import number
from mergetta.files import write_atomically

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BACKPROP = {"roid"}
FAMILIES = {
    "fashion-bn": "fashion-bn-4000-mixed-200",
    "fashion-vit": "fashion-vit-4000-mixed-64",
    "ResNet-20": "cifar10-c-resnet-20-4000-mixed-200",
}
SHORT = ("source", "bn-stats", "cola", "merge", "race-merge", "roid")
STREAMS = {
    "batches of 200": "fashion-bn-4000-mixed-200",
    "batches of 8": "fashion-bn-4000-mixed-8-onnx",
    "single frames": "fashion-bn-4000-mixed-1-onnx",
    "one class after the other": "fashion-bn-4000-sorted-200",
}
BARS = (("short", FAMILIES, SHORT), ("streams", STREAMS, ("source", "cola", "race-merge")))
LONG = {
    "fashion-bn, 15 domains": "fashion-bn-4000-mixed-200-10-passes",
    "fashion-vit, 4 domains": "fashion-vit-4000-mixed-64-10-passes-4-domains",
    "ResNet-20, 4 domains": "cifar10-c-resnet-20-10000-mixed-200-4-passes-4-domains",
}
LINES = {"race-merge": (ACCENT, "-"), "race-merge-no-refine": (VARIANT, "-"), "roid": (INK, "--"), "merge": (GREY, "-")}


def methods_of(run: str) -> dict[str, Any]:
    path = RESULTS / "runs" / f"{run}.json"
    return dict(json.loads(path.read_text())["methods"]) if path.exists() else {}


def average(entry: dict[str, Any]) -> tuple[float, float]:
    """Error over domains, and its spread over seeds."""
    found = number(np.mean(list(entry["errors"].values()), axis=0).tolist())
    return found.mean, found.spread or 0.0


def colour(method: str) -> str:
    return ACCENT if method == "race-merge" else INK if method in BACKPROP else PALE if method == "source" else GREY


def grouped(runs: dict[str, str], methods: tuple[str, ...]) -> str:
    """A group of bars per run, with the name and the error of each method beside its bar."""

    def plot(axes: Axes) -> None:
        place, ticks = 0.0, []
        for name, run in runs.items():
            known = methods_of(run)
            rows = [(method, *average(known[method])) for method in methods if method in known]
            for method, mean, spread in rows:
                axes.barh(place, mean, xerr=spread, color=colour(method), height=0.8)
                weight = "bold" if method == "race-merge" else "normal"
                axes.text(mean + spread + 0.6, place, f"{method} {mean:.1f}", va="center", fontsize=8, weight=weight)
                place += 1
            ticks.append((place - (len(rows) + 1) / 2, name))
            place += 0.7
        axes.set_yticks([height for height, _ in ticks], [name for _, name in ticks])
        axes.invert_yaxis()
        axes.set_xlabel("online error, %")
        axes.grid(axis="y", visible=False)

    count = sum(1.0 for run in runs.values() for method in methods if method in methods_of(run))
    return draw((8, 0.8 + 0.22 * count), plot)


def long_streams(name: str, run: str) -> str:
    """Error in each pass, a line per method."""
    known = methods_of(run)

    def plot(axes: Axes) -> None:
        ends = {}
        for method, (shade, style) in LINES.items():
            if method in known:
                curve = np.mean(known[method]["passes"], axis=0)
                axes.plot(1 + np.arange(len(curve)), curve, style, color=shade, linewidth=2)
                ends[method] = float(curve[-1])
        label_ends(axes, ends)
        axes.set_title(name)
        axes.set_xlabel("pass")
        axes.set_ylabel("error in the pass, %")

    return draw((8, 2.6), plot)


def main() -> None:
    figures = {name: grouped(runs, methods) for name, runs, methods in BARS}
    figures |= {f"long-{number_}": long_streams(*each) for number_, each in enumerate(LONG.items(), 1)}
    for name, svg in figures.items():
        path = RESULTS / f"finding-{name}.svg"
        write_atomically(path, svg.encode())
        print(path.name)


if __name__ == "__main__":
    main()
