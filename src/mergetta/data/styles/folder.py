"""The paintings in a folder: each is one domain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergetta.data.images import SUFFIXES, read_image
from mergetta.errors import MergettaError


def style_domains(folder: str | Path) -> list[str]:
    """The names of the image files in a folder, without suffix, sorted."""
    return sorted(paintings(Path(folder)))


def load_style(folder: str | Path, name: str, size: int) -> NDArray[np.uint8]:
    """The painting of this name as (size, size, 3): scaled on its shorter side, then cut around the centre.

    Take the size of the images to be stylised: the strokes are then as wide as they are in the painting.
    """
    from PIL import Image

    files = paintings(Path(folder))
    if name not in files:
        raise MergettaError(f"{folder} has no style {name!r}; it has {', '.join(sorted(files))}.")
    if size < 1:
        raise MergettaError(f"The size of a style must be positive, not {size}.")
    painting = read_image(files[name], 3)
    height, width = (max(size, round(side * size / min(painting.shape[:2]))) for side in painting.shape[:2])
    scaled = np.asarray(Image.fromarray(painting).resize((width, height), Image.Resampling.BICUBIC))
    top, left = (height - size) // 2, (width - size) // 2
    return scaled[top : top + size, left : left + size]


def paintings(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise MergettaError(f"There is no folder {folder} to take styles from.")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise MergettaError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))}) to take styles from.")
    named = {path.stem: path for path in files}
    if len(named) < len(files):
        raise MergettaError(f"{folder} has images that differ only in their suffix, so that styles share a name.")
    return named
