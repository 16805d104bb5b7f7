"""No adaptation: the source model with its own BatchNorm moments. The baseline of every table."""

from __future__ import annotations

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array


class Source(Adapter):
    def predict(self, images: Array) -> Array:
        return self._shown(self.runtime(images, given=1.0))
