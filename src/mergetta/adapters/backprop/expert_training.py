"""How experts are made: one pass of a back-propagation method over one domain, from the source model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mergetta.adapters import create_adapter, find_method
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.runtimes.torch_runtime import TorchRuntime


def train_expert(
    runtime: TorchRuntime,
    batches: Iterable[Array],
    method: str = "roid",
    domain: str = "",
    seed: int = 0,
    **options: Any,
) -> Expert:
    """Adapt on unlabelled batches and return what a strong device shares."""
    training = Training(runtime, method, seed, **options)
    for images in batches:
        training.adapter.predict(images)
        training.observe(images)
    return training.expert(domain)


class Training:
    """A back-propagation method at work on a domain: call `adapter.predict`, then `observe`, with each batch."""

    def __init__(self, runtime: TorchRuntime, method: str = "roid", seed: int = 0, **options: Any) -> None:
        if not find_method(method).backprop:
            raise MergettaError(f"Experts are made by back-propagation, and {method!r} is forward-only.")
        self.runtime = runtime
        self.adapter = create_adapter(method, runtime, seed=seed, **options)
        told = {name: value for name, value in options.items() if not isinstance(value, Bundle)}
        self.provenance = {"method": method, "seed": seed, "options": told}
        self.moments = Moments()

    def observe(self, images: Array) -> None:
        """The features' statistics, in a forward pass of its own that is not counted as the method's."""
        forwarded = self.runtime.forwarded
        self.moments.add(to_numpy(self.runtime(images).statistics), len(images))
        self.runtime.forwarded = forwarded

    def expert(self, domain: str = "") -> Expert:
        if not self.moments.samples:
            raise MergettaError("There are no images to adapt on.")
        groups = self.runtime.current()
        for name, vector in groups.items():
            if not np.isfinite(vector).all():
                raise MergettaError(f"Adaptation diverged (group {name!r}): use a lower learning rate.")
        provenance = {**self.provenance, "samples": self.moments.samples}
        return Expert(groups, self.runtime.family, domain, self.moments.value(), provenance)


class Moments:
    """Mean and variance over a stream from those of its batches."""

    def __init__(self) -> None:
        self.samples = 0
        self.first: Any = 0.0
        self.second: Any = 0.0

    def add(self, statistics: np.ndarray, samples: int) -> None:
        mean, variance = statistics.astype(np.float64)
        self.samples += samples
        self.first = self.first + samples * mean
        self.second = self.second + samples * (variance + mean**2)

    def value(self) -> np.ndarray:
        mean = self.first / self.samples
        return np.stack([mean, self.second / self.samples - mean**2]).astype(np.float32)
