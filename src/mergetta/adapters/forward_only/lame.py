"""LAME (Boudiaf et al. 2022): neighbours in a batch should have similar predictions. Corrects outputs, not weights."""

from __future__ import annotations

import numpy as np

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import log_softmax
from mergetta.runtimes.base import Runtime


class LAME(Adapter):
    """Each image is tied to its `neighbours` nearest ones by the direction of their features.

    Minimises Σ_i KL(y_i ‖ p_i) − Σ_ij w_ij y_iᵀy_j over the batch's assignments y, by the published bound: y_i becomes
    softmax(log p_i + Σ_j w_ij y_j) until the energy settles. Returns log y. Stored BatchNorm statistics, as published;
    `given` is their share.
    """

    def __init__(
        self,
        runtime: Runtime,
        neighbours: int = 5,
        given: float = 1.0,
        iterations: int = 100,
        tolerance: float = 1e-8,
    ) -> None:
        super().__init__(runtime)
        if neighbours < 1 or iterations < 1:
            raise MergettaError(f"neighbours and iterations must be at least 1, not {neighbours} and {iterations}.")
        self.neighbours, self.given = neighbours, given
        self.iterations, self.tolerance = iterations, tolerance

    def predict(self, images: Array) -> Array:
        output = self.runtime(images, given=self.given)
        affinity = nearest(to_numpy(output.features), self.neighbours)
        log_p = log_softmax(to_numpy(output.logits).astype(np.float64))
        return beside(assign(log_p, affinity, self.iterations, self.tolerance), output.logits)


def nearest(features: np.ndarray, neighbours: int) -> np.ndarray:
    """(B, B): 1 where column j is one of row i's nearest, itself aside."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    directions = features / np.maximum(norms, 1e-12)
    similarity = directions @ directions.T
    np.fill_diagonal(similarity, -np.inf)
    count = min(neighbours, len(features) - 1)
    chosen = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    affinity = np.zeros(similarity.shape)
    np.put_along_axis(affinity, chosen, 1.0, axis=1)
    return affinity


def assign(log_p: np.ndarray, affinity: np.ndarray, iterations: int, tolerance: float) -> np.ndarray:
    """log y, (B, K)."""
    log_p = np.log(np.exp(log_p) + 1e-10)  # as published: no class is impossible
    log_y = log_softmax(log_p)
    energy = np.inf
    for number in range(iterations):
        pull = affinity @ np.exp(log_y)
        log_y = log_softmax(log_p + pull)
        before, energy = energy, float((np.exp(log_y) * (log_y - log_p - pull)).sum())
        if number > 1 and abs(energy - before) <= tolerance * abs(before):
            break
    return np.asarray(log_y)
