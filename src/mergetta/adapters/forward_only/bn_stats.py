"""BatchNorm statistics of the batch instead of the stored ones (Nado et al. 2020). No effect without BatchNorm."""

from __future__ import annotations

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array


class BNStats(Adapter):
    def predict(self, images: Array) -> Array:
        return self._shown(self.runtime(images))
