"""The moments of a domain, estimated from a prior and from a stream: empirical Bayes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.streams.classes import independent_images
from mergetta.streams.moments import StreamMoments, batch_moments
from mergetta.streams.state import Field, checked


@dataclass(frozen=True)
class MomentSettings:
    """Chosen at severity 4 of fashion-bn and on ResNet-32 (docs/research-log.md)."""

    caution: float = 2.0
    """What the prior counts for beyond s²/τ²: it has been chosen for the stream."""
    least: float = 2.0
    """Images that the prior counts for in any layer, at least."""
    most: float = 128.0
    """And at most: a stream that goes on is right in the end."""
    unknown: float = 64.0
    """Images that it counts for where experts do not tell."""
    floor: float = 0.02
    """Share of its images that a stream counts for, at least: predictions of one class may also be wrong ones."""
    memory: float = 2000.0
    """Images of the stream that are remembered, at most: it may drift."""


class DomainMoments:
    """A prior that counts as `worth` images, a number per channel, and a stream that counts by how mixed it looks.

    >>> moments = DomainMoments(np.array([2.0]), classes=2)
    >>> moments.learn(np.array([[[4.0], [0.0]]] * 2), np.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> moments.value(np.array([[0.0], [1.0]])).tolist()   # two of each
    [[2.0], [4.5]]
    """

    def __init__(self, worth: NDArray[Any], classes: int, settings: MomentSettings | None = None) -> None:
        self.settings = settings or MomentSettings()
        self.worth = np.asarray(worth, dtype=np.float64)
        if self.worth.ndim != 1 or not (np.isfinite(self.worth) & (self.worth > 0)).all():
            raise MergettaError("The prior must count as a positive number of images in each channel.")
        self.stream = StreamMoments(len(self.worth), self.settings.memory)
        self.classes = np.zeros(classes)
        """How often each class was predicted, older images fading as in the stream."""

    @property
    def count(self) -> float:
        """How many independent images the stream is worth."""
        return self._worth(self.classes)

    def _worth(self, classes: NDArray[Any]) -> float:
        return max(independent_images(classes), self.settings.floor * float(classes.sum()))

    def value(self, prior: NDArray[Any]) -> NDArray[np.float64]:
        """(2, C): mean and variance."""
        return self.stream.value(prior, self.worth, self.count)

    def share(self, probabilities: NDArray[Any]) -> NDArray[np.float64]:
        """Of a batch in all that is known with it, one number per channel, if these are its predictions."""
        new = predicted(probabilities)
        counts = self.classes + new
        worth = self._worth(counts)
        return np.asarray(worth * (new.sum() / counts.sum()) / (self.worth + worth))

    def learn(self, moments: NDArray[Any], probabilities: NDArray[Any]) -> None:
        """Take in images by their own moments, (B, 2, C), and what is predicted for them."""
        batch, before = batch_moments(moments), self.stream.count
        if not (np.isfinite(batch).all() and np.isfinite(probabilities).all()):
            return
        self.stream.add(batch, len(moments))
        kept = max(0.0, self.stream.count - len(moments)) / before if before else 0.0
        self.classes = kept * self.classes + predicted(probabilities)

    def clear(self) -> None:
        self.stream.clear()
        self.classes = np.zeros_like(self.classes)

    def state(self) -> dict[str, Any]:
        return {**self.stream.state("moments."), "moments.classes": self.classes.copy()}

    def check(self, state: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """What `restore` would take, or one sentence."""
        self.stream.check(state, "moments.")
        return checked(state, {"classes": Field(self.classes.shape, low=0)}, "moments.")

    def restore(self, state: Mapping[str, Any]) -> None:
        self.classes = self.check(state)["classes"]
        self.stream.restore(state, "moments.")


def predicted(probabilities: NDArray[Any]) -> NDArray[np.float64]:
    """How often each class is predicted."""
    p = np.asarray(probabilities)
    return np.bincount(p.argmax(axis=1), minlength=p.shape[1]).astype(np.float64)


def prior_counts(
    between: NDArray[Any], spread: NDArray[Any] | None, settings: MomentSettings | None = None
) -> NDArray[np.float64]:
    """How many images merged moments count for, one number per layer.

    If a domain's moment is drawn with the variance τ² (`between` domains) and an image's own with the variance s²
    (`spread` between images; both of means and of second moments, (2, layers)), then n images and the prior weigh
    n : s²/τ². Deep layers hardly differ between domains and much between images, so the prior counts for much there,
    and for little after the stem. Means and second moments have one number, by their geometric mean: with two, a
    variance could come out negative.

    >>> prior_counts(np.array([[1.0], [1.0]]), np.array([[4.0], [9.0]]), MomentSettings(caution=1.0)).tolist()
    [6.0]
    """
    chosen = settings or MomentSettings()
    if spread is None:
        return np.full(between.shape[1], chosen.unknown)
    ratio = np.asarray(spread, dtype=np.float64) / np.maximum(between, 1e-12)
    return np.asarray(np.clip(chosen.caution * np.sqrt(ratio.prod(axis=0)), chosen.least, chosen.most))


def between_domains(domains: NDArray[Any], sizes: Sequence[int]) -> NDArray[np.float64]:
    """(2, layers): variance between domains, (M, 2, C), of means and of second moments, on average over channels."""
    mean, variance = np.moveaxis(np.asarray(domains, dtype=np.float64), 1, 0)
    each = np.stack([mean.var(axis=0), (variance + mean**2).var(axis=0)])
    starts = np.append(0, np.cumsum(sizes)[:-1]).astype(int)
    return np.asarray(np.add.reduceat(each, starts, axis=1) / np.asarray(sizes))
