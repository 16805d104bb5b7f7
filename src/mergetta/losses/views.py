"""Second views of a batch, seeded, for any array library: ROID's augmentation, DeYO's destroyed objects.

Images are NCHW in [0, 1]. All random numbers come from a NumPy generator, so NumPy and torch see the same views. Each
view draws for the whole batch and returns the images in `keep` (a mask), so an image has the same view whichever
others are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mergetta.arrays import Array, array_namespace, beside
from mergetta.errors import MergettaError

GREY = (0.299, 0.587, 0.114)
# Hue turns the chroma plane of YIQ; the rows are Y, I, Q in terms of R, G, B.
YIQ = np.array([GREY, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)])


@dataclass(frozen=True)
class Draws:
    """How ROID's augmentation draws its strengths, shifts, turns, scales and flips."""

    per_image: bool
    """Draw for each image, instead of once for the batch."""
    shift: float
    """The largest shift, as a share of the image's height and width."""

    def uniform(self, rng: np.random.Generator, low: float, high: float, keep: np.ndarray) -> np.ndarray:
        """One number for each image that is kept."""
        values = rng.uniform(low, high, keep.size if self.per_image else 1)
        return np.asarray(np.broadcast_to(values, keep.size)[keep])


DRAWS = {
    "published": Draws(per_image=False, shift=1 / 8),
    "per-image": Draws(per_image=True, shift=1 / 16),
}
"""The published code shifts by 1/16 of an image that it has padded by half its size on each side, so by 1/8 of the
image itself. The variant `per-image` is ours."""


def find_draws(name: str) -> Draws:
    if name not in DRAWS:
        raise MergettaError(f"There are no views {name!r}; choose one of {', '.join(DRAWS)}.")
    return DRAWS[name]


def colour_and_geometry(
    images: Array, rng: np.random.Generator, keep: np.ndarray, draws: Draws = DRAWS["published"]
) -> Array:
    """ROID's augmentation: jitter the colours in random order, then move, turn, scale and flip."""
    return move(jitter(images, rng, keep, draws), rng, keep, draws)


def jitter(images: Array, rng: np.random.Generator, keep: np.ndarray, draws: Draws) -> Array:
    """Brightness, contrast, saturation, hue and gamma, in one random order per batch."""
    strengths = {
        "brightness": draws.uniform(rng, 0.6, 1.4, keep),
        "contrast": draws.uniform(rng, 0.7, 1.3, keep),
        "saturation": draws.uniform(rng, 0.5, 1.5, keep),
        "hue": draws.uniform(rng, -0.06, 0.06, keep),
        "gamma": draws.uniform(rng, 0.7, 1.3, keep),
    }
    order = rng.permutation(list(strengths))
    images = images[beside(keep, images)]
    for name in order:
        images = COLOURS[str(name)](images, strengths[str(name)])
    return images


def brightness(images: Array, strength: np.ndarray) -> Array:
    return limit(images * like(images, strength))


def contrast(images: Array, strength: np.ndarray) -> Array:
    xp = array_namespace(images)
    mean = xp.mean(grey(images), axis=(1, 2, 3), keepdims=True)
    return limit(mean + like(images, strength) * (images - mean))


def saturation(images: Array, strength: np.ndarray) -> Array:
    if images.shape[1] != 3:
        return images
    base = grey(images)
    return limit(base + like(images, strength) * (images - base))


def hue(images: Array, strength: np.ndarray) -> Array:
    if images.shape[1] != 3:
        return images
    xp = array_namespace(images)
    angle = 2 * np.pi * strength
    turn = np.zeros((len(angle), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = np.cos(angle)
    turn[:, 1, 2], turn[:, 2, 1] = -np.sin(angle), np.sin(angle)
    matrix = beside(np.linalg.inv(YIQ) @ turn @ YIQ, images)
    flat = xp.reshape(images, (*images.shape[:2], images.shape[2] * images.shape[3]))
    return limit(xp.reshape(xp.matmul(matrix, flat), images.shape))


def gamma(images: Array, strength: np.ndarray) -> Array:
    return images ** like(images, strength)


COLOURS = {
    "brightness": brightness,
    "contrast": contrast,
    "saturation": saturation,
    "hue": hue,
    "gamma": gamma,
}


def move(images: Array, rng: np.random.Generator, keep: np.ndarray, draws: Draws) -> Array:
    """Turn by ±15°, shift, scale by 0.9–1.1, flip every second time; mirrored at the border, bilinear.

    `images` are the kept ones already.
    """
    height, width = images.shape[2:]
    angle = np.deg2rad(draws.uniform(rng, -15, 15, keep))[:, None, None]
    down, right = (draws.uniform(rng, -draws.shift, draws.shift, keep)[:, None, None] for _ in range(2))
    scale = draws.uniform(rng, 0.9, 1.1, keep)[:, None, None]
    flip = np.where(draws.uniform(rng, 0, 1, keep) < 0.5, -1.0, 1.0)[:, None, None]
    # For each target pixel, where it comes from: the inverse of shift ∘ turn ∘ scale ∘ flip about the centre.
    y = np.arange(height)[None, :, None] - (height - 1) / 2 - down * height
    x = np.arange(width)[None, None, :] - (width - 1) / 2 - right * width
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    rows = cos * y - sin * x + (height - 1) / 2
    columns = (sin * y + cos * x) * flip + (width - 1) / 2
    return bilinear(images, mirror(rows, height), mirror(columns, width))


def mirror(position: np.ndarray, size: int) -> np.ndarray:
    """Positions outside [0, size − 1] reflected back inside, without repeating the border."""
    if size == 1:
        return np.zeros_like(position)
    return np.asarray((size - 1) - np.abs(np.mod(position, 2 * (size - 1)) - (size - 1)))


def bilinear(images: Array, rows: np.ndarray, columns: np.ndarray) -> Array:
    """images sampled at (rows, columns), each (B, H, W) within the image."""
    height, width = images.shape[2:]
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    down, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    dy, dx = beside((rows - top)[:, None], images), beside((columns - left)[:, None], images)
    upper = take(images, top, left) * (1 - dx) + take(images, top, right) * dx
    lower = take(images, down, left) * (1 - dx) + take(images, down, right) * dx
    return upper * (1 - dy) + lower * dy


def take(images: Array, rows: np.ndarray, columns: np.ndarray) -> Array:
    """images[b, :, rows[b], columns[b]] for every image b."""
    xp = array_namespace(images)
    batch, channels, height, width = images.shape
    planes = np.arange(batch * channels).reshape(batch, channels, 1, 1) * (height * width)
    index = beside((planes + (rows * width + columns)[:, None]).reshape(-1), images)
    return xp.reshape(xp.take(xp.reshape(images, (-1,)), index), (batch, channels, *rows.shape[1:]))


def shuffle_patches(images: Array, rng: np.random.Generator, keep: np.ndarray, grid: int = 4) -> Array:
    """A grid of patches in random order, another order for each image; a remainder at the border stays."""
    images = images[beside(keep, images)]
    batch, _, height, width = images.shape
    h, w = height // grid, width // grid
    order = rng.permuted(np.tile(np.arange(grid * grid), (keep.size, 1)), axis=1)[keep]
    y, x = np.divmod(order.reshape(batch, grid, grid), grid)
    rows = np.tile(np.arange(height)[None, :, None], (batch, 1, width))
    columns = np.tile(np.arange(width)[None, None, :], (batch, height, 1))
    rows[:, : h * grid, : w * grid] = (y * h).repeat(h, 1).repeat(w, 2) + np.tile(np.arange(h), grid)[:, None]
    columns[:, : h * grid, : w * grid] = (x * w).repeat(h, 1).repeat(w, 2) + np.tile(np.arange(w), grid)
    return take(images, rows, columns)


def shuffle_pixels(images: Array, rng: np.random.Generator, keep: np.ndarray) -> Array:
    """All pixels in random order, another order for each image."""
    images = images[beside(keep, images)]
    batch, _, height, width = images.shape
    order = rng.permuted(np.tile(np.arange(height * width), (keep.size, 1)), axis=1)[keep]
    rows, columns = np.divmod(order.reshape(batch, height, width), width)
    return take(images, rows, columns)


def occlude(images: Array, rng: np.random.Generator, keep: np.ndarray) -> Array:
    """A centred square of half the height and width filled with the image's mean."""
    images = images[beside(keep, images)]
    xp = array_namespace(images)
    height, width = images.shape[2:]
    inside = np.zeros((height, width), dtype=bool)
    inside[height // 4 : height // 4 + height // 2, width // 4 : width // 4 + width // 2] = True
    return xp.where(beside(inside, images), xp.mean(images, axis=(2, 3), keepdims=True), images)


def grey(images: Array) -> Array:
    if images.shape[1] != 3:
        return images
    weights = beside(np.array(GREY).reshape(1, 3, 1, 1), images)
    return array_namespace(images).sum(images * weights, axis=1, keepdims=True)


def limit(images: Array) -> Array:
    return array_namespace(images).clip(images, min=0.0, max=1.0)


def like(images: Array, values: np.ndarray) -> Array:
    """One number per image, (B,) → (B, 1, 1, 1)."""
    return beside(values.reshape(-1, 1, 1, 1), images)
