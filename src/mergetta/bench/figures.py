"""Records → figures, as SVG text."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mergetta.bench.sheets import Drawing
from mergetta.bench.tables import Record, error_table

matplotlib.rcParams |= {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
}
matplotlib.rcParams |= {
    "svg.hashsalt": "mergetta",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def draw(size: tuple[float, float], plot: Callable[[Axes], None]) -> str:
    """SVG of one plot."""
    figure = plotted(size, plot)
    svg = svg_of(figure)
    plt.close(figure)
    return svg


def drawing(caption: str, size: tuple[float, float], plot: Callable[[Axes], None]) -> Drawing:
    """One plot, for a page and for a file."""
    return rendered(caption, plotted(size, plot))


def plotted(size: tuple[float, float], plot: Callable[[Axes], None]) -> Figure:
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    plot(axes)
    return figure


def rendered(caption: str, figure: Figure) -> Drawing:
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    svg = svg_of(figure)
    plt.close(figure)
    return Drawing(caption, svg, base64.b64encode(png.getvalue()).decode())


def svg_of(figure: Figure) -> str:
    """Without the XML preamble, so that it can stand in a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1),
        count=1,
    )


def colours(methods: Sequence[str], backprop: set[str]) -> dict[str, Any]:
    """Forward-only methods in colours, ours strongest; back-propagation in greys."""
    palette = cycle(plt.get_cmap("tab10").colors)  # type: ignore[attr-defined]
    greys = cycle(["#222222", "#777777", "#aaaaaa", "#555555", "#999999"])
    return {method: next(greys) if method in backprop else next(palette) for method in methods}


def all_figures(records: Sequence[Record]) -> dict[str, str]:
    """Caption → SVG."""
    backprop = {record["method"] for record in records if record["backprop"]}
    colour = colours(error_table(records).methods, backprop)
    figures = {
        "Error per domain in percent; lower is better; grey: back-propagation.": domain_errors(records, colour),
        "Error over the stream, of all images predicted so far, averaged over domains and seeds "
        "(methods within 1.5 times the best; dashed: back-propagation).": stream_errors(records, colour),
        "Forward passes and time per image, relative to plain inference (bn-stats), one process per core.": costs(
            records, colour
        ),
    }
    if any("ranks" in record for record in records):
        figures["Coefficients that zo-merge tunes in each group, mean over domains, in the order of the network."] = (
            ranks(records)
        )
    return figures


def domain_errors(records: Sequence[Record], colour: dict[str, Any]) -> str:
    table = error_table(records)

    def plot(axes: Axes) -> None:
        places = np.arange(len(table.domains))
        width = 0.8 / len(table.methods)
        for i, method in enumerate(table.methods):
            means = [table.cells[domain, method].mean for domain in table.domains]
            axes.bar(
                places + (i - len(table.methods) / 2 + 0.5) * width,
                means,
                width,
                label=method,
                color=colour[method],
            )
        axes.set_xticks(places, [domain.replace("_", " ") for domain in table.domains], rotation=35, ha="right")
        axes.set_ylabel("error, %")
        axes.legend(ncols=5, frameon=False, loc="upper left", bbox_to_anchor=(0, 1.2))

    return draw((10, 3.8), plot)


def stream_errors(records: Sequence[Record], colour: dict[str, Any]) -> str:
    average = error_table(records).average
    best = min(number.mean for number in average.values())

    def plot(axes: Axes) -> None:
        for method, shade in colour.items():
            if average[method].mean > 1.5 * best:
                continue
            chosen = [record for record in records if record["method"] == method]
            images = np.cumsum(chosen[0]["sizes"])
            curve = np.mean([100 * np.cumsum(r["wrong"]) / np.cumsum(r["sizes"]) for r in chosen], axis=0)
            axes.plot(images, curve, "--" if chosen[0]["backprop"] else "-", label=method, color=shade)
        axes.set_xlabel("images seen")
        axes.set_ylabel("error so far, %")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))

    return draw((8, 3.6), plot)


def costs(records: Sequence[Record], colour: dict[str, Any]) -> str:
    per_image = {m: np.mean([r["seconds"] / r["samples"] for r in records if r["method"] == m]) for m in colour}
    forwards = {m: np.mean([r["forwards"] for r in records if r["method"] == m]) for m in colour}
    base = per_image.get("bn-stats", min(per_image.values()))

    def plot(axes: Axes) -> None:
        places = np.arange(len(colour))
        axes.barh(places - 0.2, [forwards[m] for m in colour], 0.4, color="#9ecae1", label="forward passes")
        axes.barh(places + 0.2, [per_image[m] / base for m in colour], 0.4, color="#3182bd", label="time")
        axes.set_yticks(places, list(colour))
        axes.invert_yaxis()
        axes.set_xlabel("× plain inference")
        axes.legend(frameon=False)

    return draw((8, 3.2), plot)


def cost_ratios(rows: Sequence[Record]) -> str:
    """Time and memory of each variant relative to a plain export."""
    labels = [f"{row['runtime']} {row['variant']}, {row['model']}, {row['batch']}" for row in rows]

    def plot(axes: Axes) -> None:
        places = np.arange(len(rows))
        axes.barh(places - 0.2, [row["time_ratio"] for row in rows], 0.4, color="#3182bd", label="time")
        axes.barh(places + 0.2, [row["memory_ratio"] for row in rows], 0.4, color="#fdae6b", label="peak memory")
        axes.axvline(1, color="#222222", linewidth=0.8)
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel("× a plain export")
        axes.legend(frameon=False)

    return draw((9, 0.9 + 0.3 * len(rows)), plot)


def ranks(records: Sequence[Record]) -> str:
    chosen = [record["ranks"] for record in records if "ranks" in record]
    names = list(chosen[0])

    def plot(axes: Axes) -> None:
        axes.bar(
            np.arange(len(names)),
            [np.mean([r.get(name, 0) for r in chosen]) for name in names],
            color="#3182bd",
        )
        axes.set_xticks(np.arange(len(names)), names, rotation=90, fontsize=6)
        axes.set_ylabel("coefficients")

    return draw((10, 3.2), plot)
