"""Figure 3: how many coefficients there are to optimise, and what zeroth-order steps on them achieve."""

from __future__ import annotations

from matplotlib.axes import Axes

from mergetta.bench.figures import drawing
from mergetta.bench.reproduce.ablation import ALL
from mergetta.bench.reproduce.setting import Records, Setting, averages
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Row, Sheet
from mergetta.bench.store import Store
from mergetta.bench.tables import number

TITLE = "Dimension reduction (Figure 3 of the paper)"
SMALL = 0.01
STARTS = {
    "norm weights directly": "batch statistics",
    f"norm weights directly, δ {SMALL}": "batch statistics",
    "merging": "merged",
    "merging + RR": "merged, RR",
    "merging + RR + ARS": "merged, RR + ARS",
}
"""Each variant, and the same without steps: what ZO adds is the difference."""
NOTES = (
    "“norm weights directly” has one dimension per entry of each norm layer and starts at the source model with batch "
    f"statistics; at the suite's own δ, which was chosen for coefficients, and at δ = {SMALL}.",
    "What ZO adds: mean over seeds of (error with steps − error without), negative is better; a gain within its spread "
    "is not one.",
)


def parts(setting: Setting) -> dict[str, Part]:
    setting = setting.few()
    direct = {"recipe": "direct"}
    return {
        "roid": setting.part(
            {
                "batch statistics": setting.method("bn-stats"),
                "norm weights directly": setting.zo(direct),
                f"norm weights directly, δ {SMALL}": setting.zo(direct, delta=SMALL),
                "merged": setting.merged(**ALL),
                "merging": setting.zo(ALL),
                "merged, RR": setting.merged(tolerance=None),
                "merging + RR": setting.zo({"tolerance": None}),
                "merged, RR + ARS": setting.merged(),
                "merging + RR + ARS": setting.zo(),
            }
        )
    }


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    setting = setting.few()
    found = list(records["roid"])
    means = averages(found, setting.domains)
    by_seed = [averages([r for r in found if r["seed"] == seed], setting.domains) for seed in setting.seeds]
    rows, points = [], []
    for name, start in STARTS.items():
        if name not in means or start not in means:
            continue
        dimensions = [record["dimension"] for record in found if record["method"] == name]
        gain = number([means_of[name].mean - means_of[start].mean for means_of in by_seed])
        count = sum(dimensions) / len(dimensions)
        spread = "" if gain.spread is None else f" ± {gain.spread:.2f}"
        rows.append(Row(name, (f"{count:,.0f}", str(means[name]), str(means[start]), f"{gain.mean:+.2f}{spread}")))
        points.append((name, count, gain))
    columns = ("optimised", "coefficients", "error, %", "without steps, %", "what ZO adds, points")
    sheet = Sheet("Mean over seeds ± spread, average over the domains.", columns, tuple(rows))

    def plot(axes: Axes) -> None:
        for name, count, gain in points:
            axes.errorbar([count], [gain.mean], yerr=[gain.spread or 0.0], fmt="o", capsize=3, label=name)
        axes.axhline(0, color="#222222", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xlabel("coefficients to optimise")
        axes.set_ylabel("error − error without steps, points")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))

    return [sheet], [drawing("What zeroth-order steps add, by the number of dimensions.", (8, 3.4), plot)]
