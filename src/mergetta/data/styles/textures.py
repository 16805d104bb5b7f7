"""Fifty drawn textures to take styles from where there are no paintings: ten kinds, five of each, grey, by formula.

Nothing is read or downloaded; a name and a size give the same pixels everywhere. Kinds alternate in the order of the
names, and scale and tone spread evenly over every ten, so that ten styles are as diverse and as hard as fifty.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.seeds import generator

Field = NDArray[np.float64]
"""Values over the unit square, (size, size)."""
Random = np.random.Generator
PER_KIND = 5
FINER = 3  # drawn so many times larger and averaged: fine lines would alias
BRIGHTNESS = (0.1, 0.6)  # of the mean
CONTRAST = (0.14, 0.28)  # standard deviation
SPREAD = (0.8192, 0.6710, 0.5497)  # steps of an even sequence in three dimensions (Roberts 2018)


def texture(name: str, size: int) -> NDArray[np.uint8]:
    """A texture as a painting of (size, size, 3), its channels equal.

    >>> texture("marble_2", 28).shape
    (28, 28, 3)
    """
    if name not in TEXTURES:
        raise MergettaError(f"There is no texture {name!r}; choose from {', '.join(TEXTURES)}.")
    if size < 1:
        raise MergettaError(f"The size of a texture must be positive, not {size}.")
    kind, _, number = name.rpartition("_")
    place = (np.arange(size * FINER) + 0.5) / (size * FINER)
    x, y = np.meshgrid(place, place)
    turn = int(number) + 2 * list(KINDS).index(kind)  # fine and coarse ones in every ten: fine ones are harder
    coarseness = turn % PER_KIND / (PER_KIND - 1)
    fine = KINDS[kind](x, y, coarseness, generator(0, int(number), f"textures/{kind}"))
    field = fine.reshape(size, FINER, size, FINER).mean(axis=(1, 3))
    grey = np.rint(toned(field, TEXTURES.index(name)) * 255).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)


def toned(field: Field, index: int) -> Field:
    """A field in [0, 1], its brightness, contrast and polarity by the place in the order."""
    bright, strong, turned_over = ((index + 1) * step % 1 for step in SPREAD)
    mean, deviation = (low + (high - low) * share for (low, high), share in ((BRIGHTNESS, bright), (CONTRAST, strong)))
    sign = -1 if turned_over < 0.5 else 1
    normal = (field - field.mean()) / max(float(field.std()), 1e-6)
    return np.asarray(np.clip(mean + sign * deviation * normal, 0, 1))


def turned(x: Field, y: Field, angle: float) -> tuple[Field, Field]:
    """Coordinates along and across a direction."""
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


def wave(phase: Field, sharpness: float = 0.0) -> Field:
    """A sine of period 1; with sharpness, towards a square wave."""
    sine: Field = np.sin(2 * np.pi * phase)
    return np.asarray(np.tanh(sharpness * sine)) if sharpness else sine


def cloud(shape: tuple[int, ...], falloff: float, random: Random) -> Field:
    """Noise whose amplitude falls with the frequency f as 1 / f^falloff; mean 0, deviation 1."""
    y, x = np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None]
    radius = np.maximum(np.hypot(y, x), 1 / max(shape))
    spectrum = np.fft.rfft2(random.standard_normal(shape)) / radius**falloff
    spectrum[0, 0] = 0
    field = np.fft.irfft2(spectrum, shape)
    return np.asarray(field / max(float(field.std()), 1e-6))


def stripes(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    along, _ = turned(x, y, random.uniform(0, np.pi))
    return wave((9 - 6 * coarseness) * along + random.random(), random.uniform(0.5, 3))


def dots(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Discs on a turned lattice, every other row shifted by half a step."""
    along, across = turned(x, y, random.uniform(0, np.pi))
    count, radius = 7 - 4 * coarseness, random.uniform(0.25, 0.4)
    row = np.floor(across * count)
    distance = np.hypot((along * count + row % 2 / 2) % 1 - 0.5, across * count - row - 0.5)
    return np.asarray(np.tanh((radius - distance) * 12))


def checkers(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    along, across = turned(x, y, random.uniform(0, np.pi))
    count = 5 - 3 * coarseness
    return wave(count * along + random.random(), 4) * wave(count * across + random.random(), 4)


def cells(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Voronoi cells: each with a shade of its own, dark at the walls."""
    seeds = random.random((round(90 - 70 * coarseness), 2))
    distance = np.hypot(x[..., None] - seeds[:, 0], y[..., None] - seeds[:, 1])
    nearest, second = np.moveaxis(np.sort(distance, axis=2)[..., :2], 2, 0)
    shade: Field = random.standard_normal(len(seeds))[distance.argmin(axis=2)]
    wall: Field = np.tanh((second - nearest) * len(seeds) ** 0.5 * 3)
    return 0.5 * shade + 2 * wall


def wood(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Growth rings around a far centre, drawn out along the grain."""
    along, across = turned(x, y, random.uniform(0, np.pi))
    radius = np.hypot(0.35 * (along - random.uniform(0, 1)), across - random.uniform(-0.2, 1.2))
    ring = ((16 - 10 * coarseness) * radius + 0.3 * cloud(x.shape, 2.2, random)) % 1
    return ring**1.5 + 0.1 * cloud(x.shape, 0, random)


def marble(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Veins: waves bent by turbulence."""
    along, _ = turned(x, y, random.uniform(0, np.pi))
    return np.abs(wave((3.5 - 2 * coarseness) * along + 0.4 * cloud(x.shape, 2.4, random))) ** 0.6


def strokes(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Short strokes of a brush, one over the other, along a direction that drifts."""
    length, width = 0.16 + 0.14 * coarseness, 0.03 + 0.05 * coarseness
    field, direction = np.zeros_like(x), random.uniform(0, np.pi)
    for _ in range(round(9 / (length + width) ** 2)):
        left, top, shade = random.uniform(-0.1, 1.1), random.uniform(-0.1, 1.1), random.standard_normal()
        along, across = turned(x - left, y - top, direction + 0.8 * np.sin(3 * left + 2 * top))
        cover = np.exp(-((along / length) ** 4) - (across / width) ** 2)
        field += cover * (shade - field)
    return field


def noise(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """From white to smooth."""
    return cloud(x.shape, 2.4 * coarseness, random)


def hatching(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Thin lines of ink by a trembling hand, pressed by a cloud; a second direction where it is darkest."""
    pressure, angle = cloud(x.shape, 2, random), random.uniform(0, np.pi)
    ink = np.zeros_like(x)
    for turn, least in ((0.0, -2.0), (random.uniform(0.9, 1.6), 0.0)):
        along, across = turned(x, y, angle + turn)
        line = wave((8 - 4 * coarseness) * across + 0.15 * np.sin(9 * along) + 0.05 * cloud(x.shape, 1, random))
        ink = np.maximum(ink, np.clip(line - 0.4, 0, None) * np.clip(pressure - least, 0, 2))
    return -ink


def weave(x: Field, y: Field, coarseness: float, random: Random) -> Field:
    """Round threads over and under each other."""
    along, across = turned(x, y, random.uniform(0, np.pi))
    u, v = (8 - 4 * coarseness) * along, (8 - 4 * coarseness) * across
    over = (np.floor(u) + np.floor(v)) % 2
    lying, standing = np.abs(wave(v / 2)), np.abs(wave(u / 2))
    return np.where(over > 0, lying, random.uniform(0.3, 0.8) * standing)


KINDS: dict[str, Callable[[Field, Field, float, Random], Field]] = {
    kind.__name__: kind for kind in (stripes, cells, noise, weave, marble, dots, strokes, hatching, checkers, wood)
}
TEXTURES = tuple(f"{kind}_{number}" for number in range(1, PER_KIND + 1) for kind in KINDS)
"""The names, in the order in which a suite of fewer styles takes them."""
