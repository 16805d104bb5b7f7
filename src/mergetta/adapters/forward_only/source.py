"""No adaptation: the source model with its stored BatchNorm statistics. The baseline of every table."""

from __future__ import annotations

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array


class Source(Adapter):
    def predict(self, images: Array) -> Array:
        self.runtime.load(self.runtime.groups)
        return self.runtime(images, source_statistics=1.0).logits
