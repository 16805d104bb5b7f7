"""Blur: defocus, glass, motion, zoom."""

from __future__ import annotations

import cv2
import numpy as np

from mergetta.data.corruptions.planes import (
    Generators,
    Images,
    drawn,
    gaussian_blur,
    motion_blurred,
    on_planes,
    zoomed,
)


def defocus_blur(x: Images, rngs: Generators, strength: tuple[float, float]) -> Images:
    """A disk, slightly blurred against aliasing."""
    radius, alias = strength
    reach = max(8, int(radius))
    axis = np.arange(-reach, reach + 1)
    disk = (axis[None] ** 2 + axis[:, None] ** 2 <= radius**2).astype(np.float32)
    size = 3 if radius <= 8 else 5
    kernel = cv2.GaussianBlur(disk / disk.sum(), (size, size), alias)
    return on_planes(lambda planes: cv2.filter2D(planes, -1, kernel), x)


def glass_blur(x: Images, rngs: Generators, strength: tuple[float, int, int]) -> Images:
    """Each pixel takes the colour of a random neighbour, up to `reach` away.

    The published code means to swap two pixels, but on colour images it copies (both sides of the swap are views),
    and the published sets were made with it. So this copies too, which needs no walk from pixel to pixel.
    """
    sigma, reach, rounds = strength
    x = gaussian_blur(x, sigma)
    batch, height, width = x.shape[:3]
    rows, columns = np.mgrid[:height, :width]
    inside = (rows >= reach) & (rows <= height - reach) & (columns >= reach) & (columns <= width - reach)
    for _ in range(rounds):
        shift = drawn(rngs, lambda rng: rng.integers(-reach, reach, (2, height, width), dtype=np.int8)) * inside
        x = x[np.arange(batch)[:, None, None], rows + shift[:, 0], columns + shift[:, 1]]
    return gaussian_blur(x, sigma)


def motion_blur(x: Images, rngs: Generators, strength: tuple[int, float]) -> Images:
    return motion_blurred(x, *strength, drawn(rngs, lambda rng: rng.uniform(-45, 45)))


def zoom_blur(x: Images, rngs: Generators, factors: tuple[float, ...]) -> Images:
    """The mean of the image and its enlargements."""
    total = x.copy()
    for factor in factors:
        total += zoomed(x, factor)
    return total / np.float32(len(factors) + 1)
