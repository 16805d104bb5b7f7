"""Sparsifiers: which entries of a task vector survive. Norm-layer groups are small, so none may end up empty."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError


def keep_largest(vectors: NDArray[np.floating[Any]], keep: float) -> NDArray[np.floating[Any]]:
    """NWS, non-influential weight suppression: keep the share `keep` of largest magnitude in each row.

    At least one entry is kept, ties at the threshold are all kept, and a row of zeros stays as it is.

    >>> keep_largest(np.array([[3.0, -4.0, 1.0, 0.5, -1.0]]), 0.4)
    array([[ 3., -4.,  0.,  0.,  0.]])
    """
    if not 0 < keep <= 1:
        raise MergettaError(f"keep must be a share above 0 and at most 1, not {keep}.")
    size = vectors.shape[1]
    count = max(1, int(keep * size + 0.5))
    magnitudes = np.abs(vectors)
    threshold = np.partition(magnitudes, size - count, axis=1)[:, size - count, None]
    return np.where(magnitudes >= threshold, vectors, 0.0)
