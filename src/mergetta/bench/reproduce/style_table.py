"""Table 3: as many domains as there are styles, from 10 to 50."""

from __future__ import annotations

import dataclasses

from matplotlib.axes import Axes

from mergetta.bench.figures import drawing, label_ends, shade
from mergetta.bench.reproduce import paper
from mergetta.bench.reproduce.setting import Records, Setting, averages
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Row, Sheet, rows_of, texts
from mergetta.bench.store import Store
from mergetta.bench.suite import INITIAL, load_suite
from mergetta.bench.tables import is_ours
from mergetta.data.sources import open_source
from mergetta.errors import MergettaError

TITLE = "Styles (Table 3 of the paper)"
SUITES = {"fashion": "fashion-styles", "cifar10-c": "cifar10-styles", "imagenet-c": "imagenet-styles"}
"""By the kind of a suite's images."""
METHODS = ("source", "bn-stats", "t3a", "cola", "merge", "zo-merge", "roid")
NOTES = (
    "c_init follows the number of domains as in the paper (0.35, 0.15, 0.10, 0.10, 0.05). The domains of a smaller "
    "condition are among those of a larger one, so averages of different columns are over different domains.",
)


def conditions(setting: Setting) -> dict[int, Setting]:
    """Number of domains → the setting of that condition."""
    own = setting.suite
    name = own.name if own.data.endswith("-styles") else SUITES.get(own.data)
    if name is None:
        raise MergettaError(f"There are no styles of the images of {own.name}.")
    known = len(open_source(load_suite(name, folder=own.folder).data, own.folder).domains)
    found = {}
    for count in [number for number in INITIAL if number <= known]:
        styles = load_suite(name, own.family, own.checkpoint, own.folder, count)
        if own.samples < styles.samples:
            styles = styles.restricted(samples=own.samples)
        found[count] = dataclasses.replace(setting, suite=styles, domains=styles.domains)
    if not found:
        raise MergettaError(f"The style table needs at least {min(INITIAL)} styles; there are {known}.")
    return found


def parts(setting: Setting) -> dict[str, Part]:
    return {
        str(count): condition.part({name: condition.method(name) for name in METHODS})
        for count, condition in conditions(setting).items()
    }


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    means = {count: averages(records[str(count)], c.domains) for count, c in conditions(setting).items()}
    table = {name: [found.get(name) for found in means.values()] for name in METHODS}
    forward = rows_of({name: numbers for name, numbers in table.items() if name != "roid"})
    bar = Row("roid (back-propagation)", texts(table["roid"]))
    counts = list(INITIAL)
    theirs = [
        Row(f"{name} (paper)", tuple(str(values[counts.index(c)]) for c in means), paper=True)
        for name, values in paper.STYLES.items()
    ]
    caption = (
        "Error in percent by the number of domains, mean over domains and seeds ± spread over seeds. Italics: the "
        "paper's, on ImageNet."
    )
    sheet = Sheet(caption, ("domains", *(str(count) for count in means)), (*forward, bar, *theirs))

    def plot(axes: Axes) -> None:
        ends: dict[str, float] = {}
        for name, numbers in table.items():
            shown = [(count, n) for count, n in zip(means, numbers, strict=True) if n is not None]
            axes.errorbar(
                [c for c, _ in shown],
                [n.mean for _, n in shown],
                yerr=[n.spread or 0.0 for _, n in shown],
                color=shade(name),
                linewidth=3 if is_ours(name) else 1.2,
                zorder=3 if is_ours(name) else 2,
                marker="o",
                linestyle="--" if name == "roid" else "-",
                capsize=2,
            )
            ends |= {name: shown[-1][1].mean} if shown else {}
        label_ends(axes, ends)
        axes.set_xlabel("domains")
        axes.set_ylabel("error, %")

    return [sheet], [drawing("Error by the number of style domains; dashed: back-propagation.", (8, 3.6), plot)]
