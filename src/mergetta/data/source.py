"""What a source of labelled images is: opened by kind and folder (`sources.py`), handed out domain by domain."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergetta.data.corruptions import CORRUPTIONS
from mergetta.data.lazy import Subset
from mergetta.data.streams import Domain, Images
from mergetta.errors import MergettaError
from mergetta.seeds import generator

IN_MEMORY = 2**30
"""Bytes of a domain that are decoded and corrupted once and then kept, for the methods that follow."""


class Source(ABC):
    """Labelled images of several domains."""

    description: str
    """What the images are, for people who read the results."""
    domains: tuple[str, ...] = tuple(CORRUPTIONS)
    sorted_by_class = False

    @property
    @abstractmethod
    def digest(self) -> str:
        """Changes with the content: results are cached under it."""

    @property
    def originals(self) -> Domain | None:
        """All clean images, if there are any."""
        return None

    @abstractmethod
    def whole(self, name: str, severity: int, draw: int = 0) -> Domain:
        """All images of a domain, each read when it is asked for; another `draw` has other random numbers."""

    def clean(self, count: int) -> Domain | None:
        """The last `count` clean images, if there are any: the first ones are the targets'."""
        if self.originals is None:
            return None
        images, labels = self.originals.images, self.originals.labels
        chosen = self.order(len(labels))[-count:]
        return Domain("clean", Subset(images, chosen), labels[chosen])

    def enough(self, name: str, severity: int, count: int, draw: int = 0) -> Domain:
        """All images of a domain, which must be as many at least."""
        whole = self.whole(name, severity, draw)
        if count > len(whole.labels):
            raise MergettaError(f"{self.description}: {name} has {len(whole.labels):,} images, not {count:,}.")
        return whole

    def domain(self, name: str, severity: int, samples: int | None = None, start: int = 0, draw: int = 0) -> Domain:
        """So many images from `start` on (by default all of them), the same ones in all domains."""
        whole = self.enough(name, severity, start + (samples or 0), draw)
        total = len(whole.labels)
        count = total - start if samples is None else samples
        chosen = self.order(total)[start : start + count]
        size = whole.images[chosen[:1]].nbytes * count
        images: Images = whole.images[chosen] if size <= IN_MEMORY else Subset(whole.images, chosen)
        return Domain(name, images, whole.labels[chosen])

    def order(self, count: int) -> NDArray[np.int64]:
        """In which images are taken: a random one, always the same, unless they lie in a random order already."""
        return generator(0, 0, "subset").permutation(count) if self.sorted_by_class else np.arange(count)


def file_digest(path: Path) -> str:
    """Of a file's size and its ends: enough to tell data sets apart, quick on gigabytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(2**16)
        file.seek(max(0, size - 2**16))
        return combined([path.name, str(size), hashlib.sha256(head + file.read()).hexdigest()])


def combined(facts: list[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
