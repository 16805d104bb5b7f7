"""What all studies share: the setting they run in, and how records become numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mergetta.bench.runner import Part
from mergetta.bench.suite import BundleSettings, MethodSettings, Suite
from mergetta.bench.tables import Number, Record, number
from mergetta.errors import MergettaError

Records = Mapping[str, Sequence[Record]]
"""What each part of a study measured."""
FEW = ("gaussian_noise", "motion_blur", "fog", "pixelate")
"""One of each kind of corruption: noise, blur, weather, digital."""


@dataclass(frozen=True)
class Setting:
    """A suite, and how much of it."""

    suite: Suite
    seeds: tuple[int, ...]
    domains: tuple[str, ...]
    asked: bool = False
    """Whether these domains were asked for by name."""

    def few(self) -> Setting:
        """For studies of many variants: on one domain of each kind, unless others were asked for."""
        chosen = tuple(d for d in FEW if d in self.domains) or self.domains[:4]
        return self if self.asked else replace(self, domains=chosen)

    def part(self, methods: Mapping[str, MethodSettings], expert: str = "roid", **changes: Any) -> Part:
        """These methods on the suite; `changes` are of the suite."""
        suite = self.suite.model_copy(update={**changes, "methods": dict(methods)})
        return Part(suite, expert, self.domains, self.seeds)

    def method(self, name: str) -> MethodSettings:
        if name not in self.suite.methods:
            raise MergettaError(f"The suite {self.suite.name} has no method {name!r}, which this study needs.")
        return self.suite.methods[name]

    @property
    def bundle(self) -> BundleSettings:
        """Of the paper's method."""
        bundle = self.method("zo-merge").bundle
        assert bundle is not None
        return bundle

    def zo(self, bundle: Mapping[str, Any] | None = None, **options: Any) -> MethodSettings:
        """The paper's method with some settings changed."""
        base = self.method("zo-merge")
        return base.model_copy(
            update={
                "bundle": self.bundle.model_copy(update=dict(bundle or {})),
                "options": {**base.options, **options},
            }
        )

    def merged(self, **bundle: Any) -> MethodSettings:
        """Its start: merged, without any step."""
        return MethodSettings(adapter="merge", bundle=self.bundle.model_copy(update=bundle))


def averages(records: Iterable[Record], domains: Sequence[str], upto: int | None = None) -> dict[str, Number]:
    """Method → mean over domains per seed, then over seeds. Methods that lack a cell are left out.

    `upto` counts only the first images of each stream: what a stream of that length would have given, since a batch
    is predicted before anything later is seen.
    """
    errors: dict[str, dict[int, dict[str, float]]] = {}
    for record in records:
        value = record["error"] if upto is None else error_upto(record, upto)
        errors.setdefault(record["method"], {}).setdefault(record["seed"], {})[record["domain"]] = value
    seeds = {seed for by_seed in errors.values() for seed in by_seed}
    return {
        method: number([float(np.mean([by_seed[seed][domain] for domain in domains])) for seed in sorted(seeds)])
        for method, by_seed in errors.items()
        if seeds <= by_seed.keys() and all(set(domains) <= found.keys() for found in by_seed.values())
    }


def error_upto(record: Record, images: int) -> float:
    """Of the first images; of the batch in which the last of them is, the share that is meant counts."""
    sizes, wrong = (np.cumsum([0, *record[name]]) for name in ("sizes", "wrong"))
    if images > sizes[-1]:
        raise MergettaError(f"A stream of {sizes[-1]} images has no first {images}.")
    return float(100 * np.interp(images, sizes, wrong) / images)


def per_domain(records: Iterable[Record], domains: Sequence[str]) -> dict[str, list[Number | None]]:
    """Method → one number per domain and their average; None where a cell failed."""
    records = list(records)
    means = averages(records, domains)
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        found.setdefault((record["method"], record["domain"]), []).append(record["error"])
    return {
        method: [*(number(found[method, d]) if (method, d) in found else None for d in domains), means.get(method)]
        for method in dict.fromkeys(record["method"] for record in records)
    }
