"""Table 4: what each ingredient of the method adds, and other ways to merge beside it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from mergetta.bench.figures import drawing, name_rows
from mergetta.bench.reproduce import paper
from mergetta.bench.reproduce.setting import Records, Setting, averages
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Row, Sheet, rows_of
from mergetta.bench.store import Store

TITLE = "Ablation (Table 4 of the paper)"
ALL = {"max_rank": None, "tolerance": None, "reduce": False}
"""One coefficient per expert and group."""
RECIPES = ("average", "task-arithmetic", "ties", "dare", "breadcrumbs", "knots")
NOTES = (
    "NWS: trimmed task vectors. ZO: zeroth-order steps. RR: low-rank bases (rank r_max without ARS). ARS: rank by "
    "recovery error. All rows with ZO have the suite's δ, η and clamp.",
    "“ARS without RR” is not defined by the paper. Here: ARS' rule chooses how many of the task vectors themselves "
    "keep a coefficient of their own; the others share one.",
    "Other ways to merge have their published defaults and take no steps.",
)


def parts(setting: Setting) -> dict[str, Part]:
    setting = setting.few()
    trimmed = setting.bundle.keep
    methods = {
        "no adaptation": setting.method("source"),
        "batch statistics": setting.method("bn-stats"),
        "merge": setting.merged(keep=None, **ALL),
        "merge + NWS": setting.merged(keep=trimmed, **ALL),
        "merge + NWS + ZO": setting.zo({"keep": trimmed, **ALL}),
        "merge + NWS + ZO + RR": setting.zo({"tolerance": None}),
        "merge + NWS + ZO + ARS": setting.zo({"reduce": False}),
        "merge + NWS + ZO + RR + ARS": setting.zo(),
        "merge + NWS + RR + ARS, no steps": setting.merged(),
    }
    methods |= {f"other merge: {recipe}": setting.merged(recipe=recipe) for recipe in RECIPES}
    return {"roid": setting.part(methods)}


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    setting = setting.few()
    means = averages(records["roid"], setting.domains)
    counts: dict[str, list[int]] = {}
    for record in records["roid"]:
        counts.setdefault(record["method"], []).append(record.get("dimension") or 0)
    rows = []
    for row in rows_of({name: [number] for name, number in means.items()}):
        count = f"{np.mean(counts[row.name]):.0f}" if " + ZO" in row.name else ""
        rows.append(Row(row.name, (*row.cells, count), row.best))
    theirs = [Row(f"{n} (paper)", (str(v), ""), paper=True) for n, v in paper.ABLATION.items()]
    caption = (
        "Error in percent, average over the domains ± spread over seeds. Italics: the paper's, for ViT-B/16 on "
        "ImageNet-C."
    )
    sheet = Sheet(caption, ("variant", "error, %", "coefficients tuned"), (*rows, *theirs))

    def plot(axes: Axes) -> None:
        shown = {name: number for name, number in means.items() if name != "no adaptation"}
        errors, spreads = [n.mean for n in shown.values()], [n.spread or 0.0 for n in shown.values()]
        axes.errorbar(errors, np.arange(len(shown)), xerr=spreads, fmt="o", capsize=3)
        name_rows(axes, list(shown), "error, %")

    return [sheet], [drawing("Error of each variant; bars: spread over seeds.", (8, 0.6 + 0.28 * len(means)), plot)]
