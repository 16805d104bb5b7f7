"""RR, redundancy reduction, and ARS, adaptive rank selection: a few directions that all experts share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]


class LowRank(NamedTuple):
    """T ≈ coordinates @ basis, directions in order of falling energy."""

    coordinates: Matrix
    """U Σ, (M, R): each expert in terms of the basis."""
    basis: Matrix
    """V, (R, D), orthonormal rows."""
    energies: Matrix
    """σ², (R,); R is the numerical rank of T."""


def factorise(tasks: Matrix) -> LowRank:
    """SVD of the task matrix (M, D)."""
    left, sigma, right = svd(tasks)
    rank = int(np.count_nonzero(sigma > sigma.max(initial=0.0) * max(tasks.shape) * np.finfo(sigma.dtype).eps))
    left, sigma, right = left[:, :rank], sigma[:rank], right[:rank]
    sign = signs(right)
    return LowRank(left * sigma * sign, right * sign[:, None], sigma**2)


def svd(tasks: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """LAPACK's divide and conquer does not converge for some matrices of low rank, but does for their transposes."""
    try:
        return np.linalg.svd(tasks, full_matrices=False)
    except np.linalg.LinAlgError:
        right, sigma, left = np.linalg.svd(tasks.T, full_matrices=False)
        return left.T, sigma, right.T


def signs(directions: Matrix) -> Matrix:
    """Of a direction's two signs, the one that makes its (first) largest entry positive: ±1 per row.

    >>> signs(np.array([[0.6, -0.8], [-0.5, 0.5]])).tolist()
    [-1.0, -1.0]
    """
    magnitudes = np.abs(directions)
    largest = np.argmax(magnitudes > 0.999 * magnitudes.max(axis=1, keepdims=True), axis=1)  # the first of ties
    sign: Matrix = np.sign(directions[np.arange(len(directions)), largest])
    return sign


def adaptive_rank(energies: Matrix, threshold: float) -> int:
    """Smallest r ≥ 1 whose recovery error ‖T − T_r‖² / ‖T‖² is below the threshold; 0 only for T = 0.

    The recovery error never exceeds 1, so with the paper's threshold ε·D a group with ε·D > 1 gets rank 1.

    >>> adaptive_rank(np.array([8.0, 1.0, 1.0]), 0.15)
    2
    """
    if not energies.size:
        return 0
    # tail[r - 1] is the energy left out at rank r; summed from the smallest so that it is exact where it is small
    tail = np.append(np.cumsum(energies[::-1])[::-1][1:], 0.0)
    below = np.flatnonzero(tail / energies.sum() < threshold)
    return int(below[0]) + 1 if below.size else len(energies)
