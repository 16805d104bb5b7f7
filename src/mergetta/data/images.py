"""Images from where people keep them: an npz file, a folder, or the embedded set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergetta.data.fashion import load_fashion
from mergetta.errors import MergettaError

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def load_images(source: str, channels: int, size: int | None = None) -> NDArray[np.uint8]:
    """uint8 (N, H, W, C) in the model's number of channels; files are resized to `size`.

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
        images = load_folder(Path(source), channels, size)
    else:
        images = load_npz(Path(source))
    if images.shape[3] != channels:
        raise MergettaError(f"{source} has images of {images.shape[3]} channels, but the model takes {channels}.")
    return images


def load_npz(path: Path) -> NDArray[np.uint8]:
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in ("images", "x") if name in file]
            if not names:
                raise MergettaError(f"{path} has no array named 'images' or 'x'.")
            images = file[names[0]]
    except MergettaError:
        raise
    except Exception as error:  # NumPy lets zipfile, zlib and its own errors through
        raise MergettaError(f"Cannot read {path} as an npz file: {error}.") from error
    images = images[..., None] if images.ndim == 3 else images
    if images.dtype != np.uint8 or images.ndim != 4 or not images.size:
        raise MergettaError(f"{path} must hold uint8 images (N, H, W[, C]), not {images.dtype} {images.shape}.")
    return np.asarray(images, dtype=np.uint8)


def load_folder(folder: Path, channels: int, size: int | None = None) -> NDArray[np.uint8]:
    loaded = [read_image(file, channels, size) for file in image_files(folder)]
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
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise MergettaError("Reading image files needs Pillow: pip install pillow.") from error
    try:
        with Image.open(file) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
        if size:
            converted = converted.resize((size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MergettaError(f"Cannot read the image {file}: {error}.") from error
    pixels = np.asarray(converted)
    return pixels[..., None] if pixels.ndim == 2 else pixels
