"""How methods are compared: reset per domain, the target's own expert left out, one pass, error as predicted online."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from mergetta.adapters import create_adapter, find_method
from mergetta.adapters.backprop.expert_training import Moments, Training
from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.cola import source_expert
from mergetta.arrays import Array, to_numpy
from mergetta.bench.store import Store, address, code_digest
from mergetta.bench.suite import BundleSettings, MethodSettings, Suite
from mergetta.bundle import Bundle
from mergetta.data.sources import Source, open_source
from mergetta.data.streams import Domain
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import last_blocks
from mergetta.merging import LOSS_OF, build_bundle
from mergetta.models.family import Family, load_family
from mergetta.runtimes.torch_runtime import TorchRuntime

PROTOCOL = 1
"""Raise it when this file measures something else: all results are then measured again."""
CODE = ("data.sources", "models", "runtimes.torch_runtime")
"""What every result depends on, beside its adapter."""
STATISTICS = 1000
"""Clean images that the source model's feature statistics are taken from."""


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    method: str
    expert: str | None
    """How the experts were made; None for a method that uses none."""
    domain: str
    seed: int


@lru_cache(maxsize=4)
def load_once(family: str, checkpoint: Path | None) -> Family:
    return load_family(family, checkpoint)


@lru_cache(maxsize=4)
def with_statistics(name: str, checkpoint: Path | None, kind: str, folder: Path | None) -> Family:
    """The family, with the feature statistics of clean images if it comes without: the source model's place in CoLA's
    pool. Without clean images the source model is not in the pool.
    """
    family = load_once(name, checkpoint)
    clean = open_once(kind, folder).clean(STATISTICS) if family.statistics is None else None
    if clean is None:
        return family
    moments, runtime = Moments(), TorchRuntime(family, source_statistics=1.0)
    for images, labels in clean.stream(0, 100):
        moments.add(to_numpy(runtime(images).statistics), len(labels))
    return dataclasses.replace(family, statistics=moments.value())


def family_of(suite: Suite) -> Family:
    return with_statistics(suite.family, suite.checkpoint, suite.data, suite.folder)


@lru_cache(maxsize=2)
def open_once(kind: str, folder: Path | None) -> Source:
    return open_source(kind, folder)


def source_of(suite: Suite) -> Source:
    return open_once(suite.data, suite.folder)


@lru_cache(maxsize=2)
def load_domain(kind: str, folder: Path | None, domain: str, severity: int, start: int, count: int) -> Domain:
    return open_once(kind, folder).domain(domain, severity, start, count)


def target_of(suite: Suite, domain: str) -> Domain:
    """The stream on which methods are compared."""
    return load_domain(suite.data, suite.folder, domain, suite.severity, 0, suite.samples)


def training_of(suite: Suite, domain: str) -> Domain:
    """The images that a domain's expert is made from: the targets', or others if the suite says so."""
    if suite.expert_samples is None:
        return target_of(suite, domain)
    return load_domain(suite.data, suite.folder, domain, suite.severity, suite.samples, suite.expert_samples)


def data_facts(suite: Suite, domain: str, seed: int) -> dict[str, Any]:
    return {
        "family": family_of(suite).fingerprint,
        "data": source_of(suite).digest,
        "domain": domain,
        "severity": suite.severity,
        "samples": suite.samples,
        "batch_size": suite.batch_size,
        "seed": seed,
        "versions": [np.__version__, torch.__version__, cv2.__version__],
    }


def adapter_module(name: str) -> str:
    return f"adapters.{find_method(name).path.partition(':')[0]}"


def expert_key(suite: Suite, method: str, domain: str, seed: int) -> str:
    if method not in suite.experts:
        raise MergettaError(
            f"The suite {suite.name} has no experts by {method!r}; choose from {', '.join(suite.experts)}."
        )
    code = code_digest(*CODE, adapter_module(method), "adapters.backprop.expert_training")
    return address(
        {
            **data_facts(suite, domain, seed),
            "expert": method,
            "options": suite.experts[method],
            "expert_samples": suite.expert_samples,
            "code": code,
        }
    )


def make_expert(suite: Suite, method: str, domain: str, seed: int, store: Store) -> Expert:
    """The expert of a domain, from the store or freshly trained."""
    key = expert_key(suite, method, domain, seed)
    expert = store.expert(key)
    if expert is None:
        runtime = TorchRuntime(family_of(suite))
        training = Training(runtime, method, seed, **suite.experts[method])
        for cell in same_run(suite, method, domain, seed):  # on the way, the results of the method itself
            record = online(suite, cell, training.adapter, runtime, training.observe)
            store.put_result(cell_key(suite, cell), record)
        if not training.moments.samples:
            for images, _ in training_of(suite, domain).stream(seed, suite.batch_size):
                training.adapter.predict(images)
                training.observe(images)
        expert = training.expert(domain)
        store.put_expert(key, expert)
    return expert


def same_run(suite: Suite, expert: str, domain: str, seed: int) -> list[Cell]:
    """The cell whose method does exactly what makes the expert: same images, same options. At most one."""
    same = [
        Cell(name, None, domain, seed)
        for name, settings in suite.methods.items()
        if settings.adapter == expert and settings.options == suite.experts[expert] and suite.expert_samples is None
    ]
    return same[:1]


def pool(suite: Suite, cell: Cell, store: Store) -> list[Expert]:
    """All experts but the target's own."""
    assert cell.expert is not None
    return [
        make_expert(suite, cell.expert, domain, cell.seed, store) for domain in suite.domains if domain != cell.domain
    ]


def cell_key(suite: Suite, cell: Cell) -> str:
    settings = suite.methods[cell.method]
    method = find_method(settings.adapter)
    merging = ["merging.build"] if method.needs == "bundle" else []
    facts: dict[str, Any] = {
        **data_facts(suite, cell.domain, cell.seed),
        "method": settings.model_dump(),
        "protocol": PROTOCOL,
        "code": code_digest(*CODE, adapter_module(settings.adapter), *merging),
    }
    if method.needs == "experts":
        statistics = family_of(suite).statistics
        facts["statistics"] = None if statistics is None else statistics.tolist()
    if cell.expert:
        facts["experts"] = [
            expert_key(suite, cell.expert, domain, cell.seed) for domain in suite.domains if domain != cell.domain
        ]
    return address(facts)


def build(suite: Suite, runtime: TorchRuntime, settings: BundleSettings, experts: list[Expert]) -> Bundle:
    arguments = settings.model_dump(exclude={"frozen_blocks"})
    frozen = last_blocks(runtime.structure, settings.frozen_blocks)
    return build_bundle(runtime.groups, experts, frozen=frozen, family=runtime.family, **arguments)


def create(suite: Suite, cell: Cell, runtime: TorchRuntime, store: Store) -> Adapter:
    """The adapter of a cell, with its experts or its bundle."""
    settings: MethodSettings = suite.methods[cell.method]
    needs = find_method(settings.adapter).needs
    options: dict[str, Any] = dict(settings.options)
    if settings.adapter == "zo-merge":
        options = {"loss": LOSS_OF[str(cell.expert)], "seed": cell.seed, **options}
    elif find_method(settings.adapter).backprop:
        options = {"seed": cell.seed, **options}
    if needs == "experts":
        known = [] if runtime.statistics is None else [source_expert(runtime)]
        options["experts"] = [*known, *pool(suite, cell, store)]
    elif settings.bundle is not None:
        options["bundle"] = build(suite, runtime, settings.bundle, pool(suite, cell, store))
    return create_adapter(settings.adapter, runtime, **options)


def stored(suite: Suite, cell: Cell, store: Store) -> dict[str, Any] | None:
    """The record of a cell, if it has been measured before."""
    record = store.result(cell_key(suite, cell))
    return None if record is None else {**record, "suite": suite.name, "method": cell.method}


def run_cell(suite: Suite, cell: Cell, store: Store) -> dict[str, Any]:
    """The record of a cell, from the store or freshly measured."""
    record = stored(suite, cell, store)
    if record is None:
        runtime = TorchRuntime(family_of(suite))
        record = online(suite, cell, create(suite, cell, runtime, store), runtime)
        store.put_result(cell_key(suite, cell), record)
    return record


def online(
    suite: Suite,
    cell: Cell,
    adapter: Adapter,
    runtime: TorchRuntime,
    after: Callable[[Array], None] = lambda images: None,
) -> dict[str, Any]:
    """The record of one pass over the target: each batch predicted as it comes. `after` sees each batch, untimed."""
    wrong: list[int] = []
    sizes: list[int] = []
    seconds = 0.0
    runtime.forwarded = 0
    for images, labels in target_of(suite, cell.domain).stream(cell.seed, suite.batch_size):
        start = time.perf_counter()
        logits = adapter.predict(images)
        seconds += time.perf_counter() - start
        after(images)
        wrong.append(int(np.count_nonzero(np.argmax(logits, axis=1) != labels)))
        sizes.append(len(labels))
    samples = sum(sizes)
    record: dict[str, Any] = {
        "expert": cell.expert,
        "domain": cell.domain,
        "seed": cell.seed,
        "error": 100 * sum(wrong) / samples,
        "samples": samples,
        "seconds": seconds,
        "family": runtime.family,
        "severity": suite.severity,
        "data": source_of(suite).description,
        "batch_size": suite.batch_size,
        "forwards": runtime.forwarded / samples,
        "backprop": find_method(suite.methods[cell.method].adapter).backprop,
        "wrong": wrong,
        "sizes": sizes,
        "skipped": getattr(adapter, "skipped", 0),
        "settings": suite.methods[cell.method].model_dump(),
        "suite": suite.name,
        "method": cell.method,
    }
    bundle = getattr(adapter, "bundle", None)
    if isinstance(bundle, Bundle):
        record["dimension"] = bundle.dimension
        record["ranks"] = {name: len(w) if name in bundle.moving else 0 for name, w in bundle.coefficients.items()}
    return record
