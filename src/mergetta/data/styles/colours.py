"""Whitening and colouring: the linear map between the channels that gives one covariance the shape of another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST = 1e-7  # variance of a tenth of a grey level: below it there is nothing to amplify


def moments(planes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Mean (B, C, 1) and covariance (B, C, C) of the channels of planes (B, C, H, W), over the pixels."""
    flat = planes.reshape(*planes.shape[:2], -1)
    mean = flat.mean(axis=2, keepdims=True)
    centred = flat - mean
    return mean, centred @ centred.swapaxes(1, 2) / np.float32(flat.shape[2])


def power(covariance: NDArray[Any], exponent: float) -> NDArray[Any]:
    """A power of symmetric positive matrices (…, C, C)."""
    values, vectors = np.linalg.eigh(covariance)
    raised = np.maximum(values, SMALLEST**2) ** np.float32(exponent)
    result: NDArray[Any] = (vectors * raised[..., None, :]) @ vectors.swapaxes(-1, -2)
    return result


def transport(have: NDArray[Any], half: NDArray[Any], most: float) -> NDArray[Any]:
    """The map T with T·have·Tᵀ = half² that moves the values least (Monge–Kantorovich).

    `half` is the root of the covariance wanted. A share of it is added to what there is, which bounds the gain by
    `most`: where an image has next to nothing in a band, that would be rounding made visible.
    """
    smallest = np.float32(SMALLEST) * np.eye(half.shape[-1], dtype=np.float32)
    have = have + half @ half / np.float32(most**2) + smallest
    result: NDArray[Any] = half @ power(half @ have @ half, -0.5) @ half
    return result
