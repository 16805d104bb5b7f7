"""Random search around the point: go to the best of a few Gaussian neighbours if it is better."""

from __future__ import annotations

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.zeroth_order.optimisers import Optimiser


class RandomSearch(Optimiser):
    """The point itself is evaluated again in every step, so a loss that changes from batch to batch is fair to it."""

    def __init__(self, point: Vector, seed: int = 0, sigma: float = 0.1, candidates: int = 1) -> None:
        super().__init__(point, seed)
        if not sigma > 0 or candidates < 1:
            raise MergettaError(f"sigma must be positive and candidates at least 1, not {sigma} and {candidates}.")
        self.sigma, self.candidates = sigma, candidates

    def _ask(self) -> np.ndarray:
        z = self.random("random search").standard_normal((self.candidates, self.point.size))
        return np.concatenate([self.point[None], self.point + self.sigma * z])

    def _tell(self, asked: np.ndarray, losses: Vector) -> None:
        self.point = asked[np.argmin(losses)].copy()  # the first of equals: the point stays
