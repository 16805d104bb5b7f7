"""The simplex method of Nelder & Mead (1965), with coefficients that suit the dimension (Gao & Han 2012)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.zeroth_order.optimisers import Optimiser

START, REFLECT, EXPAND, OUTSIDE, INSIDE, SHRINK = range(6)


class NelderMead(Optimiser):
    """d + 1 vertices; a step asks for one point, but for all vertices at the start and all but the best to shrink."""

    kept: ClassVar[tuple[str, ...]] = ("point", "simplex", "losses", "stage", "reflected", "reflected_loss")

    def __init__(self, point: Vector, seed: int = 0, sigma: float = 1.0) -> None:
        """The simplex has the point and, along each axis, another one at the distance `sigma`."""
        super().__init__(point, seed)
        if not sigma > 0:
            raise MergettaError(f"sigma must be positive, not {sigma}.")
        d = self.point.size
        self.simplex = np.concatenate([self.point[None], self.point + sigma * np.eye(d)])
        self.losses = np.full(d + 1, np.inf)
        self.stage = np.array(START)
        self.reflected, self.reflected_loss = self.point.copy(), np.array(np.inf)
        d = max(2, d)
        self._along = {REFLECT: 1.0, EXPAND: 1 + 2 / d, OUTSIDE: 0.75 - 0.5 / d, INSIDE: 0.5 / d - 0.75}
        self._shrinkage = 1 - 1 / d

    def _ask(self) -> np.ndarray:
        if self.stage == START:
            return np.array(self.simplex)
        if self.stage == SHRINK:
            return np.array(self.simplex[0] + self._shrinkage * (self.simplex[1:] - self.simplex[0]))
        centre = self.simplex[:-1].mean(axis=0)
        return np.array([centre + self._along[int(self.stage)] * (centre - self.simplex[-1])])

    def _tell(self, asked: np.ndarray, losses: Vector) -> None:
        if self.stage == START:
            self._sort(asked, losses)
        elif self.stage == SHRINK:
            self._sort(np.concatenate([self.simplex[:1], asked]), np.append(self.losses[:1], losses))
        elif self.stage == REFLECT:
            self._judge(asked[0], losses[0])
        elif self.stage == EXPAND:
            better = losses[0] < self.reflected_loss
            self._replace(*((asked[0], losses[0]) if better else (self.reflected, self.reflected_loss)))
        elif losses[0] < (self.reflected_loss if self.stage == OUTSIDE else self.losses[-1]):
            self._replace(asked[0], losses[0])
        else:
            self.stage = np.array(SHRINK)

    def _judge(self, point: Vector, loss: float) -> None:
        """What the reflected point calls for."""
        self.reflected, self.reflected_loss = point, np.array(loss)
        if loss < self.losses[0]:
            self.stage = np.array(EXPAND)
        elif loss < self.losses[-2]:
            self._replace(point, loss)
        else:
            self.stage = np.array(OUTSIDE if loss < self.losses[-1] else INSIDE)

    def _replace(self, point: Vector, loss: float | Vector) -> None:
        """The worst vertex by a better one."""
        self._sort(np.concatenate([self.simplex[:-1], point[None]]), np.append(self.losses[:-1], loss))

    def _sort(self, simplex: np.ndarray, losses: Vector) -> None:
        order = np.argsort(losses, kind="stable")
        self.simplex, self.losses, self.stage = simplex[order], losses[order], np.array(REFLECT)
        self.point = self.simplex[0].copy()
