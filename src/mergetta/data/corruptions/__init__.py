"""The 15 common corruptions (Hendrycks & Dietterich 2019), seeded per image, for images of any size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.data.corruptions import blur, digital, noise, weather
from mergetta.data.corruptions.planes import Generators, Images
from mergetta.data.corruptions.strengths import FROST_SCALE, STRENGTHS
from mergetta.errors import MergettaError
from mergetta.seeds import generator

CORRUPTIONS: dict[str, Callable[[Images, Generators, Any], Images]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
}
CHUNK = 4_000_000  # pixel values at a time: bounds the memory, whatever the batch


def corrupt(
    images: NDArray[np.uint8],
    name: str,
    severity: int = 5,
    seed: int = 0,
    strengths: str | None = None,
    indices: NDArray[np.int64] | None = None,
    frost: Path | None = None,
) -> NDArray[np.uint8]:
    """Corrupted copies of uint8 images (B, H, W, C), C = 1 or 3.

    Image i is drawn from (seed, name, i) alone, so a part of a set is corrupted as in the whole; `indices` are the
    images' numbers in the set where these are not the first.
    `strengths` is `cifar`, `imagenet` or `grey28`; by default what fits the size. `frost` is the folder of frost's
    published textures; without it, whatever lies on this machine, they are drawn.

    >>> corrupt(np.zeros((2, 8, 8, 1), np.uint8), "brightness").max()
    np.uint8(102)
    """
    check(name, severity)
    if images.ndim != 4 or images.shape[3] not in (1, 3) or images.dtype != np.uint8 or not images[0:1].size:
        raise MergettaError(
            "Images to corrupt must be uint8 of shape (batch, height, width, 1 or 3), "
            f"not {images.dtype} {images.shape}."
        )
    table = strengths or fitting_strengths(images.shape)
    if table not in STRENGTHS:
        raise MergettaError(f"There are no strengths {table!r}; choose one of {', '.join(STRENGTHS)}.")
    strength = STRENGTHS[table][name][severity - 1]
    apply = CORRUPTIONS[name]
    if name == "frost" and frost is not None:
        apply = partial(weather.frost, textures=weather.load_textures(frost, FROST_SCALE[table], images.shape[1:]))
    numbers = np.arange(len(images)) if indices is None else indices
    chunk = max(1, CHUNK // images[0].size)
    result = np.empty_like(images)
    for start in range(0, len(images), chunk):
        part = images[start : start + chunk].astype(np.float32) / 255
        rngs = [generator(seed, number, name) for number in numbers[start : start + chunk].tolist()]
        corrupted = apply(part, rngs, strength)
        result[start : start + chunk] = np.rint(np.clip(corrupted, 0, 1) * 255)
    return result


def check(name: str, severity: int) -> None:
    if name not in CORRUPTIONS:
        raise MergettaError(f"There is no corruption {name!r}; choose one of {', '.join(CORRUPTIONS)}.")
    check_severity(severity)


def check_severity(severity: int) -> None:
    if severity not in range(1, 6):
        raise MergettaError(f"severity must be 1 to 5, not {severity}.")


def fitting_strengths(shape: tuple[int, ...]) -> str:
    if min(shape[1:3]) >= 64:
        return "imagenet"
    return "grey28" if shape[3] == 1 else "cifar"
