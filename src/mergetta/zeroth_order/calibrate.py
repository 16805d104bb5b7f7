"""A δ that fits the runtime: large enough for the loss difference to rise above rounding, small enough to be a slope.

Without labels: along each of a few random directions, the slope measured with δ is compared with the one measured with
2δ. Where rounding (or int8 steps) drowns the difference, the two have nothing to do with each other; where δ is right,
they agree. The smallest δ whose slopes agree is chosen, and none if they agree nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.zeroth_order.perturbation import draw

GRID = tuple(1e-4 * 2**k for k in range(14))
"""1e-4, the paper's δ for a float32 ViT, up to about 0.8."""


class Calibration(NamedTuple):
    delta: float | None
    """None where slopes agree at no δ: there is nothing to go by."""
    agreement: dict[float, float]
    """δ → correlation of the slopes at δ and at 2δ over the directions."""


def calibrate_delta(
    loss: Callable[[Vector], float],
    point: Vector,
    directions: int = 8,
    threshold: float = 0.95,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Costs 2 × directions × 14 evaluations of the loss.

    >>> calibrate_delta(lambda w: float((w**2).sum()), np.ones(3)).delta
    0.0001
    """
    if directions < 4:
        raise MergettaError(f"At least 4 directions are needed, not {directions}.")
    along = [draw(seed, i, (("", point.size),)) for i in range(directions)]
    slopes: dict[float, np.ndarray] = {}
    for number, delta in enumerate(GRID, 1):
        differences = [loss(point + delta * z) - loss(point - delta * z) for z in along]
        slopes[delta] = np.array(differences) / (2 * delta)
        progress(number, len(GRID))
    agreement = {delta: correlation(slopes[delta], slopes[twice]) for delta, twice in pairwise(GRID)}
    steady = [delta for delta, twice in pairwise(agreement) if min(agreement[delta], agreement[twice]) >= threshold]
    return Calibration(steady[0] if steady else None, agreement)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Uncentred, and −1 where anything is not finite: slopes must agree in sign and size, not only in rank."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return -1.0
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else 0.0
