"""Classes that come in runs: what the images before say of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, Status, Wrapper
from mergetta.arrays import Array, beside, to_numpy
from mergetta.losses.probabilities import softmax
from mergetta.streams.runs import RunFilter, RunSettings


class Filtered(Wrapper):
    """Predictions of any method, filtered over time where classes come in runs (`streams/runs.py`).

    A camera shows one thing for a while. Where the stream proves that, an image that could be either is of the class of
    those before it; where classes are mixed, predictions stay what they are. It costs no forward pass.

    It asks that images come in their order in time, also within a batch. A class that shows in a single image amid a
    run of another is believed only if the model is very sure of it.
    """

    def __init__(self, adapter: Adapter, settings: RunSettings | None = None) -> None:
        super().__init__(adapter)
        self.filter = RunFilter(adapter.runtime.classes, settings)

    def clear(self) -> None:
        self.filter.clear()

    def predict(self, images: Array) -> Array:
        """Logarithms of probabilities."""
        logits = self._predict(images)
        believed = self.filter(softmax(to_numpy(logits)))
        return beside(np.log(np.maximum(believed, 1e-12)), logits)

    def status(self) -> Status:
        return replace(self.adapter.status(), runs=self.filter.runs)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.filter.state("runs.")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = self.filter.restored(state, "runs.")
        super().load_state_dict(state)
        self.filter = found
