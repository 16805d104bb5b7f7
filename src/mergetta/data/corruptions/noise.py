"""Noise: gaussian, shot, impulse."""

from __future__ import annotations

import numpy as np

from mergetta.data.corruptions.planes import Generators, Images, drawn


def gaussian_noise(x: Images, rngs: Generators, sigma: float) -> Images:
    return x + sigma * drawn(rngs, lambda rng: rng.standard_normal(x.shape[1:], dtype=np.float32))


def shot_noise(x: Images, rngs: Generators, photons: float) -> Images:
    return np.stack([rng.poisson(image * photons) for rng, image in zip(rngs, x, strict=True)]) / np.float32(photons)


def impulse_noise(x: Images, rngs: Generators, share: float) -> Images:
    """A share of the values becomes black or white, half and half."""
    u = drawn(rngs, lambda rng: rng.random(x.shape[1:], dtype=np.float32))
    return np.where(u < share / 2, np.float32(0), np.where(u < share, np.float32(1), x))
