"""The family and the images that a suite names, each loaded once."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path

import numpy as np

from mergetta.arrays import to_numpy
from mergetta.bench.suite import Suite
from mergetta.data.fashion_clean import load_fashion_clean
from mergetta.data.sources import Source, open_source
from mergetta.data.streams import Domain
from mergetta.models.family import Family, load_family
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.streams.moments import StreamMoments

STATISTICS = 1000
"""Clean images that the source model's features and RMT's prototypes are measured on."""


@lru_cache(maxsize=4)
def load_once(family: str, checkpoint: Path | None) -> Family:
    return load_family(family, checkpoint)


@lru_cache(maxsize=4)
def with_signature(name: str, checkpoint: Path | None, kind: str, folder: Path | None) -> Family:
    """The family, with the signature of clean images if it comes without one: the source model's place in CoLA's
    pool. Without clean images the source model is not in the pool.
    """
    family = load_once(name, checkpoint)
    clean = clean_images(kind, folder, STATISTICS) if family.signature is None else None
    if clean is None:
        return family
    runtime, seen = TorchRuntime(family), []
    for images, labels in clean.stream(0, 100):
        seen.append((to_numpy(runtime(images, given=1.0).signature), len(labels)))
    moments = StreamMoments(seen[0][0].shape[1])
    for signature, count in seen:
        moments.add(signature, count)
    return dataclasses.replace(family, signature=moments.value().astype(np.float32))


def family_of(suite: Suite) -> Family:
    return with_signature(suite.family, suite.checkpoint, suite.data, suite.folder)


@lru_cache(maxsize=2)
def open_once(kind: str, folder: Path | None) -> Source:
    return open_source(kind, folder)


def source_of(suite: Suite) -> Source:
    return open_once(suite.data, suite.folder)


def clean_images(kind: str, folder: Path | None, count: int) -> Domain | None:
    """Clean images to measure something of the source on, if there are any: none that a target shows."""
    return load_fashion_clean(count) if kind.startswith("fashion") else open_once(kind, folder).clean(count)


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
