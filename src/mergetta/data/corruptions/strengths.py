"""How strong each corruption is at severity 1 to 5.

`cifar` (32 px) and `imagenet` (224 px) are the published strengths (Hendrycks & Dietterich 2019). `grey28` is ours,
for 28 px grey images: clothing on black is easier than photographs, so most are stronger than in `cifar`, while fog
and contrast, which hide it altogether, are weaker.
"""

from __future__ import annotations

from typing import Any

Strengths = dict[str, tuple[Any, ...]]


def zooms(last: float, step: float) -> tuple[float, ...]:
    """Zoom factors 1, 1 + step, … up to and including `last`."""
    return tuple(round(1 + i * step, 4) for i in range(round((last - 1) / step) + 1))


def scaled(factor: float, *rows: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(factor * value for value in row) for row in rows)


CIFAR: Strengths = {
    "gaussian_noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": (500, 250, 100, 75, 50),
    "impulse_noise": (0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": tuple(zooms(last, 0.01) for last in (1.06, 1.11, 1.16, 1.21, 1.26)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": scaled(
        32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
    ),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": (80, 65, 58, 50, 40),
}

IMAGENET: Strengths = {
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (60, 25, 12, 5, 3),
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": (
        zooms(1.11, 0.01),
        zooms(1.16, 0.01),
        zooms(1.20, 0.02),
        zooms(1.26, 0.02),
        zooms(1.30, 0.03),
    ),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": scaled(
        244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)
    ),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": (25, 18, 15, 10, 7),
}

GREY28: Strengths = {
    "gaussian_noise": (0.06, 0.10, 0.15, 0.22, 0.30),
    "shot_noise": (60, 30, 15, 8, 5),
    "impulse_noise": (0.03, 0.06, 0.10, 0.16, 0.24),
    "defocus_blur": ((0.5, 0.6), (1, 0.2), (1.5, 0.1), (2, 0.1), (2.5, 0.1)),
    "glass_blur": ((0.25, 1, 1), (0.4, 1, 1), (0.4, 1, 2), (0.5, 2, 1), (0.6, 2, 2)),
    "motion_blur": ((6, 1.5), (6, 2), (8, 2.5), (9, 3), (10, 4)),
    "zoom_blur": tuple(zooms(last, 0.01) for last in (1.11, 1.16, 1.21, 1.31, 1.41)),
    "snow": CIFAR["snow"],
    "frost": CIFAR["frost"],
    "fog": ((0.2, 3**0.5), (0.4, 3**0.5), (0.6, 2.5**0.5), (0.8, 2.2**0.5), (1, 2**0.5)),  # rougher than published
    "brightness": (0.05, 0.1, 0.2, 0.3, 0.4),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.2),
    "elastic_transform": scaled(
        28,
        (0.05, 0.05, 0.03),
        (0.08, 0.05, 0.04),
        (0.12, 0.05, 0.05),
        (0.15, 0.045, 0.06),
        (0.18, 0.04, 0.07),
    ),
    "pixelate": (0.8, 0.65, 0.5, 0.4, 0.3),
    "jpeg_compression": (50, 30, 20, 12, 6),
}

FROST_SCALE = {"cifar": 0.2, "imagenet": 1.0, "grey28": 0.2}
"""By how much frost's published textures are scaled before a piece is cut out of them."""

STRENGTHS: dict[str, Strengths] = {"cifar": CIFAR, "imagenet": IMAGENET, "grey28": GREY28}
