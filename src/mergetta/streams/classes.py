"""How mixed the classes of a stream look: how many independent images its mean is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def predicted(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """How often each class is predicted."""
    p = np.asarray(probabilities)
    return np.bincount(p.argmax(axis=1), minlength=p.shape[1]).astype(np.float64)


def independent_images(counts: NDArray[Any], bias: float = 0.0) -> float:
    """How many independently drawn images a mean over these is worth, by how often each class was predicted.

    A plain mean over n images, of which a share π_k is of class k, errs from the mean over equally frequent classes in
    two ways: by chance, with the variance s²/n, and by the classes that it has too many of, with up to s² (Σ π_k² −
    1/K), if classes explain all of the variance s² between images. So it is worth 1 / (Σ π_k² − 1/K + 1/n) images:
    about n/2 where classes come at random, and one where there is one class, for an hour or for a minute. Once all
    classes have come, in whatever order, it counts again. As much as `bias` of that sum is the model's own doing.

    NOTE (Gong et al. 2022) and RoTTA (Yuan et al. 2023) balance a memory of images by predicted classes for the same
    reason; here no image is kept.

    >>> round(independent_images(np.array([50, 0])), 1), round(independent_images(np.array([25, 25])), 1)
    (1.9, 50.0)
    """
    total = float(np.sum(counts))
    if total <= 0:
        return 0.0
    shares = counts / total
    uneven = float(shares @ shares) - 1 / len(counts) - bias
    return 1 / (max(uneven, 0.0) + 1 / total)


def mixed(counts: NDArray[Any]) -> float:
    """How mixed the predicted classes are: 1 as by chance or more, near 0 for one class.

    >>> mixed(np.full(10, 6.4)), round(mixed(np.array([64.0] + 9 * [0.0])), 2)
    (1.0, 0.03)
    """
    total = float(np.sum(counts))
    return min(1.0, 2 * independent_images(counts) / total) if total > 0 else 0.0
