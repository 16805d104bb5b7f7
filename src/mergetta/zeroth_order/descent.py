"""Descent along estimated gradients: SPSA with one or two sides and q queries; ZO-SGD, ZO-Adam, ZO-sign."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.zeroth_order.optimisers import Optimiser
from mergetta.zeroth_order.perturbation import draw

RULES = ("sgd", "adam", "sign")


class Descent(Optimiser):
    """g = mean over the queries of S z, with S = (L(w + δz) − L(w − δz)) / 2δ, or (L(w + δz) − L(w)) / δ one-sided.

    A step costs 2q evaluations, one-sided q + 1. A query whose losses are not finite is left out.
    """

    kept: ClassVar[tuple[str, ...]] = ("point", "first", "second", "moves")

    def __init__(
        self,
        point: Vector,
        seed: int = 0,
        lr: float = 1e-2,
        delta: float = 1e-2,
        queries: int = 1,
        sides: int = 2,
        rule: str = "sgd",
        clamp: float = math.inf,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        super().__init__(point, seed)
        if rule not in RULES:
            raise MergettaError(f"rule must be one of {', '.join(RULES)}, not {rule!r}.")
        if sides not in (1, 2) or queries < 1:
            raise MergettaError(f"sides must be 1 or 2 and queries at least 1, not {sides} and {queries}.")
        if not (lr >= 0 and delta > 0 and clamp > 0):
            raise MergettaError(f"lr must not be negative, delta and clamp be positive, not {lr}, {delta}, {clamp}.")
        self.lr, self.delta, self.queries, self.sides = lr, delta, queries, sides
        self.rule, self.clamp, self.betas = rule, clamp, betas
        self.first, self.second = np.zeros_like(self.point), np.zeros_like(self.point)
        self.moves = np.array(0)

    def directions(self) -> np.ndarray:
        """(q, d), drawn again whenever needed."""
        sizes = (("", self.point.size),)
        return np.stack([draw(self.seed, self.steps * self.queries + q, sizes) for q in range(self.queries)])

    def _ask(self) -> np.ndarray:
        away = self.delta * self.directions()
        other = self.point - away if self.sides == 2 else self.point[None]
        return np.concatenate([self.point + away, other])

    def _tell(self, asked: np.ndarray, losses: Vector) -> None:
        plus, minus = losses[: self.queries], losses[self.queries :]
        usable = np.isfinite(plus) & np.isfinite(minus)
        if not usable.any():
            return
        difference = np.subtract(plus, minus, where=usable, out=np.zeros(self.queries))
        slopes = np.clip(difference / (self.sides * self.delta), -self.clamp, self.clamp)
        self._move(slopes @ self.directions() / np.count_nonzero(usable))

    def _move(self, gradient: Vector) -> None:
        self.moves = self.moves + 1
        if self.rule == "sign":
            gradient = np.sign(gradient)
        elif self.rule == "adam":
            b1, b2 = self.betas
            self.first = b1 * self.first + (1 - b1) * gradient
            self.second = b2 * self.second + (1 - b2) * gradient**2
            mean, square = self.first / (1 - b1**self.moves), self.second / (1 - b2**self.moves)
            gradient = mean / (np.sqrt(square) + 1e-8)
        self.point = self.point - self.lr * gradient
