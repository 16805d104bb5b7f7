"""Where a suite's images come from: opened by kind and folder, handed out domain by domain."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np

from mergetta.data.cifar_c import CifarC
from mergetta.data.corruptions import CORRUPTIONS, corrupt
from mergetta.data.fashion import FILE, load_fashion
from mergetta.data.frost_textures import textures_digest
from mergetta.data.imagenet_c import ROBUSTBENCH, ImagenetC
from mergetta.data.images import check_drawn
from mergetta.data.lazy import Subset
from mergetta.data.streams import Domain, Images
from mergetta.data.styles import load_style, style_domains, stylise
from mergetta.data.styles.textures import TEXTURES, texture
from mergetta.errors import MergettaError
from mergetta.seeds import generator

VARIABLE = "MERGETTA_DATA"
SUBFOLDER = {"cifar10": "cifar10", "cifar100": "cifar100", "imagenet": "imagenet"}
WHERE = {
    "cifar10": "CIFAR-10-C is published at zenodo.org/records/2535967; a clean cifar10_test.npz (x, y) does too",
    "cifar100": "CIFAR-100-C is published at zenodo.org/records/3555552; a clean cifar100_test.npz (x, y) does too",
    "imagenet": "ImageNet-C is published at zenodo.org/records/2235448; a folder of validation images does too",
}
IN_MEMORY = 2**30
"""Bytes of a domain that are decoded and corrupted once and then kept, for the methods that follow."""
TEXTURE_STRENGTH = 0.7
"""Of the styles of textures: a real shift for both embedded families, and people still see what the object is."""


class Source(ABC):
    """Labelled images of several domains."""

    description: str
    """What the images are, for people who read the results."""
    digest: str
    """Changes with the content: results are cached under it."""
    domains: tuple[str, ...] = tuple(CORRUPTIONS)
    sorted_by_class = False

    @abstractmethod
    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        """All images of a domain, lazily; another `draw` has other random numbers."""

    def clean(self, count: int) -> Domain | None:
        """The last `count` clean images, if there are any: the first ones are the targets'."""
        return None

    def enough(self, domain: str, severity: int, count: int, draw: int = 0) -> Domain:
        """All images of a domain, which must be as many at least."""
        whole = self.whole(domain, severity, draw)
        if count > len(whole.labels):
            raise MergettaError(f"{self.description}: {domain} has {len(whole.labels):,} images, not {count:,}.")
        return whole

    def domain(self, domain: str, severity: int, start: int, count: int, draw: int = 0) -> Domain:
        """`count` images from `start` on, the same ones in all domains."""
        whole = self.enough(domain, severity, start + count, draw)
        total = len(whole.labels)
        order = generator(0, 0, "subset").permutation(total) if self.sorted_by_class else np.arange(total)
        chosen = order[start : start + count]
        size = whole.images[chosen[:1]].nbytes * count
        images: Images = whole.images[chosen] if size <= IN_MEMORY else Subset(whole.images, chosen)
        return Domain(domain, images, whole.labels[chosen])


class Fashion(Source):
    """The embedded images, corrupted when asked for: the same on every machine, so with frost's drawn textures."""

    description = "Fashion-MNIST (embedded part) corrupted by mergetta"

    def __init__(self) -> None:
        self.digest = file_digest(FILE)

    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        images, labels = load_fashion()
        return Domain(domain, images, labels)

    def clean(self, count: int) -> Domain | None:
        return last(self.whole("clean", 0), count)

    def domain(self, domain: str, severity: int, start: int, count: int, draw: int = 0) -> Domain:
        clean = super().domain(domain, severity, start, count)
        return Domain(domain, corrupt(np.asarray(clean.images), domain, severity, draw), clean.labels)


class Cifar(Source):
    """CIFAR-10-C or CIFAR-100-C, as published or corrupted as read."""

    def __init__(self, folder: Path, classes: int) -> None:
        self.set = CifarC(folder, classes)
        self.description = self.set.description
        self.domains = tuple(name for name in CORRUPTIONS if name in self.set.corruptions)
        files = [*self.set.files.values()] or [self.set.clean_file]
        self.digest = combined([self.description, *map(file_digest, files), textures_digest(self.set.frost)])

    def clean(self, count: int) -> Domain | None:
        return last(self.set.clean(), count) if self.set.clean_file.is_file() else None

    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        return self.set.domain(domain, severity, draw=draw)


class Imagenet(Source):
    """ImageNet-C, as published or corrupted as read; RobustBench's list or a `subset*.txt` beside it chooses images."""

    sorted_by_class = True

    def __init__(self, folder: Path) -> None:
        subsets = [*folder.glob(ROBUSTBENCH), *sorted(folder.glob("subset*.txt"))]
        self.set = ImagenetC(folder, subsets[0] if subsets else None)
        self.description = self.set.description
        self.domains = tuple(name for name in CORRUPTIONS if name in self.set.corruptions)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        textures = textures_digest(self.set.frost)
        if self.set.archive and not self.set.corrupted and self.set.clean_source is not None:
            return combined([self.description, file_digest(self.set.clean_source), textures])
        return combined([self.description, str(self.set.folder.resolve()), *self.domains, textures])

    def clean(self, count: int) -> Domain | None:
        if self.set.clean_source is None:
            return None
        clean = self.set.clean()
        order = generator(0, 0, "subset").permutation(len(clean.labels))
        return last(Domain("clean", Subset(clean.images, order), clean.labels[order]), count)

    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        return self.set.domain(domain, severity, draw=draw)


class Styles(Source):
    """Clean images in the styles of paintings: one domain per painting in the folder `styles` or `../style`."""

    def __init__(self, clean: Source, domain: Domain, paintings: Path) -> None:
        self.source, self.photographs, self.paintings = clean, domain, paintings
        self.domains = tuple(style_domains(paintings))
        self.sorted_by_class = clean.sorted_by_class
        self.description = (
            f"{clean.description.partition(' corrupted')[0]} in the styles of {len(self.domains)} paintings"
        )
        files = [file_digest(path) for path in sorted(paintings.iterdir()) if path.is_file()]
        self.digest = combined([clean.digest, *files])

    def clean(self, count: int) -> Domain | None:
        return self.source.clean(count)

    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        """Styles have no severity."""
        check_drawn(draw, self.description)
        images, labels = self.photographs.images, self.photographs.labels
        style = load_style(self.paintings, domain, images[np.arange(1)].shape[1])
        return Domain(domain, Stylised(images, style), labels)


class Stylised:
    """A view that stylises on indexing."""

    def __init__(self, images: Images, style: np.ndarray, strength: float = 1.0) -> None:
        self.images, self.style, self.strength = images, style, strength

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: np.ndarray, /) -> np.ndarray:
        return stylise(self.images[index], self.style, self.strength)


class FashionStyles(Source):
    """The embedded images in the styles of drawn textures: no folder needed."""

    description = f"Fashion-MNIST (embedded part) in the styles of {len(TEXTURES)} drawn textures"
    domains = TEXTURES

    def __init__(self) -> None:
        self.digest = combined([self.description, file_digest(FILE)])

    def whole(self, domain: str, severity: int, draw: int = 0) -> Domain:
        """Styles have no severity."""
        check_drawn(draw, self.description)
        images, labels = load_fashion()
        return Domain(domain, Stylised(images, texture(domain, images.shape[1]), TEXTURE_STRENGTH), labels)


def last(domain: Domain, count: int) -> Domain:
    start = max(0, len(domain.labels) - count)
    return Domain(domain.name, Subset(domain.images, np.arange(start, len(domain.labels))), domain.labels[start:])


EMBEDDED: dict[str, type[Source]] = {"fashion": Fashion, "fashion-styles": FashionStyles}


def open_source(kind: str, folder: Path | None = None) -> Source:
    """A source by its kind: `fashion`, `cifar10-c`, `cifar100-c`, `imagenet-c`; `fashion-styles`, `cifar10-styles`,
    `imagenet-styles`."""
    if kind in EMBEDDED:
        return EMBEDDED[kind]()
    name, _, what = kind.partition("-")
    folder = folder_of(name, folder)
    source = Imagenet(folder) if name == "imagenet" else Cifar(folder, int(name.removeprefix("cifar")))
    if what == "c":
        return source
    places = [
        place for place in (folder / "styles", folder.parent / "style", folder.parent / "styles") if place.is_dir()
    ]
    if not places:
        raise MergettaError(f"{kind} needs paintings: put image files into {folder / 'styles'}.")
    return Styles(source, source.set.clean(), places[0])


def folder_of(name: str, folder: Path | None) -> Path:
    """The folder given, or the place below $MERGETTA_DATA."""
    if folder is None and os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE]) / SUBFOLDER[name]
    if folder is None:
        raise MergettaError(f"This suite needs images: give --data FOLDER or set ${VARIABLE}. {WHERE[name]}.")
    if not folder.is_dir():
        raise MergettaError(f"There is no folder {folder}. {WHERE[name]}.")
    return folder


def file_digest(path: Path) -> str:
    """Of a file's size and its ends: enough to tell data sets apart, quick on gigabytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(2**16)
        file.seek(max(0, size - 2**16))
        return combined([path.name, str(size), hashlib.sha256(head + file.read()).hexdigest()])


def combined(facts: list[str]) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
