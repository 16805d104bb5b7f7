"""The merged model as the bundle starts it, without any step: what merging alone gives."""

from __future__ import annotations

from mergetta.adapters.base import Adapter, check_bundle
from mergetta.arrays import Array
from mergetta.bundle import Bundle
from mergetta.runtimes.base import Runtime


class Merge(Adapter):
    def __init__(self, runtime: Runtime, bundle: Bundle) -> None:
        super().__init__(runtime)
        check_bundle(runtime, bundle)
        self.merged = bundle.merge()

    def predict(self, images: Array) -> Array:
        return self._shown(self.runtime(images, self.merged))
