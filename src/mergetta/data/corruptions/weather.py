"""Weather: snow, frost, fog, brightness."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from mergetta.data.corruptions.planes import Generators, Images, drawn, motion_blurred, zoomed
from mergetta.data.frost_textures import read_textures

ICE = np.array([0.82, 0.93, 1.0], dtype=np.float32)
"""The colour of ice in the published textures, relative to its blue."""


def snow(x: Images, rngs: Generators, strength: tuple[float, ...]) -> Images:
    """Flakes smeared by the wind, in front of an image washed out towards white.

    The published layer is smeared by ImageMagick in whole pixels. That matters here, unlike in photographs: flakes
    are single pixels, and streaks shared between pixels are so faint that ResNet-20 errs on 22 % instead of 31 %.
    """
    mean, std, zoom, threshold, radius, sigma, mix = strength
    height, width = x.shape[1:3]
    flakes = drawn(rngs, lambda rng: rng.normal(mean, std, (height, width, 1))).astype(np.float32)
    flakes = zoomed(flakes, zoom)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1)
    angles = drawn(rngs, lambda rng: rng.uniform(-135, -45))
    flakes = motion_blurred(flakes, int(radius), sigma, angles, whole_pixels=True)
    washed = np.maximum(x, grey(x) * 1.5 + 0.5)
    return mix * x + (1 - mix) * washed + flakes + flakes[:, ::-1, ::-1]


def frost(
    x: Images, rngs: Generators, strength: tuple[float, float], textures: Sequence[Images] | None = None
) -> Images:
    """Ice crystals on the lens, cut out of the published photographs if these are given, or else drawn."""
    keep, amount = strength
    ice = drawn_ice(rngs, x.shape[1:]) if textures is None else cut_out(textures, rngs, x.shape[1:])
    return keep * x + amount * ice


def cut_out(textures: Sequence[Images], rngs: Generators, shape: tuple[int, ...]) -> Images:
    """A random piece of a random texture for each image."""
    height, width = shape[:2]
    pieces = []
    for rng in rngs:
        texture = textures[int(rng.integers(len(textures)))]
        top, left = rng.integers(texture.shape[0] - height + 1), rng.integers(texture.shape[1] - width + 1)
        pieces.append(texture[top : top + height, left : left + width])
    return np.stack(pieces)


@lru_cache(maxsize=4)
def load_textures(folder: Path, scale: float, shape: tuple[int, ...]) -> tuple[Images, ...]:
    """The published textures in [0, 1], scaled; further enlarged where they would not cover an image of this shape.

    Scaled down by a fifth they are not smoothed, as in the published code: that grain is part of how hard frost is.
    """
    height, width, channels = shape
    scaled = []
    for texture in read_textures(folder, channels):
        factor = max(scale, height / texture.shape[0], width / texture.shape[1])
        size = (round(texture.shape[1] * factor), round(texture.shape[0] * factor))
        resized = cv2.resize(texture, size, interpolation=cv2.INTER_LINEAR)
        scaled.append(resized.reshape(*size[::-1], channels).astype(np.float32) / 255)
    return tuple(scaled)


def drawn_ice(rngs: Generators, shape: tuple[int, ...]) -> NDArray[Any]:
    """Ridges of fractal noise in the colour of ice.

    How bright the ice is, how much that differs between images, how much it varies within one, and how rough it is
    follow the published textures at 32 pixels, so that both are about equally hard.
    """
    height, width, channels = shape
    ridges = 1 - np.abs(2 * plasma(rngs, max(height, width), 1.1)[:, :height, :width] - 1)
    level = drawn(rngs, lambda rng: rng.uniform(0.41, 0.99))[:, None, None]
    mean, spread = ridges.mean(axis=(1, 2), keepdims=True), ridges.std(axis=(1, 2), keepdims=True)
    ice = np.clip(level + 0.083 * (ridges - mean) / np.maximum(spread, 1e-6), 0, 1)[..., None]
    return (ice * (ICE if channels == 3 else ICE.mean())).astype(np.float32)


def fog(x: Images, rngs: Generators, strength: tuple[float, float]) -> Images:
    amount, decay = strength
    height, width = x.shape[1:3]
    highest = x.max(axis=(1, 2, 3), keepdims=True)
    # squared: the published code draws from ± wibble and multiplies by wibble once more, and has its strengths for that
    clouds = plasma(rngs, max(height, width), decay**2)[:, :height, :width, None]
    return (x + amount * clouds) * highest / (highest + amount)


def brightness(x: Images, rngs: Generators, amount: float) -> Images:
    """The value of HSV raised, hue and saturation kept: all channels scaled alike."""
    value = x.max(axis=3, keepdims=True)
    raised = np.clip(value + amount, 0, 1)
    return np.where(value > 0, x * (raised / np.where(value > 0, value, 1)), raised)


def grey(x: Images) -> Images:
    return x @ np.array([[0.299], [0.587], [0.114]], dtype=np.float32) if x.shape[3] == 3 else x


def plasma(rngs: Generators, size: int, decay: float) -> NDArray[np.float32]:
    """Fractal noise in [0, 1] by midpoint displacement on a torus, (B, S, S), S the next power of two ≥ size.

    Each halving of the step divides the random displacement by `decay`.
    """
    side = 1 << max(1, (size - 1).bit_length())
    field = np.zeros((len(rngs), side, side), dtype=np.float32)
    step, amplitude = side, 1.0
    while step >= 2:
        half = step // 2
        cells = side // step
        noise = drawn(rngs, lambda rng, n=cells: rng.uniform(-1, 1, (3, n, n)))  # type: ignore[misc]
        corners = field[:, ::step, ::step]
        right, down = np.roll(corners, -1, 2), np.roll(corners, -1, 1)
        centres = (corners + right + down + np.roll(right, -1, 1)) / 4 + amplitude * noise[:, 0]
        field[:, half::step, half::step] = centres
        above, before = np.roll(centres, 1, 1), np.roll(centres, 1, 2)
        field[:, ::step, half::step] = (corners + right + centres + above) / 4 + amplitude * noise[:, 1]
        field[:, half::step, ::step] = (corners + down + centres + before) / 4 + amplitude * noise[:, 2]
        step, amplitude = half, amplitude / decay
    low, high = field.min(axis=(1, 2), keepdims=True), field.max(axis=(1, 2), keepdims=True)
    return (field - low) / np.maximum(high - low, 1e-12)
