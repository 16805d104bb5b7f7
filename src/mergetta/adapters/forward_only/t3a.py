"""T3A (Iwasawa & Matsuo 2021): the classifier becomes class prototypes made of the stream's confident features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, entry
from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import entropy
from mergetta.runtimes.base import Runtime


class T3A(Adapter):
    """`keep` supports per class with the lowest entropy (the authors' filter_K); −1 keeps all. Source statistics."""

    def __init__(self, runtime: Runtime, keep: int = 100) -> None:
        super().__init__(runtime)
        if keep == 0 or keep < -1:
            raise MergettaError(f"keep must be a positive number, or -1 to keep all supports, not {keep}.")
        self.keep = keep
        self.reset()

    def reset(self) -> None:
        weight, bias = self.runtime.classifier
        self.supports = np.array(weight)
        logits = weight @ weight.T + bias
        self.labels = np.argmax(logits, axis=1)
        self.entropies = entropy(logits)

    def predict(self, images: Array) -> Array:
        output = self.runtime(images, given=1.0)
        features, logits = to_numpy(output.features), to_numpy(output.logits)
        self.supports = np.concatenate([self.supports, features])
        self.labels = np.concatenate([self.labels, np.argmax(logits, axis=1)])
        self.entropies = np.concatenate([self.entropies, entropy(logits)])
        self._filter()
        return beside(features @ self.prototypes(logits.shape[1]).T, output.logits)

    def _filter(self) -> None:
        """Keep the lowest entropies of each class, in their order of arrival."""
        if self.keep == -1:
            return
        order = np.lexsort((self.entropies, self.labels))
        _, first, counts = np.unique(self.labels[order], return_index=True, return_counts=True)
        rank = np.arange(len(order)) - np.repeat(first, counts)
        chosen = np.sort(order[rank < self.keep])
        self.supports, self.labels, self.entropies = (
            values[chosen] for values in (self.supports, self.labels, self.entropies)
        )

    def prototypes(self, classes: int) -> np.ndarray:
        """Normalised means of the normalised supports, (K, F); zero for a class without supports."""
        members = (self.labels[:, None] == np.arange(classes)).astype(self.supports.dtype)
        return normalised(members.T @ normalised(self.supports))

    def state_dict(self) -> dict[str, Any]:
        return {
            "supports": self.supports.copy(),
            "labels": self.labels.copy(),
            "entropies": self.entropies.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        supports, labels, entropies = (np.array(entry(state, name)) for name in ("supports", "labels", "entropies"))
        lengths = {len(supports), len(labels), len(entropies)}
        if supports.ndim != 2 or supports.shape[1] != self.supports.shape[1] or len(lengths) > 1:
            raise MergettaError("This T3A state does not fit the model.")
        self.supports, self.labels, self.entropies = supports, labels, entropies


def normalised(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
