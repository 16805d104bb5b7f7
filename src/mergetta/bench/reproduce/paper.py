"""The paper's own numbers, to stand beside ours. Errors in percent, mean of three seeds; it gives no spread."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mergetta.bench.sheets import Row

FILE = Path(__file__).parent / "paper_corruptions.csv"
NEAREST = {
    "fashion-bn": ("cifar10-c", "wrn-28-10"),
    "fashion-vit": ("imagenet-c", "vit-b-16"),
    "cifar10-c": ("cifar10-c", "wrn-28-10"),
    "cifar100-c": ("cifar100-c", "resnext-29"),
    "imagenet-c": ("imagenet-c", "resnet-50"),
}
"""The paper's suite and family to show beside one of ours."""
STYLES = {
    "No Adapt": (81.1, 78.8, 80.0, 80.4, 80.2),
    "T3A": (81.0, 78.7, 79.8, 80.3, 80.0),
    "CoLA": (77.0, 73.1, 75.0, 75.5, 75.2),
    "ours": (71.8, 66.4, 67.9, 69.4, 69.2),
}
"""Table 3, ImageNet in the styles of 10, 20, 30, 40 and 50 paintings."""
ABLATION = {
    "no adaptation": 60.2,
    "merge": 55.4,
    "merge + NWS": 55.1,
    "merge + NWS + ZO": 54.8,
    "merge + NWS + ZO + RR": 54.4,
    "merge + NWS + ZO + ARS": 54.7,
    "merge + NWS + ZO + RR + ARS": 54.3,
}
"""Table 4, ImageNet-C with ViT-B/16 and ROID experts."""


@cache
def corruptions() -> tuple[dict[str, str], ...]:
    with FILE.open(newline="") as file:
        return tuple(csv.DictReader(file))


def domains() -> tuple[str, ...]:
    return tuple(name for name in corruptions()[0] if name not in ("dataset", "model", "method", "average"))


def nearest(suite: str, family: str) -> tuple[str, str]:
    """The paper's (data set, model) for a suite: the same family where the paper has it, or the nearest."""
    known = {(row["dataset"], row["model"]) for row in corruptions()}
    return (suite, family) if (suite, family) in known else NEAREST.get(suite, NEAREST["cifar10-c"])


def rows(dataset: str, model: str, shown: tuple[str, ...]) -> list[Row]:
    """The paper's rows for these domains and their average; the paper's own if they are all."""
    if set(shown) - set(domains()):
        return []

    def average(row: Mapping[str, str]) -> str:
        every = set(shown) == set(domains())
        return row["average"] if every else f"{sum(float(row[d]) for d in shown) / len(shown):.1f}"

    return [
        Row(f"{row['method']} (paper)", (*(row[d] for d in shown), average(row)), paper=True)
        for row in corruptions()
        if (row["dataset"], row["model"]) == (dataset, model)
    ]
