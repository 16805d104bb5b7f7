"""CoLA's forward-only agent (Chen et al. 2025): mix the experts by how similar their domain's features look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, check_pool, entry
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import Vector, has_batch_norm, learnable
from mergetta.runtimes.base import Runtime
from mergetta.streams.shift import distance


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
        check_pool(runtime, experts, "CoLA")
        for expert in experts:
            if expert.signature is None:
                raise MergettaError(f"The expert {expert.domain!r} has no signature, which CoLA needs.")
            if experts[0].signature is not None and expert.signature.shape != experts[0].signature.shape:
                raise MergettaError(f"The expert {expert.domain!r} has a signature of another size.")
        self.signatures = np.stack([expert.signature for expert in experts if expert.signature is not None])
        self.groups = {
            name: np.stack([expert.groups[name] for expert in experts]) for name in learnable(runtime.groups)
        }  # (M, D) each
        self.temperature = temperature
        self.momentum = momentum
        default = 0.2 if has_batch_norm(runtime.structure) else 0.1
        self.shift_threshold = default if shift_threshold is None else shift_threshold
        self.reset()

    def reset(self) -> None:
        self.running: np.ndarray | None = None
        self.weights = np.full(len(self.signatures), 1 / len(self.signatures))

    def predict(self, images: Array) -> Array:
        output = self.runtime(images, self.mixed())
        now = to_numpy(output.signature)
        if now.shape != self.signatures.shape[1:]:
            raise MergettaError("The experts' signatures are not of this model.")
        shifted = True
        if self.running is not None and distance(self.running, now) <= self.shift_threshold:
            shifted = False
            now = self.momentum * self.running + (1 - self.momentum) * now
        self.running = now
        self.weights = by_similarity(self.signatures, self.running, self.temperature)
        if shifted:
            output = self.runtime(images, self.mixed())
        return self._shown(output)

    def look(self, images: Array) -> Array:
        return self._shown(self.runtime(images, self.mixed()))

    def mixed(self) -> dict[str, Vector]:
        weights = self.weights.astype(np.float32)
        mixed = {name: weights @ stacked for name, stacked in self.groups.items()}
        return {**self.runtime.groups, **mixed}

    def state_dict(self) -> dict[str, Any]:
        running = {} if self.running is None else {"running": self.running.copy()}
        return {"weights": self.weights.copy(), **running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        weights, running = np.array(entry(state, "weights")), state.get("running")
        if weights.shape != self.weights.shape:
            raise MergettaError(f"This CoLA state is for {weights.size} experts, not {self.weights.size}.")
        if running is not None and np.shape(running) != self.signatures.shape[1:]:
            raise MergettaError("This CoLA state has a signature of another size.")
        self.weights = weights
        self.running = None if running is None else np.array(running)


def by_similarity(
    experts: np.ndarray, stream: np.ndarray, temperature: float = 5.0, prior: float | Vector = 1.0
) -> Vector:
    """Weights of experts, (M, 2, C), by how near their signatures are to the stream's, times those they had before; 0
    for one without a signature.
    """
    closeness = np.nan_to_num(1 / (distance(experts, stream) + 1e-4) / temperature, nan=-np.inf)
    weights = prior * np.exp(closeness - closeness.max())
    return np.asarray(weights / weights.sum())


def source_expert(runtime: Runtime) -> Expert:
    """The source model as a member of the pool."""
    return Expert(runtime.groups, runtime.family, "source", runtime.signature)
