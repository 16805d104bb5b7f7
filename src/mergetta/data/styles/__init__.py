"""Style domains: clean images in the styles of paintings, one domain per painting.

`stylise` needs neither torch nor a download.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergetta.data.streams import as_input
from mergetta.data.styles.filters import stylised
from mergetta.data.styles.folder import load_style, style_domains
from mergetta.errors import MergettaError

__all__ = ["load_style", "style_domains", "stylise"]
CHUNK = 400_000  # pixel values at a time: bounds the memory, and what is worked on stays near the processor
SMALLEST_SIZE = 8
GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)


def stylise(images: NDArray[np.uint8], style: NDArray[np.uint8], strength: float = 1.0) -> NDArray[np.uint8]:
    """Copies of uint8 images (N, H, W, 1 or 3) in the style of a painting (H, W, 3).

    `strength` 0 gives the images back; 1 gives bands, colours and fine texture the style's statistics. An image's
    result depends on the image and the style alone.

    >>> rng = np.random.default_rng(0)
    >>> images, style = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((2, 16, 16, 3), (16, 16, 3)))
    >>> stylise(images, style).shape
    (2, 16, 16, 3)
    """
    check(images, style, strength)
    painting = as_input(style[None])
    if images.shape[3] == 1:
        painting = np.tensordot(painting, GREY, axes=(1, 0))[:, None]
    chunk = max(1, CHUNK // images[0].size)
    result = np.empty_like(images)
    for start in range(0, len(images), chunk):
        planes = as_input(images[start : start + chunk])
        mixed = planes + np.float32(strength) * (stylised(planes, painting) - planes)
        result[start : start + chunk] = np.rint(np.clip(mixed, 0, 1) * 255).transpose(0, 2, 3, 1)
    return result


def check(images: NDArray[np.uint8], style: NDArray[np.uint8], strength: float) -> None:
    if images.ndim != 4 or images.shape[3] not in (1, 3) or images.dtype != np.uint8 or not len(images):
        raise MergettaError(
            "Images to stylise must be uint8 of shape (batch, height, width, 1 or 3), "
            f"not {images.dtype} {images.shape}."
        )
    if style.ndim != 3 or style.shape[2] != 3 or style.dtype != np.uint8:
        raise MergettaError(
            f"A style must be a uint8 image of shape (height, width, 3), not {style.dtype} {style.shape}."
        )
    size = min(images.shape[1:3])
    if size < SMALLEST_SIZE:
        raise MergettaError(f"Images to stylise must be at least {SMALLEST_SIZE} pixels wide and high, not {size}.")
    if min(style.shape[:2]) < size / 2:
        raise MergettaError(
            f"A style of {style.shape[0]}×{style.shape[1]} pixels is too small for images of {size} pixels; "
            "take one at least half as large."
        )
    if not 0 <= strength <= 1:
        raise MergettaError(f"strength must be between 0 and 1, not {strength}.")
