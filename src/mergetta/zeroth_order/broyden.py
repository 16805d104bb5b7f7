"""How logits respond to coordinates, learnt from forward passes: Broyden's update of a Jacobian."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.groups import Vector
from mergetta.streams.state import Field, checked


class Jacobian:
    """A Jacobian of the logits for every predicted class, (K, K, d), from what single perturbations change.

    A zeroth-order gradient asks each perturbation for one number, the change of the loss, and forgets it after a step.
    A perturbed pass tells K numbers per image, and what they say holds as long as the network hardly changes. So they
    are kept: J ← J + (Δ − J z) zᵀ / (d + n), Broyden's update, which is least squares for directions z ~ N(0, I), with
    n the images of the class so far, at most `memory`. The gradient of *any* loss is then Jᵀ ∂loss/∂logits, whose
    second factor is exact and takes no pass, also for images that nobody perturbed.

    References
    ----------
    Broyden 1965, A class of methods for solving nonlinear simultaneous equations.

    >>> rng, true, known = np.random.default_rng(0), np.array([[1.0, -2.0, 0.0], [0.0, 1.0, 3.0]]), Jacobian(2, 2, 3)
    >>> for z in rng.normal(size=(200, 3)):
    ...     known.learn(np.array([1]), (true @ z)[None], z)
    >>> bool(np.abs(known.values[1] - true).max() < 0.2)
    True
    """

    def __init__(self, cells: int, classes: int, size: int, memory: float = 2000.0) -> None:
        self.values = np.zeros((cells, classes, size), np.float32)
        self.counts = np.zeros(cells)
        self.memory = memory

    def learn(self, labels: NDArray[np.int64], change: NDArray[Any], direction: Vector) -> None:
        """Take in what one direction changes in the logits of some images, (B, K), by the unit, and their classes."""
        residual = np.zeros(self.values.shape[:2])
        np.add.at(residual, labels, change - self.values[labels] @ direction)
        self.counts = np.minimum(self.counts + np.bincount(labels, minlength=len(self.counts)), self.memory)
        weight = 1 / (len(direction) + self.counts)
        self.values += ((weight[:, None] * residual)[:, :, None] * direction).astype(np.float32)

    def gradient(self, labels: NDArray[np.int64], slopes: NDArray[Any]) -> Vector:
        """Of a loss whose gradients in the logits of some images, (B, K), are these."""
        total = np.zeros(self.values.shape[:2])
        np.add.at(total, labels, slopes)
        return np.asarray(np.tensordot(total, self.values, axes=2))

    def state(self, prefix: str) -> dict[str, Any]:
        return {f"{prefix}values": self.values.copy(), f"{prefix}counts": self.counts.copy()}

    def restored(self, state: Mapping[str, Any], prefix: str) -> Jacobian:
        """One that goes on from a state, or one sentence."""
        values = Field(self.values.shape, low=-1e30, high=1e30)  # as large as float32 can go on with
        found = checked(state, {"values": values, "counts": Field(self.counts.shape, low=0)}, prefix)
        new = Jacobian(*self.values.shape, self.memory)
        new.values, new.counts = found["values"].astype(np.float32), found["counts"]
        return new
