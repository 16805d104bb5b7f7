"""Weather: snow, frost, fog, brightness."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergetta.data.corruptions.planes import Generators, Images, drawn, motion_blurred, zoomed

ICE = np.array([0.85, 0.95, 1.0], dtype=np.float32)


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


def frost(x: Images, rngs: Generators, strength: tuple[float, float]) -> Images:
    """Ice crystals on the lens: bright ridges of fractal noise (the published photographs are not needed)."""
    keep, amount = strength
    height, width, channels = x.shape[1:]
    base = plasma(rngs, max(height, width), 1.8)[:, :height, :width]
    fine = plasma(rngs, max(height, width), 1.4)[:, :height, :width]
    ridges = (1 - np.abs(2 * fine - 1)) ** 3
    texture = np.clip(0.25 + 0.6 * base * (0.4 + ridges), 0, 1)[..., None]
    return keep * x + amount * texture * (ICE if channels == 3 else ICE.mean())


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
