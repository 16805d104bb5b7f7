"""A steerable pyramid (Simoncelli & Freeman 1995) of image batches: a bank of oriented band-pass filters, by FFT.

Level 0 is one isotropic high-pass band, the coarser levels have `ORIENTATIONS` bands each, at half the size of the
level before, and what is left is a small low-pass image. The squared filters sum to one, so that a change of the
bands is carried into the image by the same filters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import factorial
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORIENTATIONS = 4
Planes = NDArray[np.float32]
"""(B, C, H, W)."""
Spectrum = NDArray[Any]
"""The real FFT of planes, (B, C, H, W // 2 + 1): complex64, before NumPy 2 complex128."""


@dataclass(frozen=True)
class Filter:
    """One band: its size, and the weights of the part of the spectrum that fits this size."""

    size: tuple[int, int]
    weights: NDArray[np.float32]


def level_count(size: int) -> int:
    """As many levels as leave about four pixels of low-pass image."""
    return max(1, int(np.log2(size / 4)))


@lru_cache(maxsize=32)
def filter_bank(height: int, width: int, levels: int) -> tuple[Filter, ...]:
    """The bank for planes of this size, a multiple of 2^levels; the last filter is the low-pass."""
    radius, angle = frequencies(height, width)
    inside = low_pass(radius, 0)
    parts = [(0, (1 - inside**2) ** 0.5)]
    for level in range(1, levels):
        band = inside * (1 - low_pass(radius, level) ** 2) ** 0.5
        parts += [(level, band * lobe(angle, turn)) for turn in range(ORIENTATIONS)]
        inside = inside * low_pass(radius, level)
    parts.append((levels, inside))
    sizes = [(height >> level, width >> level) for level in range(levels + 1)]
    return tuple(Filter(sizes[level], cropped(weights, sizes[level]).astype(np.float32)) for level, weights in parts)


def lobe(angle: NDArray[np.float64], turn: int) -> NDArray[np.float64]:
    """The angular part of a filter: a power of the cosine, scaled so that the squares sum to one."""
    order = ORIENTATIONS - 1
    scale = 2.0**order * factorial(order) / (ORIENTATIONS * factorial(2 * order)) ** 0.5
    return np.asarray(scale * np.abs(np.cos(angle - np.pi * turn / ORIENTATIONS)) ** order)


def frequencies(height: int, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Radius (1 is the Nyquist frequency) and angle of each coefficient of a real FFT."""
    y, x = np.fft.fftfreq(height)[:, None] * 2, np.fft.rfftfreq(width)[None] * 2
    return np.hypot(y, x), np.arctan2(y, x)


def low_pass(radius: NDArray[np.float64], level: int) -> NDArray[np.float64]:
    """1 below a quarter of 2^-level, 0 above a half, a cosine over the octave between."""
    octave = np.clip(np.log2(np.maximum(radius, 1e-9)) + level + 2, 0, 1)
    fall: NDArray[np.float64] = np.cos(np.pi / 2 * octave)
    return np.where(octave >= 1, 0.0, fall)


def cropped(spectrum: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    """The low frequencies that an image of `size` can hold, over the last two axes."""
    if size[0] == spectrum.shape[-2]:
        return spectrum
    return np.concatenate([spectrum[part] for part in low_parts(size)], axis=-2)


def low_parts(size: tuple[int, int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Where the low frequencies are: the FFT puts the negative rows last."""
    negative, columns = size[0] // 2, size[1] // 2 + 1
    return np.s_[..., : size[0] - negative, :columns], np.s_[..., -negative:, :columns]


def bands(spectrum: Spectrum, bank: tuple[Filter, ...]) -> Iterator[tuple[Filter, Planes]]:
    """Each filter with the band that it sees."""
    full = bank[0].size
    for one in bank:
        seen = cropped(spectrum, one.size) * one.weights
        share = one.size[0] * one.size[1] / (full[0] * full[1])
        yield one, np.fft.irfft2(seen, one.size).astype(np.float32, copy=False) * np.float32(share)


def add_band(spectrum: Spectrum, one: Filter, change: Planes, full: tuple[int, int]) -> None:
    """Carry a change of one band into the spectrum."""
    share = np.float32(full[0] * full[1] / (one.size[0] * one.size[1]))
    added = np.fft.rfft2(change) * (one.weights * share)
    for part in low_parts(one.size):
        spectrum[part] += added[part]
