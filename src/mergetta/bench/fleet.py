"""The page of `mergetta hub demo`: how a fleet fared, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from mergetta.bench.figures import ACCENT, GREY, draw, label_ends
from mergetta.bench.page import number, page, table
from mergetta.bench.report import figure
from mergetta.bench.showcase import picture, worded
from mergetta.data.corruptions import corrupt
from mergetta.data.fashion import load_fashion
from mergetta.files import write_atomically

FLEET = "fleet"


@dataclass(frozen=True)
class Moment:
    """One look at the fleet."""

    seconds: float
    experts: int
    errors: Mapping[str, float]
    """Of each weak device over its latest images, in percent, by what it meets."""


def write_fleet(path: Path, deployed: Mapping[str, float], moments: Sequence[Moment]) -> None:
    """`deployed` are the errors of the model as it was, by what a device meets."""
    seen = [moment for moment in moments if moment.errors.keys() == deployed.keys()]
    if not seen:
        return
    last = seen[-1]
    rows = [(name.replace("_", " "), f"{before:.1f}", f"{last.errors[name]:.1f}") for name, before in deployed.items()]
    pictures = "".join(
        f"<figure>{picture(corrupt(load_fashion()[0][1:2], name, 5)[0], name)}<figcaption>{worded(name)}</figcaption>"
        "</figure>"
        for name in deployed
    )
    before, after = (float(np.mean(list(errors.values()))) for errors in (deployed, last.errors))
    body = f"""{number(before, after)}
<p class=hero>of the predictions of {len(deployed)} weak devices are wrong: with the model as it was deployed, and
{last.seconds:.0f} seconds later, with {last.experts} experts of other devices and forward passes alone. No device has
an expert of what it meets itself.</p>
<h2>What the devices meet</h2><div class=strip>{pictures}</div>
<h2>Error, percent</h2>{table(("meets", "as deployed", "latest"), rows, ours=2)}
{figure("Error of each device over its latest images, as experts arrive; orange: the whole fleet.", over_time(seen))}"""
    write_atomically(path, page("mergetta · a fleet", "", body).encode())


def over_time(moments: Sequence[Moment]) -> str:
    def plot(axes: Axes) -> None:
        seconds = [moment.seconds for moment in moments]
        lines = {name.replace("_", " "): [moment.errors[name] for moment in moments] for name in moments[0].errors}
        fleet = np.mean(list(lines.values()), axis=0).tolist()
        for errors in lines.values():
            axes.plot(seconds, errors, color=GREY, linewidth=1.2)
        axes.plot(seconds, fleet, color=ACCENT, linewidth=3)
        label_ends(axes, {name: errors[-1] for name, errors in {**lines, FLEET: fleet}.items()}, FLEET)
        axes.set_xlabel("seconds")
        axes.set_ylabel("error, %")

    return draw((8, 3.6), plot)


def listed(moments: Sequence[Moment]) -> list[dict[str, object]]:
    """For a file of JSON."""
    return [
        {
            "seconds": round(moment.seconds, 1),
            "experts": moment.experts,
            "error": float(np.mean(list(moment.errors.values()))) if moment.errors else None,
            "domains": dict(moment.errors),
        }
        for moment in moments
    ]
