"""The photographs of ice that frost was published with: where they are, which they are, and their pixels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.data.images import read_image
from mergetta.errors import MergettaError

FOLDER = "frost"
NAMES = ("frost1", "frost2", "frost3", "frost4", "frost5")
SUFFIXES = (".png", ".jpg", ".jpeg")
DRAWN = "drawn"


def find_textures(folder: Path) -> Path | None:
    """The folder `frost` with textures in a dataset's folder or beside it, if there is one."""
    folder = folder.absolute()
    places = (folder / FOLDER, folder.parent / FOLDER)
    return next((place for place in places if any(place.glob(f"{NAMES[0]}.*"))), None)


def texture_files(folder: Path) -> list[Path]:
    """The five files, in order: one that is missing would change which images get which texture."""
    files = []
    for name in NAMES:
        found = [path for path in (folder / f"{name}{suffix}" for suffix in SUFFIXES) if path.is_file()]
        if not found:
            raise MergettaError(f"{folder} has no {name}.png or {name}.jpg: frost needs {NAMES[0]} to {NAMES[-1]}.")
        files.append(found[0])
    return files


def textures_digest(folder: Path | None) -> str:
    """Tells textures apart; `drawn` where there are none, because frost then draws its own."""
    if folder is None:
        return DRAWN
    return hashlib.sha256(b"".join(path.read_bytes() for path in texture_files(folder))).hexdigest()[:16]


def corrupted_by(settings: dict[str, Any] | None, folder: Path | None) -> str:
    """What a description says of images that are not as published: made by `mergetta corrupt`, which keeps its
    settings beside a set, or corrupted as they are read, frost with the textures in the folder.
    """
    made = f" {settings['mergetta']}, seed {settings['seed']}" if settings else ""
    published = folder is not None or (settings is not None and settings.get("frost", DRAWN) != DRAWN)
    return f"corrupted by mergetta{made}{' with the published frost textures' if published else ''}"


def read_textures(folder: Path, channels: int) -> list[NDArray[np.uint8]]:
    """(H, W, C) each, in grey or in colour, without their alpha channel."""
    return [read_image(path, channels) for path in texture_files(folder)]
