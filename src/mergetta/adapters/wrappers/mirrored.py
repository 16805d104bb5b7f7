"""Flip averaging: predictions of an image and of its mirror image, averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mergetta.adapters.base import ADAPTING, SETTLED, Adapter, Status, Wrapper
from mergetta.arrays import Array, array_namespace, beside, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import softmax
from mergetta.streams.state import Field, checked

COMPARED = 256
"""Images on which the mirrored view is judged, at least."""
WORTH = 0.04
"""Share of the predictions that it has to change to be worth a forward pass."""
COUNTS = ("compared", "changed")


class Mirrored(Wrapper):
    """Predict both views of an image, until that surely (by two standard errors) changes fewer than 4 in 100.

    It helps any method, and costs a forward pass. Only for images that mean the same when mirrored: not for text,
    digits, left and right.

    The adapter learns from the images as they come, and not from their mirror images.

    References
    ----------
    Krizhevsky et al. 2012, ImageNet classification with deep convolutional neural networks: averaging over flips.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.clear()

    def clear(self) -> None:
        self.compared = self.changed = 0
        """Images seen in both views since the adapter has settled; predictions that the second view changed."""

    @property
    def agreed(self) -> bool:
        """Whether the mirrored view surely changes too little."""
        return self.compared >= COMPARED and self.changed + 2 * np.sqrt(self.changed) < WORTH * self.compared

    def predict(self, images: Array) -> Array:
        """Logarithms of mean probabilities."""
        logits = self._predict(images)
        if self.agreed:
            return logits
        flipped = array_namespace(images).flip(images, axis=3)
        one, other = (softmax(to_numpy(each)) for each in (logits, self.adapter.look(flipped)))
        both = (one + other) / 2
        if self.adapter.status().phase == SETTLED and np.isfinite(both).all():
            self.compared += len(both)
            self.changed += int(np.count_nonzero(one.argmax(axis=1) != both.argmax(axis=1)))
        return beside(np.log(np.maximum(both, 1e-12)), logits)

    def status(self) -> Status:
        inner = self.adapter.status()
        return inner if self.agreed else replace(inner, phase=ADAPTING)

    def swap(self, bundle: Bundle) -> bool:
        swapped = super().swap(bundle)
        if swapped:
            self.clear()
        return swapped

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "compared": self.compared, "changed": self.changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = checked(state, {name: Field(low=0, whole=True) for name in COUNTS})
        if found["changed"] > found["compared"]:
            raise MergettaError("This state does not fit the adapter: more has changed than was compared.")
        super().load_state_dict(state)
        self.compared, self.changed = int(found["compared"]), int(found["changed"])
