"""CoLA's forward-only agent (Chen et al. 2025): mix the experts by how similar their domain's features look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, check_family, entry
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import Vector, check_groups
from mergetta.runtimes.base import Runtime


class CoLA(Adapter):
    """Give the source model as one of the experts (`mergetta.adapters.forward_only.cola.source_expert`).

    One forward pass per batch; a second one only for the first batch and after a domain shift, when the mixture
    changes at once.
    """

    def __init__(
        self,
        runtime: Runtime,
        experts: Sequence[Expert],
        temperature: float = 5.0,
        momentum: float = 0.8,
        shift_threshold: float | None = None,
    ) -> None:
        super().__init__(runtime)
        if not experts:
            raise MergettaError("CoLA needs at least one expert.")
        for expert in experts:
            check_family(runtime, expert.family, f"The expert {expert.domain!r}")
            check_groups(expert.groups, runtime.groups, f"The expert {expert.domain!r}")
            if expert.statistics is None:
                raise MergettaError(f"The expert {expert.domain!r} has no feature statistics, which CoLA needs.")
            if experts[0].statistics is not None and expert.statistics.shape != experts[0].statistics.shape:
                raise MergettaError(f"The expert {expert.domain!r} has feature statistics of another size.")
        self.statistics = np.stack([expert.statistics for expert in experts if expert.statistics is not None])
        self.groups = {
            name: np.stack([expert.groups[name] for expert in experts]) for name in runtime.groups
        }  # (M, D) each
        self.temperature = temperature
        self.momentum = momentum
        batch_norm = any(group.kind == "batch" for group in runtime.structure)
        self.shift_threshold = (0.2 if batch_norm else 0.1) if shift_threshold is None else shift_threshold
        self.reset()

    def reset(self) -> None:
        self.running: np.ndarray | None = None
        self.weights = np.full(len(self.statistics), 1 / len(self.statistics))

    def predict(self, images: Array) -> Array:
        self.runtime.load(self.mixed())
        output = self.runtime(images)
        now = to_numpy(output.statistics)
        if now.shape != self.statistics.shape[1:]:
            raise MergettaError("The experts' feature statistics are not of this model.")
        shifted = True
        if self.running is not None and distance(self.running, now) <= self.shift_threshold:
            shifted = False
            now = self.momentum * self.running + (1 - self.momentum) * now
        self.running = now
        self.weights = by_similarity(self.statistics, self.running, self.temperature)
        if shifted:
            self.runtime.load(self.mixed())
            output = self.runtime(images)
        return output.logits

    def mixed(self) -> dict[str, Vector]:
        weights = self.weights.astype(np.float32)
        return {name: weights @ stacked for name, stacked in self.groups.items()}

    def state_dict(self) -> dict[str, Any]:
        running = {} if self.running is None else {"running": self.running.copy()}
        return {"weights": self.weights.copy(), **running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        weights, running = np.array(entry(state, "weights")), state.get("running")
        if weights.shape != self.weights.shape:
            raise MergettaError(f"This CoLA state is for {weights.size} experts, not {self.weights.size}.")
        if running is not None and np.shape(running) != self.statistics.shape[1:]:
            raise MergettaError("This CoLA state has feature statistics of another size.")
        self.weights = weights
        self.running = None if running is None else np.array(running)


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Symmetric KL divergence between Gaussians (mean, variance), averaged over channels; (…, 2, C) → (…)."""
    (m1, v1), (m2, v2) = np.moveaxis(a, -2, 0), np.moveaxis(b, -2, 0)
    v1, v2 = np.maximum(v1, 1e-12), np.maximum(v2, 1e-12)
    square = (m1 - m2) ** 2
    return np.asarray(np.mean((v1 + square) / (2 * v2) + (v2 + square) / (2 * v1) - 1, axis=-1))


def by_similarity(experts: np.ndarray, stream: np.ndarray, temperature: float = 5.0) -> Vector:
    """Weights of experts, (M, 2, C), by how near their statistics are to the stream's; 0 for one without statistics."""
    closeness = np.nan_to_num(1 / (distance(experts, stream) + 1e-4) / temperature, nan=-np.inf)
    weights = np.exp(closeness - closeness.max())
    return np.asarray(weights / weights.sum())


def source_expert(runtime: Runtime) -> Expert:
    """The source model as a member of the pool."""
    return Expert(runtime.groups, runtime.family, "source", runtime.statistics)
