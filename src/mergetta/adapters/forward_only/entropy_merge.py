"""Experts merged anew for every batch, weighted by how certain each of them is of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergetta.adapters.base import Adapter, check_pool
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import Vector, learnable
from mergetta.losses.probabilities import entropy, softmax
from mergetta.runtimes.base import Runtime


class EntropyMerge(Adapter):
    """w = softmax(−H / temperature) over the experts, where H is the mean entropy of an expert's predictions.

    Every expert predicts the batch, their scales and shifts are merged by w, and the merged model predicts it: one pass
    per expert and one more. Nothing is remembered. BatchNorm has the batch's own statistics; `given` is the share of
    the stored ones.

    The idea is that of "The Mean is the Mirage: Entropy-Adaptive Model Merging under Heterogeneous Domain Shifts in
    Medical Imaging" (Ambekar et al. 2026, arXiv 2602.21372): a merged model for each batch, by forward passes alone.
    Only its abstract could be read, so this is not that method. The softmax, its temperature and the statistics are
    ours; its coefficients of their own for the classifier have no counterpart, because experts share norm layers only.
    The temperature, in nats, was chosen among seven at severity 3 of `fashion-bn`.
    """

    def __init__(
        self, runtime: Runtime, experts: Sequence[Expert], temperature: float = 0.003, given: float = 0.0
    ) -> None:
        super().__init__(runtime)
        check_pool(runtime, experts, "entropy-merge")
        if not temperature > 0 or not 0 <= given <= 1:
            raise MergettaError(f"temperature must be positive and given lie in [0, 1], not {temperature} and {given}.")
        names = learnable(runtime.groups)
        self.experts = [{name: expert.groups[name] for name in names} for expert in experts]
        self.temperature, self.given = temperature, given

    def predict(self, images: Array) -> Array:
        return self._run(images, self.merged(self.weights(images)))

    def weights(self, images: Array) -> Vector:
        """Of each expert in the batch's merge."""
        certain = [float(entropy(to_numpy(self._run(images, groups))).mean()) for groups in self.experts]
        return np.asarray(softmax(-np.array(certain) / self.temperature))

    def merged(self, weights: Vector) -> dict[str, Vector]:
        names = self.experts[0]
        return {
            name: np.tensordot(weights, [groups[name] for groups in self.experts], axes=1).astype(np.float32)
            for name in names
        }

    def _run(self, images: Array, groups: dict[str, Vector]) -> Array:
        return self.runtime(images, {**self.runtime.groups, **groups}, self.given).logits
