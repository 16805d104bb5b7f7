"""Images from where people keep them: an npz file, a folder, or the embedded set."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mergetta.data.fashion import load_fashion
from mergetta.errors import MergettaError
from mergetta.files import looks_like, read_start

if TYPE_CHECKING:
    from PIL.Image import Image

CORRUPT_SETTINGS = "mergetta-corrupt.json"
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def load_images(
    source: str, channels: int, size: int | None = None, broken: Callable[[str], None] | None = None
) -> NDArray[np.uint8]:
    """uint8 (N, H, W, C) in the model's number of channels; files are resized to `size`.

    With `broken`, which is told of each, files of a folder that cannot be read are left out.

    `source` is an npz file with an array `images` or `x`, a folder (searched through), or for the embedded images
    `fashion[:CORRUPTION[@SEVERITY]]`.
    """
    name, _, rest = source.partition(":")
    if name == "fashion":
        images, _ = load_fashion()
        corruption, _, severity = rest.partition("@")
        if severity and severity not in "12345":
            raise MergettaError(f"The severity in {source!r} must be 1 to 5.")
        if corruption:
            from mergetta.data.corruptions import corrupt  # needs OpenCV, which a device may not have

            images = corrupt(images, corruption, int(severity or 5))
    elif Path(source).is_dir():
        images = load_folder(Path(source), channels, size, broken)
    else:
        images = load_npz(Path(source))
    if images.shape[3] != channels:
        raise MergettaError(f"{source} has images of {images.shape[3]} channels, but the model takes {channels}.")
    return images


def load_npz(path: Path) -> NDArray[np.uint8]:
    (images,) = read_npz(path, ("images", "x"))
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or not images.size:
        raise MergettaError(f"{path} must hold uint8 images (N, H, W[, C]), not {images.dtype} {images.shape}.")
    return np.asarray(images, dtype=np.uint8)


def load_labelled_npz(path: Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images as `load_npz` gives them, and the array `labels` or `y`."""
    images = load_npz(path)
    (labels,) = read_npz(path, ("labels", "y"))
    return images, checked_labels(labels, len(images), classes, path)


def read_npz(path: Path, *wanted: tuple[str, ...]) -> list[NDArray[Any]]:
    """Arrays of an npz file, each under the first of its names that is there."""
    arrays = []
    start = read_start(path)
    if not start.startswith(b"PK"):
        raise MergettaError(f"{path} is not an npz file: it is {looks_like(start)}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            for names in wanted:
                found = [name for name in names if name in file]
                if not found:
                    raise MergettaError(f"{path} has no array named {' or '.join(map(repr, names))}.")
                arrays.append(file[found[0]])
    except MergettaError:
        raise
    except Exception as error:  # NumPy lets zipfile, zlib and its own errors through
        raise MergettaError(f"Cannot read {path} as an npz file: {error}.") from error
    return arrays


def checked_labels(labels: NDArray[Any], count: int, classes: int, source: Path) -> NDArray[np.int64]:
    """Labels as int64, if there are `count` of them and all of them are classes."""
    if labels.dtype.kind not in "iu" or labels.shape != (count,):
        raise MergettaError(f"{source} must hold {count} integer labels, not {labels.dtype} {labels.shape}.")
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise MergettaError(f"{source} has the label {outside[0]}, but there are only the classes 0 to {classes - 1}.")
    return labels.astype(np.int64)


def load_folder(
    folder: Path, channels: int, size: int | None = None, broken: Callable[[str], None] | None = None
) -> NDArray[np.uint8]:
    loaded = []
    for file in image_files(folder):
        try:
            loaded.append(read_image(file, channels, size))
        except MergettaError as error:
            if broken is None:
                raise
            broken(str(error))
            reason = str(error)
    if not loaded:
        raise MergettaError(f"None of the images in {folder} can be read. {reason}")
    if len({image.shape for image in loaded}) > 1:
        raise MergettaError(f"The images in {folder} have different sizes, and the family does not say which to use.")
    return np.stack(loaded)


def image_files(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their names."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise MergettaError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))}).")
    return files


def read_image(file: Path, channels: int, size: int | None = None) -> NDArray[np.uint8]:
    """(H, W, C), resized to `size` if given."""
    pixels = as_array(open_image(file, channels, str(file)))
    return resized(pixels, size) if size else pixels


def resized(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """(H, W, C) as (size, size, C)."""
    from PIL import Image

    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return as_array(image.resize((size, size), Image.Resampling.BILINEAR))


def open_image(file: str | Path | BinaryIO, channels: int, name: str) -> Image:
    """A decoded image, grey or RGB; `name` is what an error calls it."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return eight_bits(image, name).convert("L" if channels == 1 else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MergettaError(f"Cannot read the image {name}: {error}.") from error


def eight_bits(image: Image, name: str) -> Image:
    """Pixels of 16 bits as bytes: Pillow would take all above 255 for white."""
    from PIL import Image

    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image)
    if pixels.dtype.kind not in "iu" or pixels.min() < 0 or pixels.max() > 65535:
        raise MergettaError(f"Cannot read the image {name}: its pixels are neither bytes nor 16-bit numbers.")
    return Image.fromarray((pixels // 257).astype(np.uint8))


def as_array(image: Image) -> NDArray[np.uint8]:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def corrupt_settings(folder: Path) -> dict[str, Any] | None:
    """What `mergetta corrupt` wrote beside a set that it made; None beside a published one."""
    file = folder / CORRUPT_SETTINGS
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise MergettaError(f"Cannot read {file}: {error}.") from error
    if not isinstance(settings, dict) or not {"mergetta", "seed", "severities"} <= settings.keys():
        raise MergettaError(f"{file} is not the settings file of `mergetta corrupt`.")
    return settings


def check_drawn(draw: int, source: Path | str) -> None:
    if draw:
        raise MergettaError(f"{source} is not drawn at random: a second pass would show the same images.")
