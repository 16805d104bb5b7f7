"""AdaBN (Li et al. 2016), online: BatchNorm statistics follow the stream, starting from the stored ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, entry
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.runtimes.base import Runtime

Statistics = tuple[Any, Any]


class AdaBN(Adapter):
    """Each batch is predicted with s ← (1 − momentum)·s + momentum·(its own statistics), in one pass.

    A runtime blends stored and batch statistics but shows the latter of no layer, so this one needs the model itself: a
    TorchRuntime. Without BatchNorm there is nothing to follow, and any runtime will do.
    """

    def __init__(self, runtime: Runtime, momentum: float = 0.1) -> None:
        super().__init__(runtime)
        if not 0 <= momentum <= 1:
            raise MergettaError(f"momentum must lie in [0, 1], not {momentum}.")
        self.momentum = momentum
        sizes = {g.name.rpartition(".")[0]: g.size for g in runtime.structure if g.kind == "batch"}
        model: Any = getattr(runtime, "model", None)
        if sizes and not hasattr(model, "get_submodule"):
            raise MergettaError("AdaBN needs a TorchRuntime: others do not show the statistics of BatchNorm layers.")
        self.sizes = sizes
        self.layers: dict[str, Any] = {name: model.get_submodule(name) for name in sizes}
        self.reset()

    def reset(self) -> None:
        self.running: dict[str, Statistics] = {}

    def predict(self, images: Array) -> Array:
        self.runtime.load(self.runtime.groups)
        seen: dict[str, Statistics] = {}
        hooks = [
            layer.register_forward_pre_hook(self._follow(name, seen), prepend=True)
            for name, layer in self.layers.items()
        ]
        try:
            logits = self.runtime(images, source_statistics=1.0).logits
        finally:
            for hook in hooks:
                hook.remove()
        self.running = seen
        return logits

    def _follow(self, name: str, seen: dict[str, Statistics]) -> Callable[..., None]:
        """Just before the layer runs, its statistics take this batch in. The runtime's next pass restores its own."""

        def hook(layer: Any, inputs: tuple[Any, ...]) -> None:
            (x,) = inputs
            dims = [d for d in range(x.ndim) if d != 1]
            mean, variance = self.running.get(name, (layer.running_mean, layer.running_var))
            mean = (1 - self.momentum) * mean + self.momentum * x.mean(dims)
            variance = (1 - self.momentum) * variance + self.momentum * x.var(dims, correction=0)
            seen[name] = layer.running_mean, layer.running_var = mean, variance

        return hook

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{name}/{kind}": np.array(to_numpy(value))
            for name, pair in self.running.items()
            for kind, value in zip(("mean", "variance"), pair, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An empty state is that of a new adapter."""
        loaded: dict[str, Statistics] = {}
        for name, layer in self.layers.items() if state else ():
            mean, variance = (np.asarray(entry(state, f"{name}/{kind}")) for kind in ("mean", "variance"))
            if mean.shape != (self.sizes[name],) or variance.shape != mean.shape or not (variance >= 0).all():
                raise MergettaError(f"This AdaBN state does not fit the layer {name!r}.")
            loaded[name] = layer.weight.new_tensor(mean), layer.weight.new_tensor(variance)
        self.running = loaded
