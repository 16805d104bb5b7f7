"""ZOA's bank of what past domains taught: vectors Δᵢ = θ − θ₀, mixed by softmax(10 a)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import entry
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.losses.probabilities import softmax
from mergetta.zeroth_order.perturbation import Sizes

SCALE = 10.0
MARGIN = 0.01
"""A current domain whose ε is larger than this leaves what exceeds it to the bank."""


class KnowledgeBank:
    """Δ₀ = 0 is the source model; at most `limit` vectors beside it."""

    def __init__(self, sizes: Sizes, limit: int) -> None:
        self.limit = limit
        self._ends = np.cumsum([size for _, size in sizes])
        self.reset()

    def reset(self) -> None:
        self.mixing = np.zeros(1)
        self.vectors = np.zeros((1, self._ends[-1]))

    def split(self, vector: np.ndarray) -> list[np.ndarray]:
        """By group, along the last axis."""
        return np.split(vector, self._ends[:-1], axis=-1)

    def mixed(self, mixing: Vector) -> Vector:
        return np.asarray(softmax(SCALE * mixing) @ self.vectors)

    def remember(self, epsilon: Vector) -> Vector:
        """Put mixed + ε into the bank; the new ε, with which that sum stays as it is."""
        moved = self.mixed(self.mixing) + epsilon
        if len(self.vectors) > self.limit:
            kept = np.arange(len(self.vectors)) != 1 + self._redundant()
            self.vectors, self.mixing = self.vectors[kept], self.mixing[kept]
        scaled = SCALE * self.mixing
        new = scaled.max()
        size = max(np.abs(part).mean() for part in self.split(epsilon)) / MARGIN
        if size > 1:  # a softmax share of (size − 1) / size, or more
            new = max(new, np.log(np.exp(scaled).sum() * (size - 1)))
        self.vectors = np.vstack([self.vectors, moved])
        self.mixing = np.append(self.mixing, np.clip(new / SCALE, -10, 10))
        return moved - self.mixed(self.mixing)

    def _redundant(self) -> int:
        """The older of the two most similar vectors, by their cosine averaged over groups."""
        similar = np.zeros((len(self.vectors) - 1,) * 2)
        for part in self.split(self.vectors[1:]):
            directions = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-12)
            similar += directions @ directions.T
        np.fill_diagonal(similar, -np.inf)
        return int(min(np.unravel_index(np.argmax(similar), similar.shape)))

    def state(self) -> dict[str, Any]:
        return {"mixing": self.mixing.copy(), "bank": self.vectors.copy()}

    def check(self, state: Mapping[str, Any]) -> tuple[Vector, np.ndarray]:
        mixing, vectors = np.array(entry(state, "mixing")), np.array(entry(state, "bank"))
        if mixing.ndim != 1 or not mixing.size or vectors.shape != (mixing.size, self._ends[-1]):
            raise MergettaError("This state does not fit the adapter: its bank of past domains.")
        return mixing, vectors
