"""One's own labelled images: a folder per class, a folder with a list, or an npz file."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergetta.data.fashion import load_fashion
from mergetta.data.images import image_files, load_images, load_labelled_npz, read_image
from mergetta.data.streams import Domain
from mergetta.errors import MergettaError

BY_FOLDER = "by-folder"


class Files:
    """Image files that are read when they are indexed, resized as `adapt` and `run` do it."""

    def __init__(self, files: Sequence[Path], channels: int, size: int) -> None:
        self.files, self.channels, self.size = files, channels, size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.uint8]:
        chosen = np.arange(len(self))[index]
        return np.stack([read_image(self.files[number], self.channels, self.size) for number in chosen])


def load_labelled(source: str, labels: str, channels: int, size: int, classes: Sequence[str]) -> Domain:
    """`source` is a folder, an npz file with `labels`, or `fashion[:CORRUPTION[@SEVERITY]]`. Of a folder, `labels` is
    `by-folder` or a CSV file with the columns `name` and `label`; files that it does not name are left out.
    """
    path = Path(source)
    if path.is_dir():
        files, numbers = by_folder(path, classes) if labels == BY_FOLDER else by_list(path, Path(labels), classes)
        return Domain(path.name, Files(files, channels, size), numbers)
    if labels != BY_FOLDER:
        raise MergettaError(f"--labels belongs to a folder of images; {source} has its own.")
    if source.partition(":")[0] == "fashion":
        return Domain(source, load_images(source, channels), load_fashion()[1])
    images, numbers = load_labelled_npz(path, len(classes))
    if images.shape[3] != channels:
        raise MergettaError(f"{source} has images of {images.shape[3]} channels, but the model takes {channels}.")
    return Domain(path.stem, images, numbers)


def by_folder(folder: Path, classes: Sequence[str]) -> tuple[list[Path], NDArray[np.int64]]:
    """The class of an image is the folder that it stands in, next to `folder`."""
    files = image_files(folder)
    names = [file.relative_to(folder).parts[0] for file in files]
    alone = [name for name, file in zip(names, files, strict=True) if file.parent == folder]
    if alone:
        raise MergettaError(
            f"{folder / alone[0]} stands in no folder of a class: give a list of labels, --labels FILE."
        )
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    numbers = numbers_of(folders, classes, f"The folder {folder}", in_order=True)
    return files, np.array([numbers[name] for name in names])


def by_list(folder: Path, file: Path, classes: Sequence[str]) -> tuple[list[Path], NDArray[np.int64]]:
    """The images that a CSV file names, and what it says of them."""
    try:
        rows = list(csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MergettaError(f"Cannot read the labels {file}: {getattr(error, 'strerror', None) or error}.") from error
    if not rows or not all(row.get("name") and row.get("label") for row in rows):
        raise MergettaError(f"{file} must be a CSV file with the columns `name` and `label`, filled in every row.")
    files = [folder / row["name"] for row in rows]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise MergettaError(f"{file} names {missing[0].name!r}, which is not in {folder} ({len(missing)} are missing).")
    numbers = numbers_of(sorted({row["label"] for row in rows}), classes, str(file))
    return files, np.array([numbers[row["label"]] for row in rows])


def numbers_of(names: Sequence[str], classes: Sequence[str], source: str, in_order: bool = False) -> dict[str, int]:
    """Each label as the number of a class: by the names of the classes, or by their numbers.

    With `in_order`, where the model's classes have no names but numbers, as many labels as there are classes are these
    in the order of the alphabet: torchvision's rule for folders.

    >>> numbers_of(["Ankle-boot", "bag"], ["Bag", "Ankle boot"], "…")
    {'Ankle-boot': 1, 'bag': 0}
    """
    known = {plain(name): number for number, name in enumerate(classes)}
    numbered = [name for name in names if name.isdecimal() and int(name) < len(classes)]
    if all(plain(name) in known for name in names):
        return {name: known[plain(name)] for name in names}
    if len(numbered) == len(names):
        return {name: int(name) for name in names}
    if in_order and len(names) == len(classes) and all(name.isdecimal() for name in classes):
        return {name: number for number, name in enumerate(names)}
    strange = [name for name in names if plain(name) not in known and name not in numbered]
    shown = ", ".join(classes[:5]) + (", …" if len(classes) > 5 else "")
    if strange:
        raise MergettaError(
            f"{source} has the label {strange[0]!r}, which is no class of the model ({shown}), nor its number."
        )
    named = next(name for name in names if name not in numbered)
    raise MergettaError(
        f"{source} has {named!r}, the name of a class, and {numbered[0]!r}, a number: use names or numbers, not both."
    )


def plain(name: str) -> str:
    """A name as folders can have it."""
    return re.sub(r"[\W_]+", " ", name).strip().lower()
