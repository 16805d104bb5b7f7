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


def keep_middle(
    vectors: NDArray[np.floating[Any]], drop_largest: float, drop_smallest: float
) -> NDArray[np.floating[Any]]:
    """Drop the given shares of the largest and of the smallest magnitudes in each row, both counted on all entries.

    At least one entry is kept, one that is not zero if there is any; ties at both thresholds are all kept.

    >>> keep_middle(np.array([[9.0, -4.0, 3.0, 0.5]]), 0.25, 0.25)
    array([[ 0., -4.,  3.,  0.]])
    """
    if not (drop_largest >= 0 and drop_smallest >= 0 and drop_largest + drop_smallest < 1):
        raise MergettaError(
            f"drop_largest and drop_smallest must be shares that add up to less than 1, not {drop_largest} "
            f"and {drop_smallest}."
        )
    size = vectors.shape[1]
    magnitudes = np.abs(vectors)
    falling = np.sort(magnitudes, axis=1)[:, ::-1]
    # in a sparse row the outliers may be all there is: leave the last entry that is not zero
    spare = np.maximum(np.count_nonzero(vectors, axis=1) - 1, 0)
    first = np.minimum(int(drop_largest * size + 0.5), spare)[:, None]
    last = np.maximum(first, size - 1 - int(drop_smallest * size + 0.5))
    kept = (magnitudes <= np.take_along_axis(falling, first, 1)) & (magnitudes >= np.take_along_axis(falling, last, 1))
    return np.where(kept, vectors, 0.0)


def drop_at_random(
    vectors: NDArray[np.floating[Any]], drop: float, rng: np.random.Generator
) -> NDArray[np.floating[Any]]:
    """Zero each entry with probability `drop` and divide the others by 1 − drop: the expected row is the row itself.

    So a row may lose all its entries: keeping one regardless would make small groups too large on average.

    >>> drop_at_random(np.array([[1.0, 2.0]]), 0.0, np.random.default_rng(0))
    array([[1., 2.]])
    """
    if not 0 <= drop < 1:
        raise MergettaError(f"drop must be a probability below 1, not {drop}.")
    return np.where(rng.random(vectors.shape) >= drop, vectors / (1 - drop), 0.0)
