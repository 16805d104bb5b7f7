"""Tables 1 and 2: all methods on all corruptions, with experts by ROID and by DeYO; back-propagation beside them."""

from __future__ import annotations

from matplotlib.axes import Axes

from mergetta.bench.figures import PALE, bars, drawing, shade
from mergetta.bench.reproduce import paper
from mergetta.bench.reproduce.setting import Records, Setting, per_domain
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Row, Sheet, rows_of, texts
from mergetta.bench.store import Store
from mergetta.bench.tables import Number

NOTES: tuple[str, ...] = ()
TITLE = "Corruptions (Tables 1 and 2 of the paper)"
FORWARD = ("source", "bn-stats", "t3a")
COLLABORATIVE = ("cola", "merge", "zo-merge")
OURS = ("zo-merge-tuned", "race-merge")
"""Not the paper's: shown with ROID experts only."""
BACKPROP = ("tent", "deyo", "roid")


def parts(setting: Setting) -> dict[str, Part]:
    known = setting.suite.methods
    both = {name: known[name] for name in (*FORWARD, *COLLABORATIVE, *OURS, *BACKPROP) if name in known}
    shared = {name: known[name] for name in (*COLLABORATIVE, "deyo") if name in known}  # makes the experts on the way
    return {"roid": setting.part(both, "roid"), "deyo": setting.part(shared, "deyo")}


def table(setting: Setting, records: Records) -> dict[str, list[Number | None]]:
    roid, deyo = (per_domain(records[expert], setting.domains) for expert in ("roid", "deyo"))
    rows = {name: roid[name] for name in FORWARD if name in roid}
    rows |= {f"{name}, DeYO experts": deyo[name] for name in COLLABORATIVE if name in deyo}
    rows |= {f"{name}, ROID experts": roid[name] for name in (*COLLABORATIVE, *OURS) if name in roid}
    return rows | {f"{name} (back-propagation)": roid[name] for name in BACKPROP if name in roid}


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    rows = table(setting, records)
    columns = ("error, %", *(d.replace("_", " ") for d in setting.domains), "average")
    dataset, model = paper.nearest(setting.suite.name, setting.suite.family)
    theirs = paper.rows(dataset, model, setting.domains)
    forward = {name: numbers for name, numbers in rows.items() if "back-propagation" not in name}
    marked = rows_of(forward)
    rest = tuple(Row(name, texts(numbers)) for name, numbers in rows.items() if name not in forward)
    caption = (
        "Mean over seeds ± standard deviation. Bold: no other forward-only method is better by more than the spread. "
        f"Italics: the paper's numbers, for {model} on {dataset}."
    )
    return [Sheet(caption, columns, (*marked, *rest, *theirs))], [figure(rows)]


def figure(rows: dict[str, list[Number | None]]) -> Drawing:
    averages = {name: numbers[-1] for name, numbers in rows.items() if numbers[-1] is not None}

    def plot(axes: Axes) -> None:
        colours = [PALE if "back-propagation" in name else shade(name) for name in averages]
        bars(axes, averages, "error, %, average over the domains", colours)

    caption = "Average error; bars: spread over seeds; orange: race-merge; pale: back-propagation."
    return drawing(caption, (8, 0.6 + 0.28 * len(rows)), plot)
