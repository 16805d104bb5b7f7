"""Where a suite's images come from: opened by kind and folder, handed out domain by domain."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np

from mergetta.data.cifar_c import CifarC
from mergetta.data.corruptions import corrupt
from mergetta.data.fashion import FILE, load_fashion, load_fashion_clean
from mergetta.data.imagenet_c import ImagenetC, find_subset
from mergetta.data.images import check_drawn
from mergetta.data.source import Source, combined, file_digest
from mergetta.data.streams import Domain, Images
from mergetta.data.styles import load_style, style_domains, stylise
from mergetta.data.styles.textures import TEXTURES, texture
from mergetta.errors import MergettaError

VARIABLE = "MERGETTA_DATA"
SUBFOLDER = {"cifar10": "cifar10", "cifar100": "cifar100", "imagenet": "imagenet"}
WHERE = {
    "cifar10": "CIFAR-10-C is published at zenodo.org/records/2535967; a clean cifar10_test.npz (x, y) does too",
    "cifar100": "CIFAR-100-C is published at zenodo.org/records/3555552; a clean cifar100_test.npz (x, y) does too",
    "imagenet": "ImageNet-C is published at zenodo.org/records/2235448; a folder of validation images does too",
}
TEXTURE_STRENGTH = 0.7
"""Of the styles of textures: a real shift for both embedded families, and people still see what the object is."""


class Fashion(Source):
    """The embedded images, corrupted when asked for: the same on every machine, so with frost's drawn textures."""

    description = "Fashion-MNIST (embedded part) corrupted by mergetta"

    @cached_property
    def digest(self) -> str:
        return file_digest(FILE)

    def whole(self, name: str, severity: int, draw: int = 0) -> Domain:
        images, labels = load_fashion()
        return Domain(name, images, labels)

    def clean(self, count: int) -> Domain | None:
        return load_fashion_clean(count)

    def domain(self, name: str, severity: int, samples: int | None = None, start: int = 0, draw: int = 0) -> Domain:
        clean = super().domain(name, severity, samples, start)
        return Domain(name, corrupt(np.asarray(clean.images), name, severity, draw), clean.labels)


class Styles(Source):
    """Clean images in the styles of paintings: one domain per painting in the folder `styles` or `../style`."""

    def __init__(self, clean: Source, originals: Domain, paintings: Path) -> None:
        self.source, self.photographs, self.paintings = clean, originals, paintings
        self.domains = tuple(style_domains(paintings))
        self.sorted_by_class = clean.sorted_by_class
        self.description = (
            f"{clean.description.partition(' corrupted')[0]} in the styles of {len(self.domains)} paintings"
        )

    @cached_property
    def digest(self) -> str:
        files = [file_digest(path) for path in sorted(self.paintings.iterdir()) if path.is_file()]
        return combined([self.source.digest, *files])

    def clean(self, count: int) -> Domain | None:
        return self.source.clean(count)

    def whole(self, name: str, severity: int, draw: int = 0) -> Domain:
        """Styles have no severity."""
        check_drawn(draw, self.description)
        images, labels = self.photographs.images, self.photographs.labels
        style = load_style(self.paintings, name, images[np.arange(1)].shape[1])
        return Domain(name, Stylised(images, style), labels)


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

    @cached_property
    def digest(self) -> str:
        return combined([self.description, file_digest(FILE)])

    def clean(self, count: int) -> Domain | None:
        return load_fashion_clean(count)

    def whole(self, name: str, severity: int, draw: int = 0) -> Domain:
        """Styles have no severity."""
        check_drawn(draw, self.description)
        images, labels = load_fashion()
        return Domain(name, Stylised(images, texture(name, images.shape[1]), TEXTURE_STRENGTH), labels)


EMBEDDED: dict[str, type[Source]] = {"fashion": Fashion, "fashion-styles": FashionStyles}


def open_source(kind: str, folder: Path | None = None) -> Source:
    """A source by its kind: `fashion`, `cifar10-c`, `cifar100-c`, `imagenet-c`; `fashion-styles`, `cifar10-styles`,
    `imagenet-styles`."""
    if kind in EMBEDDED:
        return EMBEDDED[kind]()
    name, _, what = kind.partition("-")
    folder = folder_of(name, folder)
    imagenet = name == "imagenet"
    source = ImagenetC(folder, find_subset(folder)) if imagenet else CifarC(folder, int(name.removeprefix("cifar")))
    if what == "c":
        return source
    if source.originals is None:
        place = "val/WNID/*.JPEG" if imagenet else f"{name}_test.npz"
        raise MergettaError(f"{kind} needs clean images: put {place} into {folder}.")
    places = [
        place for place in (folder / "styles", folder.parent / "style", folder.parent / "styles") if place.is_dir()
    ]
    if not places:
        raise MergettaError(f"{kind} needs paintings: put image files into {folder / 'styles'}.")
    return Styles(source, source.originals, places[0])


def folder_of(name: str, folder: Path | None) -> Path:
    """The folder given, or the place below $MERGETTA_DATA."""
    if folder is None and os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE]) / SUBFOLDER[name]
    if folder is None:
        raise MergettaError(f"This suite needs images: give --data FOLDER or set ${VARIABLE}. {WHERE[name]}.")
    if not folder.is_dir():
        raise MergettaError(f"There is no folder {folder}. {WHERE[name]}.")
    return folder
