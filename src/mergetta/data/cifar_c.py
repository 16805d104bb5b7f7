"""CIFAR-10-C and CIFAR-100-C as published: `gaussian_noise.npy`, … with severities 1 to 5 stacked, `labels.npy`."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.data.frost_textures import corrupted_by, find_textures, textures_digest
from mergetta.data.images import check_drawn, check_samples, checked_labels, corrupt_settings, load_labelled_npz
from mergetta.data.streams import Domain
from mergetta.errors import MergettaError
from mergetta.files import write_atomically

SEVERITIES = 5
SHAPE = (32, 32, 3)
LABELS = "labels.npy"


class CifarC:
    """The folder of a set: the published files, memory-mapped; or `cifar10_test.npz` (`x`, `y`), corrupted as read.

    `CifarC(folder, classes=100)` is CIFAR-100-C. `description` says which of the two a result was measured on, and
    whether frost was made with its published textures: those in a folder `frost` in this one or beside it.
    """

    def __init__(self, folder: str | Path, classes: int = 10) -> None:
        self.folder, self.classes = Path(folder), classes
        self.clean_file = self.folder / f"cifar{classes}_test.npz"
        self.files = {path.stem: path for path in sorted(self.folder.glob("*.npy")) if path.name != LABELS}
        if not self.files and not self.clean_file.is_file():
            raise MergettaError(
                f"{self.folder} has neither the files of CIFAR-{classes}-C (gaussian_noise.npy, …, labels.npy) "
                f"nor {self.clean_file.name}."
            )
        self.settings = corrupt_settings(self.folder) if self.files else None
        self.frost = None if self.files else find_textures(self.folder)

    @property
    def description(self) -> str:
        if self.files and self.settings is None:
            return f"CIFAR-{self.classes}-C as published"
        return f"CIFAR-{self.classes} test {corrupted_by(self.settings, self.frost)}"

    @property
    def corruptions(self) -> list[str]:
        """The domains that are there."""
        from mergetta.data.corruptions import CORRUPTIONS  # needs OpenCV, which published files do not

        return sorted(self.files) if self.files else list(CORRUPTIONS)

    def clean(self, samples: int | None = None) -> Domain:
        images, labels = self.clean_set
        count = check_samples(samples, len(images), self.folder)
        return Domain("clean", images[:count], labels[:count])

    def domain(self, name: str, severity: int, samples: int | None = None, draw: int = 0) -> Domain:
        """The first `samples` images (they are in random order) of a corruption at a severity; published files are
        one draw."""
        if severity not in range(1, SEVERITIES + 1):
            raise MergettaError(f"severity must be 1 to {SEVERITIES}, not {severity}.")
        if not self.files:
            from mergetta.data.lazy import Corrupted

            clean = self.clean(samples)
            return Domain(name, Corrupted(clean.images, name, severity, draw, self.frost), clean.labels)
        check_drawn(draw, self.folder)
        images, labels = self.stacked(name)
        if self.settings is not None and severity not in self.settings["severities"]:
            raise MergettaError(f"{self.folder} was made without severity {severity}: run `mergetta corrupt` with it.")
        each = len(images) // SEVERITIES
        first = (severity - 1) * each
        chosen = slice(first, first + check_samples(samples, each, self.folder))
        return Domain(name, images[chosen], labels[chosen])

    def stacked(self, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The memory-mapped images of all severities, and their labels."""
        if name not in self.files:
            raise MergettaError(f"{self.folder} has no {name}.npy; it has {', '.join(sorted(self.files))}.")
        images = open_npy(self.files[name])
        if images.dtype != np.uint8 or images.shape[1:] != SHAPE or not len(images) or len(images) % SEVERITIES:
            raise MergettaError(
                f"{self.files[name]} must hold uint8 images (5·N, 32, 32, 3), not {images.dtype} {images.shape}."
            )
        file = self.folder / LABELS
        if not file.is_file():
            raise MergettaError(f"{self.folder} has no {LABELS}, which belongs to its images.")
        return images, checked_labels(open_npy(file), len(images), self.classes, file)

    @cached_property
    def clean_set(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        if not self.clean_file.is_file():
            raise MergettaError(f"{self.folder} has no clean images: put {self.clean_file.name} (x, y) there.")
        return load_cifar(self.clean_file, self.classes)


def load_cifar(path: Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = load_labelled_npz(path, classes)
    if images.shape[1:] != SHAPE:
        raise MergettaError(f"{path} must hold images of 32 × 32 pixels in colour, not {images.shape[1:]}.")
    return images, labels


def open_npy(path: Path) -> NDArray[Any]:
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise MergettaError(f"{path} is truncated, or not an npy file: {error}.") from error


class CifarMaker:
    """Makes the published files from a clean npz file, a severity at a time; finished ones are not made again."""

    def __init__(self, source: Path, out: Path, seed: int, frost: Path | None = None) -> None:
        self.source, self.out, self.seed = source, out, seed
        self.frost = frost or find_textures(source.parent)
        images, self.labels = load_cifar(source, classes=100)
        digest = hashlib.sha256(images.tobytes() + self.labels.tobytes()).hexdigest()[:16]
        self.facts = {"digest": digest, "images": len(images), "frost": textures_digest(self.frost)}

    def target(self, name: str) -> Path:
        return self.out / f"{name}.npy"

    def part(self, name: str, severity: int) -> Path:
        return self.out / ".parts" / f"{name}-{severity}.npy"

    def begin(self) -> None:
        if not (self.out / LABELS).exists():
            write_atomically(self.out / LABELS, npy_bytes(np.tile(self.labels, SEVERITIES)))

    def tasks(self, name: str, severities: list[int]) -> Iterator[tuple[int, Callable[[], None]]]:
        """(number of images, what to run in some process) for what is missing."""
        for severity in severities if not self.target(name).exists() else ():
            if not self.part(name, severity).exists():
                run = partial(make_part, self.source, self.part(name, severity), name, severity, self.seed, self.frost)
                yield len(self.labels), run

    def finish(self, name: str, severities: list[int]) -> None:
        """Stack the severities once all are there; those that were not asked for stay black."""
        parts = {severity: self.part(name, severity) for severity in severities}
        if self.target(name).exists() or not all(part.exists() for part in parts.values()):
            return
        stacked = np.zeros((SEVERITIES, len(self.labels), *SHAPE), np.uint8)
        for severity, part in parts.items():
            stacked[severity - 1] = open_npy(part)
        write_atomically(self.target(name), npy_bytes(stacked.reshape(-1, *SHAPE)))
        for part in parts.values():
            part.unlink()

    def end(self) -> None:
        shutil.rmtree(self.out / ".parts", ignore_errors=True)


def make_part(source: Path, part: Path, name: str, severity: int, seed: int, frost: Path | None) -> None:
    from mergetta.data.corruptions import corrupt

    write_atomically(part, npy_bytes(corrupt(cached_images(source), name, severity, seed, frost=frost)))


@lru_cache(maxsize=1)
def cached_images(source: Path) -> NDArray[np.uint8]:
    return load_cifar(source, classes=100)[0]


def npy_bytes(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
