"""How moments vary between the images of a domain, and between domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError


@dataclass(frozen=True)
class Variances:
    """How moments vary, (2, layers) each: of means and of second moments, on average over a layer's channels."""

    images: NDArray[np.float64]
    """s²: between images of a domain."""
    domains: NDArray[np.float64]
    """τ²: between domains."""

    def __post_init__(self) -> None:
        for name in ("images", "domains"):  # as exact as files are
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float32).astype(np.float64))
        both = np.stack([self.images, self.domains]) if self.images.shape == self.domains.shape else np.full(1, np.nan)
        if both.ndim != 3 or both.shape[1] != 2 or not (np.isfinite(both) & (both >= 0)).all():
            raise MergettaError("Variances between images and domains must be positive, two for each layer.")

    def ratio(self, variance: NDArray[Any]) -> NDArray[np.float64]:
        """Of a variance to that between images, a number per layer: the geometric mean of both moments.

        With two numbers, a variance could come out negative.
        """
        return np.asarray(np.sqrt((variance / np.maximum(self.images, 1e-12)).prod(axis=0)))


def with_seconds(moments: NDArray[Any]) -> NDArray[np.float64]:
    """Mean and second moment, from mean and variance."""
    mean, variance = np.asarray(moments, dtype=np.float64)
    return np.stack([mean, variance + mean * mean])


def over_layers(values: NDArray[Any], sizes: Sequence[int]) -> NDArray[np.float64]:
    """(…, C) → (…, layers): the mean over each layer's channels."""
    starts = np.append(0, np.cumsum(sizes)[:-1]).astype(int)
    return np.asarray(np.add.reduceat(values, starts, axis=-1) / np.asarray(sizes))


def between_domains(
    domains: NDArray[Any], sizes: Sequence[int], weights: NDArray[Any] | None = None
) -> NDArray[np.float64]:
    """(2, layers): variance between domains, (M, 2, C), of means and of second moments."""
    seconds = np.stack([with_seconds(each) for each in domains])
    apart = (seconds - np.average(seconds, axis=0, weights=weights)) ** 2
    return over_layers(np.average(apart, axis=0, weights=weights), sizes)
