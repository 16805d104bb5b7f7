"""Style transfer without learnt weights: the statistics of a painting in a bank of oriented filters, given to images.

As AdaIN does with the features of a network, each band of a steerable pyramid gets the mean and the covariance of its
channels from the style (Heeger & Bergen 1995, Portilla & Simoncelli 2000 in spirit). Gains alone make no brush strokes,
so between two rounds of this the fine bands take in texture from the painting itself. The coarse bands keep the
image's structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mergetta.data.styles.colours import moments, power, transport
from mergetta.data.styles.patches import Patches
from mergetta.data.styles.pyramid import Planes, add_band, bands, filter_bank, frequencies, level_count

LARGEST_GAIN = 4.0
# Hard but not hopeless: in 14 styles a CIFAR-10 ResNet-20 errs on 56 % of the images (8.5 % clean, 26 % at TEXTURE 0).
TEXTURE = 0.5  # share of the painting's texture in the energy at the Nyquist frequency
FADE = 0.5  # what is left of that share an octave below
MARGIN = 16  # the mirrored border is at least this part of the size: the FFT would join opposite edges


@dataclass(frozen=True)
class Style:
    """What is taken from a painting: per band the mean and the root of the covariance, and its patches."""

    levels: int
    statistics: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    patches: Patches


def stylised(images: Planes, painting: Planes) -> Planes:
    """Images (B, C, H, W) in [0, 1] with the statistics of a painting (1, C, H, W)."""
    height, width = images.shape[2:]
    style = analysed(painting.tobytes(), painting.shape, min(height, width))
    padded, (top, left) = mirrored(images, style.levels)
    matched = matched_to(style, padded)
    textured = blended(matched, style.patches.cover(matched))
    return matched_to(style, textured)[..., top : top + height, left : left + width]


@lru_cache(maxsize=16)  # one painting meets many batches
def analysed(painting: bytes, shape: tuple[int, ...], size: int) -> Style:
    """The style of float32 pixels of this shape, for images of `size` pixels on their shorter side."""
    pixels = np.frombuffer(painting, np.float32).reshape(shape)
    levels = level_count(size)
    padded, _ = mirrored(pixels, levels)
    bank = filter_bank(*padded.shape[2:], levels)
    measured = [moments(band) for _, band in bands(np.fft.rfft2(padded), bank)]
    statistics = tuple((mean, power(covariance, 0.5)) for mean, covariance in measured)
    return Style(levels, statistics, Patches.of(pixels[0], size))


def matched_to(style: Style, images: Planes) -> Planes:
    """Every band of the images with the style's mean and covariance."""
    full = (images.shape[2], images.shape[3])
    bank = filter_bank(*full, style.levels)
    spectrum = np.fft.rfft2(images)
    changed = spectrum.copy()
    for (one, band), (mean, half) in zip(bands(spectrum, bank), style.statistics, strict=True):
        own_mean, covariance = moments(band)
        flat = band.reshape(*band.shape[:2], -1)
        change = transport(covariance, half, LARGEST_GAIN) @ (flat - own_mean) + mean - flat
        add_band(changed, one, change.reshape(band.shape), full)
    return np.clip(np.fft.irfft2(changed, full), 0, 1).astype(np.float32, copy=False)


def blended(images: Planes, texture: Planes) -> Planes:
    """The images, with a share of the texture that grows with the frequency."""
    full = (images.shape[2], images.shape[3])
    keep, take = shares(*full)
    mixed = np.fft.irfft2(np.fft.rfft2(images) * keep + np.fft.rfft2(texture) * take, full)
    return mixed.astype(np.float32, copy=False)


@lru_cache(maxsize=16)
def shares(height: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Amplitudes of image and texture per frequency; their squares, the energies, sum to one."""
    radius, _ = frequencies(height, width)
    octaves = -np.log2(np.clip(radius, 1e-9, 1))
    share = TEXTURE * FADE**octaves
    return np.sqrt(1 - share).astype(np.float32), np.sqrt(share).astype(np.float32)


def mirrored(images: Planes, levels: int) -> tuple[Planes, tuple[int, int]]:
    """Images with mirrored borders, sizes a multiple of 2^levels, and where the originals start."""
    step = 2**levels
    pads = []
    for size in images.shape[2:]:
        extra = -(-(size + 2 * (size // MARGIN + 1)) // step) * step - size
        pads.append((extra // 2, extra - extra // 2))
    return np.pad(images, ((0, 0), (0, 0), *pads), mode="symmetric"), (pads[0][0], pads[1][0])
