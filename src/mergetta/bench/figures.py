"""Records → figures, as SVG text."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mergetta.bench.sheets import Drawing
from mergetta.bench.tables import OURS, SOURCE, ErrorTable, Number, Record, error_table, is_ours

INK, GREY, PALE, ACCENT, VARIANT = "#1a1a1a", "#8c8c8c", "#c4c4c4", "#e4572e", "#f2a48e"
"""Of text and axes, which a page may replace; of other methods, of back-propagation, of ours, and of its variants."""

matplotlib.rcParams |= {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.hashsalt": "mergetta",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.35,
    "grid.color": GREY,
}


def draw(size: tuple[float, float], plot: Callable[[Axes], None]) -> str:
    """SVG of one plot."""
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    plot(axes)
    return finished(figure)


def drawing(
    caption: str, size: tuple[float, float], plot: Callable[[Any], None], grid: tuple[int, int] = (1, 1)
) -> Drawing:
    """One plot, or an array of plots in a grid, for a page and for a file."""
    figure, axes = plt.subplots(*grid, figsize=size, layout="constrained")
    plot(axes)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return Drawing(caption, finished(figure), base64.b64encode(png.getvalue()).decode())


def finished(figure: Figure) -> str:
    """SVG without the XML preamble, so that it can stand in a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    svg = buffer.getvalue()
    head, end, rest = svg[svg.index("<svg") :].partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", head) + end + rest


def name_rows(axes: Axes, names: Sequence[str], measured: str) -> None:
    """The names of the rows, from the top down, and what is measured along them."""
    axes.set_yticks(np.arange(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(measured)


def bars(axes: Axes, numbers: Mapping[str, Number], measured: str, colours: Sequence[str]) -> None:
    """A row for each number, with its spread."""
    means, spreads = zip(*((number.mean, number.spread or 0.0) for number in numbers.values()), strict=True)
    axes.barh(np.arange(len(numbers)), means, xerr=spreads, color=colours)
    name_rows(axes, list(numbers), measured)


def shade(method: str) -> str:
    """Ours stands out, variants of it less so, and all others are grey."""
    return ACCENT if is_ours(method) else VARIANT if method.startswith(OURS) else GREY


def all_figures(records: Sequence[Record]) -> dict[str, str]:
    """Caption → SVG."""
    table = error_table(records)
    backprop = {record["method"] for record in records if record["backprop"]}
    ours = f"orange: {OURS}; " if OURS in table.methods else ""
    plain = "bn-stats" if "bn-stats" in table.methods else "the quickest"
    figures = {
        f"Error per domain in percent, further left is better; {ours}ring: no adaptation; grey: all others "
        "(cross: back-propagation on the target itself).": domain_errors(table, backprop),
        "Error over the stream, of all images predicted so far, averaged over domains and seeds "
        "(methods within 1.5 times the best; dashed: back-propagation).": stream_errors(records, table),
        f"Forward passes, and time relative to {plain}, per image, one process per core.": costs(
            records, table.methods
        ),
    }
    if any("ranks" in record and record["settings"]["adapter"] == "zo-merge" for record in records):
        figures["Coefficients that zo-merge tunes in each group, mean over domains, in the order of the network."] = (
            ranks(records)
        )
    return figures


def domain_errors(table: ErrorTable, backprop: set[str]) -> str:
    """One line per domain: from the source model to ours, with all others as grey marks."""
    rows = [*((domain.replace("_", " "), domain) for domain in table.domains), ("average", None)]

    def error(method: str, domain: str | None) -> float:
        return (table.average[method] if domain is None else table.cells[domain, method]).mean

    def plot(axes: Axes) -> None:
        places = np.arange(len(rows))
        found = {method: [error(method, domain) for _, domain in rows] for method in table.methods}
        if SOURCE in found and OURS in found:
            axes.hlines(places, found[OURS], found[SOURCE], color=ACCENT, alpha=0.35, linewidth=3, zorder=1)
        for method, errors in found.items():
            if method not in (SOURCE, OURS):
                marker = "x" if method in backprop else "|"
                axes.scatter(errors, places, s=40, c=GREY, marker=marker, linewidths=1.2, zorder=2)
        if SOURCE in found:
            axes.scatter(found[SOURCE], places, s=45, c="none", marker="o", edgecolors=INK, linewidths=1.3, zorder=3)
        if OURS in found:
            axes.scatter(found[OURS], places, s=70, c=ACCENT, marker="o", zorder=4)
        axes.axhline(len(rows) - 1.5, color=INK, linewidth=0.6)
        axes.set_xlim(left=0)
        name_rows(axes, [name for name, _ in rows], "error, %")

    return draw((8, 1.0 + 0.27 * len(rows)), plot)


def stream_errors(records: Sequence[Record], table: ErrorTable) -> str:
    best = min(number.mean for number in table.average.values())
    shown = [method for method in table.methods if method == OURS or table.average[method].mean <= 1.5 * best]

    def plot(axes: Axes) -> None:
        ends: dict[str, float] = {}
        for method in sorted(shown, key=lambda method: method == OURS):  # ours lies on top
            chosen = [record for record in records if record["method"] == method]
            images = np.cumsum(chosen[0]["sizes"])
            curve = np.mean([100 * np.cumsum(r["wrong"]) / np.cumsum(r["sizes"]) for r in chosen], axis=0)
            style, width = "--" if chosen[0]["backprop"] else "-", 3.0 if method == OURS else 1.2
            axes.plot(images, curve, style, color=shade(method), linewidth=width)
            ends[method] = float(curve[-1])
        label_ends(axes, ends)
        axes.set_xlabel("images seen")
        axes.set_ylabel("error so far, %")

    return draw((8, 3.6), plot)


def label_ends(axes: Axes, ends: dict[str, float], ours: str = OURS) -> None:
    """The name of each line where it ends, instead of a legend."""
    low, high = axes.get_ylim()
    for method, height in apart(ends, (high - low) / 18).items():
        axes.annotate(
            method,
            (1.01, height),
            xycoords=("axes fraction", "data"),
            color=ACCENT if method == ours else INK,
            weight="bold" if method == ours else "normal",
            va="center",
            annotation_clip=False,
        )


def apart(heights: dict[str, float], distance: float) -> dict[str, float]:
    """Heights for labels, from the lowest up, no two nearer than that.

    >>> apart({"a": 1.0, "b": 0.9, "c": 5.0}, 0.5)
    {'b': 0.9, 'a': 1.4, 'c': 5.0}
    """
    found: dict[str, float] = {}
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        found[name] = max(height, *(placed + distance for placed in found.values())) if found else height
    return found


def costs(records: Sequence[Record], methods: Sequence[str]) -> str:
    per_image = {m: np.mean([r["seconds"] / r["samples"] for r in records if r["method"] == m]) for m in methods}
    forwards = {m: np.mean([r["forwards"] for r in records if r["method"] == m]) for m in methods}
    base = per_image.get("bn-stats", min(per_image.values()))

    def plot(axes: Axes) -> None:
        places, shades = np.arange(len(methods)), [shade(method) for method in methods]
        axes.barh(places - 0.2, [forwards[m] for m in methods], 0.38, color=shades, alpha=0.45, label="forward passes")
        axes.barh(places + 0.2, [per_image[m] / base for m in methods], 0.38, color=shades, label="time")
        name_rows(axes, methods, "pale: forward passes, full: time")

    return draw((8, 0.8 + 0.27 * len(methods)), plot)


def cost_ratios(rows: Sequence[Record]) -> str:
    """Time and memory of each variant relative to a plain export."""
    labels = [f"{row['runtime']} {row['variant']}, {row['model']}, {row['batch']}" for row in rows]

    def plot(axes: Axes) -> None:
        places = np.arange(len(rows))
        axes.barh(places - 0.2, [row["time_ratio"] for row in rows], 0.4, color="#3182bd", label="time")
        axes.barh(places + 0.2, [row["memory_ratio"] for row in rows], 0.4, color="#fdae6b", label="peak memory")
        axes.axvline(1, color=INK, linewidth=0.8)
        name_rows(axes, labels, "× a plain export")
        axes.legend(frameon=False)

    return draw((9, 0.9 + 0.3 * len(rows)), plot)


def ranks(records: Sequence[Record]) -> str:
    chosen = [record["ranks"] for record in records if "ranks" in record]
    names = [name for name in chosen[0] if any(found.get(name) for found in chosen)]

    def plot(axes: Axes) -> None:
        axes.bar(
            np.arange(len(names)),
            [np.mean([r.get(name, 0) for r in chosen]) for name in names],
            color=GREY,
        )
        axes.set_xticks(np.arange(len(names)), names, rotation=90, fontsize=6)
        axes.set_ylabel("coefficients")

    return draw((10, 3.2), plot)
