"""The leading eigenvectors of a scatter matrix: the directions that RR and ARS keep, without the experts at hand."""

from __future__ import annotations

import numpy as np

from mergetta.merging.low_rank import Matrix, adaptive_rank, signs

EPSILON = float(np.finfo(np.float64).eps)


def leading_directions(
    matrix: Matrix, rounding: float, max_rank: int | None, threshold: float | None, start: Matrix, angle: float
) -> Matrix:
    """(r, D): eigenvectors of G for its largest eigenvalues, as many as RR and ARS keep."""
    size = len(matrix)
    trace = float(matrix.trace())
    if trace <= rounding:
        return np.empty((0, size))
    wanted = 1 if threshold is not None and threshold >= 1 else max_rank  # the recovery error is always below 1
    pairs = None
    if wanted is not None and size > 128 and wanted <= size // 16:
        pairs = lanczos(matrix, wanted, start, angle)
    if pairs is None:
        values, vectors = np.linalg.eigh(matrix)
        pairs = values[::-1], vectors.T[::-1]
    energies, directions = pairs
    energies = energies[energies > max(rounding, size * EPSILON * energies[0])]  # the rest is rounding
    rank = len(energies)
    if threshold is not None:
        others = max(trace - float(energies.sum()), 0.0)  # ARS asks only how much is left out
        rank = min(rank, adaptive_rank(np.append(energies, others), threshold))
    directions = directions[: rank if max_rank is None else min(rank, max_rank)]
    return directions * signs(directions)[:, None] if len(directions) else directions


def lanczos(matrix: Matrix, wanted: int, start: Matrix, angle: float) -> tuple[Matrix, Matrix] | None:
    """The `wanted` largest eigenvalues of a symmetric matrix ≥ 0 and their eigenvectors (rows), or None if too slow.

    Lanczos with full reorthogonalisation and Rayleigh–Ritz; one vector at a time, since larger blocks needed more time
    on every spectrum tried. Converged means: each vector within `angle` (residual / gap to the next eigenvalue), or its
    residual at the level of rounding where a gap is (nearly) closed. A Krylov space holds one vector of a multiple
    eigenvalue and none of a direction that `start` happens to be orthogonal to, so the search goes on from a random
    vector once it has converged or has exhausted its space, and must converge again.
    """
    size = len(matrix)
    rng = np.random.default_rng(0)
    trace = float(matrix.trace())
    noise = size * EPSILON
    space, projected = np.empty((size // 2, size)), np.zeros((size // 2, size // 2))
    vector = unit(start.sum(axis=0)) + 0.1 * unit(rng.normal(size=size))
    converged, check = False, 12
    for n in range(1, len(space) + 1):
        known = space[:n]
        known[-1] = unit(vector)
        vector = known[-1] @ matrix
        projected[n - 1, :n] = projected[:n, n - 1] = overlap = known @ vector
        vector = outside(vector - overlap @ known, known)
        restart = bool(np.linalg.norm(vector) <= noise * projected.diagonal().max())
        if n >= check:
            energies, mixing = np.linalg.eigh(projected[:n, :n])
            energies, directions = energies[: -wanted - 2 : -1], mixing[:, : -wanted - 2 : -1].T @ known
            residuals = np.linalg.norm(directions @ matrix - energies[:, None] * directions, axis=1)
            gaps = energies[:-1] - energies[1:] - residuals[1:]
            close = residuals[:-1] <= np.maximum(angle * gaps, noise * energies[0])
            again, converged = converged, len(close) == wanted and bool(close.all())
            everything = trace - float(projected.diagonal().sum()) <= noise * trace
            if converged and (again or everything):
                return energies[:-1], directions[:-1]
            restart |= converged
            check = n + (8 if converged else max(8, n // 5))
        if restart:
            vector = outside(outside(rng.normal(size=size), known), known)
    return None


def outside(vector: Matrix, known: Matrix) -> Matrix:
    """The part of a vector that is orthogonal to the known ones; done twice, it is so to the last digit."""
    rest: Matrix = vector - (known @ vector) @ known
    return rest


def unit(vector: Matrix) -> Matrix:
    norm = np.linalg.norm(vector)
    return vector / norm if norm else vector
