"""Particle swarm optimisation (Kennedy & Eberhart 1995) with the constriction of Clerc & Kennedy (2002)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.zeroth_order.optimisers import Optimiser

INERTIA, PULL = 0.7298, 1.49618


class ParticleSwarm(Optimiser):
    """Each particle is drawn to the best place it has seen and to the best that any has seen, which is `point`."""

    kept: ClassVar[tuple[str, ...]] = ("point", "positions", "velocities", "best", "lowest")

    def __init__(self, point: Vector, seed: int = 0, particles: int = 20, sigma: float = 1.0) -> None:
        """The first particle starts at the point, the others in a Gaussian cloud around it."""
        super().__init__(point, seed)
        if not sigma > 0 or particles < 2:
            raise MergettaError(f"sigma must be positive and particles at least 2, not {sigma} and {particles}.")
        cloud = self.random("swarm").standard_normal((particles, self.point.size))
        cloud[0] = 0
        self.positions = self.point + sigma * cloud
        self.velocities = np.zeros_like(self.positions)
        self.best = self.positions.copy()
        self.lowest = np.full(particles, np.inf)

    def _ask(self) -> np.ndarray:
        return self.positions

    def _tell(self, asked: np.ndarray, losses: Vector) -> None:
        better = losses < self.lowest
        self.best = np.where(better[:, None], asked, self.best)
        self.lowest = np.where(better, losses, self.lowest)
        self.point = self.best[np.argmin(self.lowest)].copy()
        own, common = self.random("pulls").random((2, *asked.shape))
        pull = own * (self.best - asked) + common * (self.point - asked)
        self.velocities = INERTIA * self.velocities + PULL * pull
        self.positions = asked + self.velocities
