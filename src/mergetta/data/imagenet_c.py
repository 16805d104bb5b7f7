"""ImageNet-C as published (`CORRUPTION/SEVERITY/WNID/*.JPEG`), or clean images corrupted as they are read."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mergetta.data.frost_textures import corrupted_by, find_textures, textures_digest
from mergetta.data.images import SUFFIXES, check_drawn, check_samples, corrupt_settings
from mergetta.data.lazy import Corrupted, ImageFiles, Interpolation, JpegArchive, Subset
from mergetta.data.streams import Domain, Images
from mergetta.errors import MergettaError
from mergetta.files import read_bytes, write_atomically
from mergetta.seeds import generator

ARCHIVE = "imagenet_val3k_224.npz"
CLASSES = 1000
SIZE, RESIZE_TO = 224, 256
QUALITY = 95  # of the files that `mergetta corrupt` writes
TOGETHER = 16  # images that it corrupts at a time
WNID = re.compile(r"n\d{8}")
ROBUSTBENCH = "imagenet_test_image_ids.txt"


class ImagenetC:
    """The folder of a set: `CORRUPTION/SEVERITY/WNID/*.JPEG`, with or without the level above that the published
    archives unpack to (`noise/gaussian_noise/…`); or only clean images, corrupted as they are read: `val/WNID/*.JPEG`,
    `WNID/*.JPEG` or `imagenet_val3k_224.npz`.

    `subset` is a text file of `WNID/NAME` lines, like RobustBench's 5,000 images; `description` names it, and says
    whether the corruptions are the published ones, and whether frost was made with its published textures: those in
    a folder `frost` in this one or beside it. Nothing is decoded before the first batch.
    """

    def __init__(
        self,
        folder: str | Path,
        subset: str | Path | None = None,
        size: int = SIZE,
        resize_to: int = RESIZE_TO,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.folder, self.subset = Path(folder), None if subset is None else Path(subset)
        self.size, self.resize_to, self.interpolation = size, resize_to, interpolation
        self.corrupted = find_corruptions(self.folder)
        self.settings = corrupt_settings(self.folder) if self.corrupted else None
        self.frost = None if self.corrupted else find_textures(self.folder)
        self.clean_source = find_clean(self.folder)
        if not self.corrupted and self.clean_source is None:
            raise MergettaError(
                f"{self.folder} has neither ImageNet-C (CORRUPTION/SEVERITY/WNID/*.JPEG) nor clean images "
                f"(val/WNID/*.JPEG, WNID/*.JPEG or {ARCHIVE})."
            )
        if self.subset is not None and not self.corrupted and self.archive:
            raise MergettaError(
                f"The images in {self.clean_source} have no names, so {self.subset} cannot choose them."
            )

    @property
    def archive(self) -> bool:
        return self.clean_source is not None and self.clean_source.is_file()

    @cached_property
    def description(self) -> str:
        if self.corrupted and self.settings is None:
            text = "ImageNet-C as published"
        else:
            part = f" ({ARCHIVE})" if self.archive and not self.corrupted else ""
            text = f"ImageNet validation{part} {corrupted_by(self.settings, self.frost)}"
        if self.subset is None:
            return text
        owner = "RobustBench " if self.subset.name == ROBUSTBENCH else ""
        return f"{text}, the {len(self.chosen):,}-image {owner}subset {self.subset.name}"

    @property
    def corruptions(self) -> list[str]:
        """The domains that are there."""
        from mergetta.data.corruptions import CORRUPTIONS  # needs OpenCV, which published files do not

        return sorted(self.corrupted) if self.corrupted else list(CORRUPTIONS)

    def clean(self, samples: int | None = None) -> Domain:
        images, labels = self.clean_images
        return self.sampled("clean", images, labels, samples)

    def domain(self, name: str, severity: int, samples: int | None = None, draw: int = 0) -> Domain:
        """`samples` images of a corruption at a severity: the same ones for each, in a fixed random order; published
        files are one draw."""
        if not self.corrupted:
            images, labels = self.clean_images
            return self.sampled(name, Corrupted(images, name, severity, draw, self.frost), labels, samples)
        check_drawn(draw, self.folder)
        if name not in self.corrupted:
            raise MergettaError(f"{self.folder} has no corruption {name!r}; it has {', '.join(self.corruptions)}.")
        folder = self.corrupted[name] / str(severity)
        if not folder.is_dir():
            raise MergettaError(f"{self.corrupted[name]} has no severity {severity}: the folder {folder} is missing.")
        images, labels = self.listed(folder)
        if self.settings is not None and self.subset is None and len(images) != self.settings.get("images"):
            raise MergettaError(
                f"{folder} has {len(images)} of {self.settings.get('images')} images: "
                "give the same `mergetta corrupt` again to finish it."
            )
        return self.sampled(name, images, labels, samples)

    def sampled(self, name: str, images: Images, labels: NDArray[np.int64], samples: int | None) -> Domain:
        if samples is None:
            return Domain(name, images, labels)
        order = generator(0, 0, "imagenet-c/samples").permutation(len(images))
        chosen = order[: check_samples(samples, len(images), self.folder)]
        return Domain(name, Subset(images, chosen), labels[chosen])

    @cached_property
    def clean_images(self) -> tuple[Images, NDArray[np.int64]]:
        if self.clean_source is None:
            raise MergettaError(f"{self.folder} has no clean images: put val/WNID/*.JPEG or {ARCHIVE} there.")
        if self.archive:
            archive = JpegArchive(self.clean_source, self.size, self.resize_to, CLASSES, self.interpolation)
            return archive, archive.labels
        return self.listed(self.clean_source)

    def listed(self, folder: Path) -> tuple[Images, NDArray[np.int64]]:
        """The images below WNID folders, or those of the subset, and their labels; no file is opened."""
        wnids = class_folders(folder)
        numbers = self.class_numbers(folder, wnids)
        names = self.chosen if self.subset is not None else image_names(folder, wnids)
        if not names:
            raise MergettaError(f"{folder} has no images.")
        paths = [f"{folder}{os.sep}{name}" for name in names]
        if self.subset is not None:
            for name, path in zip(names, paths, strict=True):
                if not os.path.exists(path):  # noqa: PTH110 - thousands of them
                    raise MergettaError(f"{folder} has no {name}, which {self.subset} lists.")
        labels = np.array([numbers[name.partition("/")[0]] for name in names], np.int64)
        return ImageFiles(paths, self.size, 3, self.resize_to, self.interpolation), labels

    def class_numbers(self, folder: Path, wnids: list[str]) -> dict[str, int]:
        """Class index by WordNet id: the order of `classes.txt` if there is one, else of the 1,000 sorted folders."""
        file = self.folder / "classes.txt"
        known = wnids
        if file.is_file():
            known = [line.replace("_", " ").split()[0] for line in file.read_text().splitlines() if line.strip()]
        if len(set(known)) != CLASSES:
            raise MergettaError(
                f"{file if file.is_file() else folder} names {len(set(known))} classes, so their numbers are unknown: "
                f"put a classes.txt with the {CLASSES:,} WordNet ids in order into {self.folder}."
            )
        unknown = set(wnids) - set(known)
        if unknown:
            raise MergettaError(f"{folder} has the class {min(unknown)}, which {file} does not name.")
        return {wnid: number for number, wnid in enumerate(known)}

    @cached_property
    def chosen(self) -> list[str]:
        """The names in the subset."""
        assert self.subset is not None
        try:
            names = [line.strip() for line in self.subset.read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise MergettaError(f"Cannot read the subset {self.subset}: {error}.") from error
        wrong = [name for name in names if not re.fullmatch(r"n\d{8}/[^/\\]+", name)]
        if wrong or not names:
            line = f"the line {wrong[0]!r}" if wrong else "no lines"
            raise MergettaError(f"{self.subset} has {line}, but a subset is a text file of WNID/NAME lines.")
        return names


def find_corruptions(folder: Path) -> dict[str, Path]:
    """Folders with severities in them, one or two levels down."""
    found: dict[str, Path] = {}
    for outer in subfolders(folder):
        for path in (outer, *subfolders(outer)):
            if any((path / str(severity)).is_dir() for severity in range(1, 6)):
                found[path.name] = path
    return found


def find_clean(folder: Path) -> Path | None:
    """The folder of the clean WNID folders, or the archive."""
    for candidate in (folder / "val", folder):
        if candidate.is_dir() and class_folders(candidate):
            return candidate
    archive = folder if folder.suffix == ".npz" else folder / ARCHIVE
    return archive if archive.is_file() else None


def subfolders(folder: Path) -> list[Path]:
    """All but the class folders, of which there are many."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not WNID.fullmatch(path.name) and path.is_dir())


def class_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if WNID.fullmatch(entry.name) and entry.is_dir())


def image_names(folder: Path, classes: list[str]) -> list[str]:
    """`CLASS/NAME` of every image, sorted."""
    names: list[str] = []
    for name in classes:
        with os.scandir(folder / name) as entries:
            files = [entry.name for entry in entries if os.path.splitext(entry.name)[1].lower() in SUFFIXES]  # noqa: PTH122
        names.extend(f"{name}/{file}" for file in sorted(files))
    return names


class FolderMaker:
    """Makes the published folders from one of clean images, a class at a time; finished files are not made again."""

    def __init__(self, source: Path, out: Path, seed: int, frost: Path | None = None) -> None:
        clean = find_clean(source)
        if clean is None or clean.is_file():
            raise MergettaError(
                f"{source} has no class folders (WNID/*.JPEG or val/WNID/*.JPEG) to corrupt; images of one's own are "
                "corrupted as they are read, by a suite with `data: folder`."
            )
        self.source, self.clean, self.out, self.seed = source, clean, out, seed
        self.frost = frost or find_textures(source.parent if source.name == "val" else source)
        self.classes = class_folders(clean)
        self.names = image_names(clean, self.classes)
        if not self.names:
            raise MergettaError(f"{clean} has no images.")
        if len({published_name(name) for name in self.names}) < len(self.names):
            raise MergettaError(f"{clean} has two images whose names differ only in the suffix, which becomes .JPEG.")
        digest = hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:16]
        self.facts = {
            "digest": digest,
            "images": len(self.names),
            "size": SIZE,
            "quality": QUALITY,
            "frost": textures_digest(self.frost),
        }

    def target(self, name: str) -> Path:
        return self.out / name

    def begin(self) -> None:
        """Keep the numbers of the classes, where they cannot be told from the folders."""
        if (self.source / "classes.txt").is_file() and not (self.out / "classes.txt").exists():
            write_atomically(self.out / "classes.txt", read_bytes(self.source / "classes.txt"))

    def tasks(self, name: str, severities: list[int]) -> Iterator[tuple[int, Callable[[], None]]]:
        """(number of images, what to run in some process); each looks for itself what is missing."""
        for severity in severities:
            folder = self.target(name) / str(severity)
            first = 0
            for _, group in groupby(self.names, lambda name: name.partition("/")[0]):
                names = list(group)
                how = (name, severity, self.seed, self.frost)
                yield len(names), partial(make_class, self.clean, folder, names, first, *how)
                first += len(names)

    def finish(self, name: str, severities: list[int]) -> None:
        """Nothing is left to do: every file is in its place."""

    def end(self) -> None:
        """Nothing to clear away."""


def published_name(name: str) -> str:
    return f"{name.rpartition('.')[0]}.JPEG"


def make_class(
    clean: Path,
    folder: Path,
    names: list[str],
    first: int,
    corruption: str,
    severity: int,
    seed: int,
    frost: Path | None,
) -> None:
    """Corrupt the images of a class, numbered from `first`, that are not in `folder` yet."""
    from mergetta.data.corruptions import corrupt

    made = folder / names[0].partition("/")[0]
    for leftover in made.glob(".*"):  # of a run that was killed
        leftover.unlink(missing_ok=True)
    there = {path.name for path in made.iterdir()} if made.is_dir() else set()
    missing = [i for i, name in enumerate(names) if published_name(name).partition("/")[2] not in there]
    images = ImageFiles([clean / name for name in names], SIZE, resize_to=RESIZE_TO)
    for start in range(0, len(missing), TOGETHER):
        some = np.array(missing[start : start + TOGETHER])
        made_now = corrupt(images[some], corruption, severity, seed, indices=first + some, frost=frost)
        for i, pixels in zip(some, made_now, strict=True):
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
            write_atomically(folder / published_name(names[i]), buffer.getvalue())
