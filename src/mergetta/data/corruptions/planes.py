"""Batches as OpenCV wants them: many images as the channels of one, so that C loops over the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

Images = NDArray[Any]
"""float32, (B, H, W, C), in [0, 1]."""
Generators = list[np.random.Generator]
PLANES = 64  # OpenCV limits the channels of an image


def on_planes(function: Callable[[Images], Any], images: Images) -> Images:
    """Apply a filter that treats channels alike to every channel of every image, (B, H, W, C)."""
    batch, height, width, channels = images.shape
    stacked = np.ascontiguousarray(images.transpose(1, 2, 0, 3)).reshape(height, width, batch * channels)
    parts = []
    for first in range(0, batch * channels, PLANES):
        part = function(np.ascontiguousarray(stacked[..., first : first + PLANES]))
        parts.append(part[..., None] if part.ndim == 2 else part)
    result = np.concatenate(parts, axis=2)
    return np.ascontiguousarray(result.reshape(*result.shape[:2], batch, channels).transpose(2, 0, 1, 3))


def gaussian_blur(images: Images, sigma: float) -> Images:
    if sigma <= 0:
        return images
    size = 2 * int(4 * sigma + 0.5) + 1
    if size > 2 * max(images.shape[1:3]):  # a filter much wider than the image: a matrix product is ten times faster
        rows, columns = (blur_matrix(length, size, sigma) for length in images.shape[1:3])
        return (rows @ images.transpose(0, 3, 1, 2) @ columns.T).transpose(0, 2, 3, 1)
    return on_planes(lambda x: cv2.GaussianBlur(x, (size, size), sigma), images)


@lru_cache(maxsize=4)
def blur_matrix(length: int, size: int, sigma: float) -> NDArray[np.float32]:
    """(length, length): OpenCV's Gaussian filter along one axis, what it takes from outside mirrored at the edges."""
    kernel = cv2.getGaussianKernel(size, sigma)[:, 0]
    pixels = np.arange(length)
    sources = pixels[:, None] + np.arange(size) - size // 2
    period = max(1, 2 * (length - 1))
    mirrored = np.minimum(sources % period, period - sources % period)
    matrix = np.zeros((length, length))
    np.add.at(matrix, (np.broadcast_to(pixels[:, None], sources.shape), mirrored), kernel)
    return matrix.astype(np.float32)


def zoomed(images: Images, factor: float) -> Images:
    """The centre enlarged by `factor`, at the size of the original."""
    height, width = images.shape[1:3]
    h, w = int(np.ceil(height / factor)), int(np.ceil(width / factor))
    top, left = (height - h) // 2, (width - w) // 2
    crop = images[:, top : top + h, left : left + w]
    size = (max(width, round(w * factor)), max(height, round(h * factor)))
    large = on_planes(lambda x: cv2.resize(x, size, interpolation=cv2.INTER_LINEAR), crop)
    top, left = (size[1] - height) // 2, (size[0] - width) // 2
    return large[:, top : top + height, left : left + width]


def motion_blurred(
    images: Images, radius: int, sigma: float, angles: NDArray[Any], whole_pixels: bool = False
) -> Images:
    """Smear each image along its own angle (degrees), with weights that fall off as half a Gaussian.

    A step of the smear mostly ends between pixels, and its weight is shared by the four around it. With
    `whole_pixels` the nearest takes all of it, as in ImageMagick, so that a streak stays one pixel wide.
    """
    taps = np.arange(min(2 * radius, int(np.ceil(4 * sigma))) + 1)
    weights = np.exp(-(taps**2) / (2 * sigma**2))
    reach = int(taps[-1]) + 1
    result = np.empty_like(images)
    for i, angle in enumerate(np.deg2rad(angles)):
        kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
        y, x = reach - taps * np.sin(angle), reach + taps * np.cos(angle)
        if whole_pixels:
            y, x = np.rint(y), np.rint(x)
        y0, x0 = np.floor(y).astype(int), np.floor(x).astype(int)
        for dy, wy in ((0, y0 + 1 - y), (1, y - y0)):
            for dx, wx in ((0, x0 + 1 - x), (1, x - x0)):
                np.add.at(
                    kernel,
                    (np.minimum(y0 + dy, 2 * reach), np.minimum(x0 + dx, 2 * reach)),
                    weights * wy * wx,
                )
        blurred = cv2.filter2D(images[i], -1, kernel / kernel.sum(), borderType=cv2.BORDER_REPLICATE)
        result[i] = blurred.reshape(images[i].shape)
    return result


def drawn(rngs: Generators, draw: Callable[[np.random.Generator], Any]) -> NDArray[Any]:
    """One draw per image from its own generator, stacked."""
    return np.stack([draw(rng) for rng in rngs])
