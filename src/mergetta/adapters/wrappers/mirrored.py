"""Flip averaging: predictions of an image and of its mirror image, averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mergetta.adapters.base import ADAPTING, SETTLED, Adapter, Status, part
from mergetta.arrays import Array, beside, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import softmax
from mergetta.streams.state import Field, checked

COMPARED = 256
"""Images on which the mirrored view is judged, at least."""
WORTH = 0.04
"""Share of the predictions that it has to change to be worth a forward pass."""
COUNTS = ("compared", "changed")


class Mirrored(Adapter):
    """Predict both views of an image, until that surely (by two standard errors) changes fewer than 4 in 100.

    It helps any method, and costs a forward pass. Only for images that mean the same when mirrored: not for text,
    digits, left and right.

    The adapter learns from the images as they come, and not from their mirror images.

    References
    ----------
    Krizhevsky et al. 2012, ImageNet classification with deep convolutional neural networks: averaging over flips.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.runtime)
        self.adapter = adapter
        self._begin()

    def _begin(self) -> None:
        self.compared = self.changed = 0
        """Images seen in both views since the adapter has settled; predictions that the second view changed."""

    def reset(self) -> None:
        self.adapter.reset()
        self._begin()

    @property
    def agreed(self) -> bool:
        """Whether the mirrored view surely changes too little."""
        return self.compared >= COMPARED and self.changed + 2 * np.sqrt(self.changed) < WORTH * self.compared

    def predict(self, images: Array) -> Array:
        """Logarithms of mean probabilities."""
        shifts = self.adapter.status().shifts
        logits = self.adapter.predict(images)
        status = self.adapter.status()
        if status.shifts != shifts:
            self._begin()
        if self.agreed:
            return logits
        flipped = array_namespace(images).flip(images, axis=3)
        one, other = (softmax(to_numpy(each)) for each in (logits, self.adapter.look(flipped)))
        both = (one + other) / 2
        if status.phase == SETTLED and np.isfinite(both).all():
            self.compared += len(both)
            self.changed += int(np.count_nonzero(one.argmax(axis=1) != both.argmax(axis=1)))
        return beside(np.log(np.maximum(both, 1e-12)), logits)

    def look(self, images: Array) -> Array:
        return self.adapter.look(images)

    def status(self) -> Status:
        inner = self.adapter.status()
        return inner if self.agreed else replace(inner, phase=ADAPTING)

    def swap(self, bundle: Bundle) -> bool:
        swapped = self.adapter.swap(bundle)
        if swapped:
            self._begin()
        return swapped

    def state_dict(self) -> dict[str, Any]:
        inner = {f"adapter/{name}": value for name, value in self.adapter.state_dict().items()}
        return {**inner, "compared": self.compared, "changed": self.changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = checked(state, {name: Field(low=0, whole=True) for name in COUNTS})
        if found["changed"] > found["compared"]:
            raise MergettaError("This state does not fit the adapter: more has changed than was compared.")
        self.adapter.load_state_dict(part(state, "adapter/"))
        self.compared, self.changed = int(found["compared"]), int(found["changed"])
