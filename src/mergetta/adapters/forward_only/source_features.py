"""What the source model's features look like on clean images, and how far a batch is from that: FOA, FOZO and ZOA.

The methods as published look at the class token after every block, or at every stage of a CNN. A runtime shows one
layer, the classifier's input, so that is the layer compared here. (The other thing that a runtime shows, statistics
after the stem, lies before all that these methods move.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.runtimes.base import Output, Runtime


class SourceFeatures(NamedTuple):
    mean: Vector
    std: Vector


def measure_source(runtime: Runtime, batches: Iterable[Array]) -> SourceFeatures:
    """Mean and standard deviation of the classifier's input over clean images: the option `source` of the methods.

    With the runtime's own BatchNorm statistics, as the methods run; without prompts, for those who add some.

    >>> create_adapter("zoa", runtime, source=measure_source(runtime, clean_batches))   # doctest: +SKIP
    """
    samples, total, squares = 0, np.zeros(()), np.zeros(())
    for images in batches:
        features = to_numpy(runtime(images).features).astype(np.float64)
        samples += len(features)
        total = total + features.sum(axis=0)
        squares = squares + (features**2).sum(axis=0)
    if samples < 2:
        raise MergettaError("The source features need at least two clean images to be measured on.")
    variance = (squares - total**2 / samples) / (samples - 1)
    return SourceFeatures(total / samples, np.sqrt(np.maximum(variance, 0)))


def check_source(runtime: Runtime, source: Sequence[Vector]) -> SourceFeatures:
    """The option as given, or one sentence."""
    width = runtime.classifier.weight.shape[1]
    values = [np.asarray(vector, dtype=np.float64) for vector in source]
    if len(values) != 2 or any(v.shape != (width,) or not np.isfinite(v).all() for v in values):
        raise MergettaError(f"source must be the mean and the std of {width} features: see measure_source.")
    return SourceFeatures(*values)


def squared_distances(features: Vector, source: SourceFeatures) -> np.ndarray:
    """(mean − source mean)² and (std − source std)² per channel, (2, F)."""
    std = features.std(axis=0, ddof=min(1, len(features) - 1))
    return np.stack([(features.mean(axis=0) - source.mean) ** 2, (std - source.std) ** 2])


class BackToSource:
    """FOA's shift of the classifier's input by μ_source − μ_stream; μ_stream is an average over the batches so far."""

    def __init__(self, runtime: Runtime, source: SourceFeatures, momentum: float = 0.9) -> None:
        self.runtime, self.source, self.momentum = runtime, source, momentum
        self.mean: Vector | None = None

    def logits(self, output: Output) -> Array:
        if self.mean is None:
            return output.logits
        weight, bias = self.runtime.classifier
        features = to_numpy(output.features) + (self.source.mean - self.mean)
        return beside(features @ weight.T + bias, output.logits)

    def observe(self, *outputs: Output) -> None:
        """Take note of a batch's mean features, after it has been predicted; of those passes that gave numbers."""
        means = [to_numpy(output.features).mean(axis=0) for output in outputs]
        means = [mean for mean in means if np.isfinite(mean).all()]
        if means:
            mean = np.mean(means, axis=0)
            old = mean if self.mean is None else self.mean
            self.mean = self.momentum * old + (1 - self.momentum) * mean.astype(np.float64)

    def state(self) -> dict[str, Vector]:
        return {} if self.mean is None else {"stream_mean": self.mean.copy()}

    def check(self, state: Mapping[str, Any]) -> Vector | None:
        """The mean in a state, if there is one that fits."""
        mean = state.get("stream_mean")
        if mean is None:
            return None
        if np.shape(mean) != self.source.mean.shape or not np.isfinite(mean).all():
            raise MergettaError("This state does not fit the adapter: its mean features.")
        return np.array(mean, dtype=np.float64)
