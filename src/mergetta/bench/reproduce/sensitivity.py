"""Figure 5: k, r_max and ε; and beyond it δ, η, batch size, number of experts, length of the stream."""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib.axes import Axes

from mergetta.bench.cells import DEVICES
from mergetta.bench.figures import drawing
from mergetta.bench.reproduce.setting import Records, Setting, averages
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Row, Sheet
from mergetta.bench.store import Store
from mergetta.bench.suite import MethodSettings
from mergetta.bench.tables import Number

TITLE = "Sensitivity (Figure 5 of the paper, and beyond)"
KEEP = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
RANK = (1, 2, 5, 14)
TOLERANCE = (1e-4, 1e-3, 1e-2, 1e-1)
DELTA = (0.01, 0.1, 0.25, 1.0)
RATE = (0.0, 1e-3, 5e-3, 2e-2)
BATCH = (1, 16, 64, 200)
EXPERTS = (1, 5, 14, 28, 50)
SAMPLES = 2000
"""Of each stream, but for its length and the batch size."""
FEWER = 500
"""Images one by one take long."""
TOTAL = 1.4
"""Sum of the initial coefficients whatever the number of experts: the paper's 14 × 0.1."""
LENGTH = (250, 500, 1000, 2000, 3000, 4000, 5000, 10000)
NOTES = (
    f"At most the first {SAMPLES:,} images of each stream, and one domain of each kind of corruption unless others "
    "were asked for; experts as in the tables. It measures how much the settings matter, on the targets themselves; no "
    "preset was chosen by it.",
    "The axis r_max is without ARS, so that every group has that rank.",
    "Number of experts: of the other domains in random order, beyond these again by other devices (seeds); c_init is "
    f"{TOTAL} divided by their number.",
    f"Batch size: of the target's stream, {FEWER} images; the experts are made with the suite's own.",
    "Length: on all domains of the tables, the first images of the same streams; a batch is predicted before anything "
    "later is seen.",
)


def few(setting: Setting, samples: int = SAMPLES) -> Setting:
    """Fewer domains and images: there are many settings."""
    first = min(samples, setting.suite.samples)
    return dataclasses.replace(setting.few(), suite=setting.suite.model_copy(update={"first": first}))


def settings(setting: Setting) -> dict[str, dict[str, MethodSettings]]:
    """Axis → value → the method."""
    zo, own = setting.zo, setting.method("zo-merge").options
    count = {n: zo({"initial": TOTAL / n}).model_copy(update={"pool": n}) for n in EXPERTS}
    most = DEVICES * (len(setting.suite.domains) - 1)
    return {
        "k, share kept": {f"{v:g}": zo({"keep": v}) for v in KEEP},
        "r_max": {f"{v}": zo({"max_rank": v, "tolerance": None}) for v in RANK},
        "ε": {f"{v:g}": zo({"tolerance": v}) for v in TOLERANCE},
        "δ": {f"{v:g}": zo(delta=v) for v in sorted({*DELTA, float(own["delta"])})},
        "η": {f"{v:g}": zo(lr=v) for v in sorted({*RATE, float(own["lr"])})},
        "experts": {f"{n}": method for n, method in count.items() if n <= most},
    }


def parts(setting: Setting) -> dict[str, Part]:
    small = few(setting)
    found = {axis: small.part(values) for axis, values in settings(small).items()}
    own = setting.suite.training_batch_size
    compared = {name: setting.method(name) for name in ("source", "bn-stats", "merge", "zo-merge")}
    for size in BATCH:
        found[f"batch size {size}"] = few(setting, FEWER).part(compared, batch_size=size, expert_batch_size=own)
    shown = {name: setting.method(name) for name in ("bn-stats", "merge", "zo-merge", "roid")}
    found["length"] = setting.part(shown)
    return found


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    small = few(setting).domains
    curves: dict[str, dict[str, Number]] = {axis: averages(records[axis], small) for axis in settings(setting)}
    sheets = [
        Sheet(f"{axis}: error in percent ± spread.", (axis, "error, %"), rows(curve)) for axis, curve in curves.items()
    ]
    batches = {size: averages(records[f"batch size {size}"], small) for size in BATCH}
    sheets.append(grid("Batch size: error in percent ± spread.", "batch size", batches))
    lengths = {n: averages(records["length"], setting.domains, n) for n in LENGTH if n <= setting.suite.samples}
    sheets.append(grid("Length of the stream, in images: error in percent ± spread.", "images", lengths))
    lines: dict[str, dict[str, dict[str, Number]]] = {axis: {"zo-merge": curve} for axis, curve in curves.items()}
    lines["batch size"] = transposed(batches)
    lines["length of the stream"] = transposed(lengths)
    return sheets, [panels(lines)]


def rows(curve: dict[str, Number]) -> tuple[Row, ...]:
    return tuple(Row(value, (str(number),)) for value, number in curve.items())


def transposed(table: dict[int, dict[str, Number]]) -> dict[str, dict[str, Number]]:
    methods = list(dict.fromkeys(name for found in table.values() for name in found))
    return {m: {str(key): found[m] for key, found in table.items() if m in found} for m in methods}


def grid(caption: str, axis: str, table: dict[int, dict[str, Number]]) -> Sheet:
    lines = transposed(table)
    rows = (Row(name, tuple(str(line.get(str(key), "")) for key in table)) for name, line in lines.items())
    return Sheet(caption, (axis, *map(str, table)), tuple(rows))


def panels(lines: dict[str, dict[str, dict[str, Number]]]) -> Drawing:
    """One small plot per axis; bars are the spread over seeds."""

    def plot(axes: Any) -> None:
        for panel, (axis, curves) in zip(axes.ravel(), lines.items(), strict=True):
            draw_curves(panel, axis, {name: curve for name, curve in curves.items() if name != "source"})
        for panel in axes[:, 0]:
            panel.set_ylabel("error, %")

    caption = "Error of zo-merge by each setting, the others at the suite's own; bars: spread over seeds."
    return drawing(caption, (11, 5), plot, (2, 4))


def draw_curves(panel: Axes, axis: str, curves: dict[str, dict[str, Number]]) -> None:
    values = list(dict.fromkeys(value for curve in curves.values() for value in curve))
    for name, curve in curves.items():
        errors, spreads = [n.mean for n in curve.values()], [n.spread or 0.0 for n in curve.values()]
        places = [values.index(value) for value in curve]
        panel.errorbar(places, errors, yerr=spreads, marker="o", markersize=3, capsize=2, label=name)
    panel.set_xticks(range(len(values)), values, rotation=45 if len(values) > 5 else 0)
    panel.set_title(axis, fontsize=9)
    if len(curves) > 1:
        panel.legend(frameon=False, fontsize=7)
