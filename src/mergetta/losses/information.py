"""Certain and diverse: how good predictions look without labels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def entropy_of(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """H of each distribution, (…, K) → (…)."""
    p = np.asarray(probabilities, dtype=np.float64)
    return np.asarray(-(p * np.log(np.maximum(p, 1e-12))).sum(axis=-1))


def information(probabilities: NDArray[Any]) -> float:
    """Mutual information of images and predicted classes: entropy of the mean prediction − mean entropy.

    It is high for a model that is sure of each image and varied over all of them.

    References
    ----------
    Liang et al. 2020, Do we really need to access the source data? (SHOT): information maximisation.

    >>> round(information(np.eye(2)), 3), information(np.full((2, 2), 0.5))
    (0.693, 0.0)
    """
    return float(entropy_of(np.mean(probabilities, axis=0)) - entropy_of(probabilities).mean())
