"""How a model does on labelled images: error, calibration, per class, and what is taken for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.source import Source
from mergetta.arrays import to_numpy
from mergetta.data.streams import Batch, Domain, Order, as_input
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import softmax

BINS = 15
"""Of confidence, in the calibration error: Guo et al.'s."""


@dataclass(frozen=True, eq=False)
class Score:
    """Predictions of labelled images, and what they are worth."""

    probabilities: NDArray[np.floating[Any]]
    """(N, K)"""
    labels: NDArray[np.int64]

    @property
    def predicted(self) -> NDArray[np.int64]:
        return np.argmax(self.probabilities, axis=1)

    @property
    def error(self) -> float:
        """In percent."""
        return 100 * float(np.mean(self.predicted != self.labels))

    @property
    def confusion(self) -> NDArray[np.int64]:
        """(K, K): how many images of each class (rows) were taken for which."""
        classes = self.probabilities.shape[1]
        counts = np.bincount(self.labels * classes + self.predicted, minlength=classes**2)
        return counts.reshape(classes, classes)

    @property
    def calibration_error(self) -> float:
        """ECE in percent: |accuracy − confidence|, averaged over the images in bins of confidence.

        References
        ----------
        Guo et al. 2017, On calibration of modern neural networks.

        >>> Score(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1])).calibration_error
        30.0
        """
        confidence = self.probabilities.max(axis=1).astype(np.float64)
        bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
        gaps = np.bincount(bins, (self.predicted == self.labels) - confidence, BINS)
        return round(100 * float(np.abs(gaps).sum()) / len(bins), 6)

    def class_errors(self) -> NDArray[np.floating[Any]]:
        """(K,) in percent; NaN for a class that no image has."""
        counts = self.confusion
        with np.errstate(invalid="ignore"):
            return np.asarray(100 - 100 * counts.diagonal() / counts.sum(axis=1))

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        errors = [None if np.isnan(error) else float(error) for error in self.class_errors()]
        return {
            "error": self.error,
            "calibration_error": self.calibration_error,
            "class_errors": errors,
            "confusion": self.confusion.tolist(),
        }


def evaluate(adapter: Adapter, batches: Iterator[Batch]) -> tuple[Score, Score]:
    """The source model and the adapter, each batch predicted as it comes."""
    seen = []
    for images, labels in batches:
        both = [softmax(to_numpy(method.predict(images))) for method in (Source(adapter.runtime), adapter)]
        seen.append((*both, labels))
    if not seen:
        raise MergettaError("There are no images to evaluate on.")
    before, after, labels = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    return Score(before, labels), Score(after, labels)


def readable(
    domain: Domain, seed: int, batch_size: int, order: Order, broken: Callable[[str], None]
) -> Iterator[Batch]:
    """The domain's stream without the images that cannot be read, which `broken` is told of."""
    indices = domain.indices(seed, order)
    for start in range(0, len(indices), batch_size):
        images, labels = [], []
        for index in indices[start : start + batch_size]:
            try:
                images.append(domain.images[np.array([index])][0])
                labels.append(domain.labels[index])
            except MergettaError as error:
                broken(str(error))
        if images:
            yield as_input(np.stack(images)), np.array(labels)
