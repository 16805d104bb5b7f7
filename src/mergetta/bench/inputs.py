"""The family and the images that a suite names, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from mergetta.bench.suite import Suite
from mergetta.data.own_images import OwnImages
from mergetta.data.source import Source
from mergetta.data.sources import open_source
from mergetta.data.streams import Batch, Domain
from mergetta.models.family import Family, load_family
from mergetta.runtimes.home import with_home

STATISTICS = 1000
"""Clean images that the source model's features and RMT's prototypes are measured on."""


@lru_cache(maxsize=4)
def load_once(family: str, checkpoint: Path | None) -> Family:
    return load_family(family, checkpoint)


class Place(NamedTuple):
    """Where a suite's images are, and the model that they are read for."""

    kind: str
    folder: Path | None = None
    family: str = ""
    checkpoint: Path | None = None


def place_of(suite: Suite) -> Place:
    return Place(suite.data, suite.folder, suite.family, suite.checkpoint)


@lru_cache(maxsize=4)
def with_signature(place: Place) -> Family:
    """The family, with the signature of clean images if it comes without one: the source model's place in CoLA's
    pool. Without clean images the source model is not in the pool.
    """
    family = load_once(place.family, place.checkpoint)
    clean = clean_images(place, STATISTICS) if family.signature is None else None
    if clean is None:
        return family
    return with_home(family, (images for images, _ in clean.stream(0, 100)))


def family_of(suite: Suite) -> Family:
    return with_signature(place_of(suite))


@lru_cache(maxsize=2)
def open_once(place: Place) -> Source:
    if place.kind != "folder":
        return open_source(place.kind, place.folder)
    family = load_once(place.family, place.checkpoint)
    expected = family.preprocessing
    return OwnImages(place.folder, len(expected.mean), expected.size, family.classes)


def source_of(suite: Suite) -> Source:
    return open_once(place_of(suite))


def clean_images(place: Place, count: int) -> Domain | None:
    """Clean images to measure something of the source on, if there are any: none that a target shows."""
    return open_once(place).clean(count)


@lru_cache(maxsize=2)
def load_domain(place: Place, domain: str, severity: int, start: int, count: int, draw: int = 0) -> Domain:
    return open_once(place).domain(domain, severity, count, start, draw)


def target_of(suite: Suite, domain: str, turn: int = 0) -> Domain:
    """What methods are compared on: in every pass the same images, corrupted anew."""
    return load_domain(place_of(suite), domain, suite.severity, 0, suite.samples, turn)


def target_stream(suite: Suite, domain: str, seed: int) -> Iterator[Batch]:
    for turn in range(suite.passes):
        yield from target_of(suite, domain, turn).stream(seed, suite.batch_size, suite.order, turn)


def training_of(suite: Suite, domain: str) -> Domain:
    """The images that a domain's expert is made from: the targets', or others if the suite says so."""
    if suite.expert_samples is None:
        return target_of(suite, domain)
    return load_domain(place_of(suite), domain, suite.severity, suite.samples, suite.expert_samples)
