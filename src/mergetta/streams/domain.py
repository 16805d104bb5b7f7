"""The moments of a domain, estimated from a prior and from a stream: empirical Bayes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.streams.classes import independent_images, predicted
from mergetta.streams.moments import StreamMoments, batch_moments
from mergetta.streams.state import Field, checked
from mergetta.streams.variances import Variances, over_layers, with_seconds


@dataclass(frozen=True)
class MomentSettings:
    """Chosen at severity 4 of fashion-bn, on changes that no suite has and on ResNet-32 (docs/research-log.md)."""

    caution: float = 2.0
    """What the prior counts for beyond s²/τ²: it has been chosen for the stream."""
    doubt: float = 8.0
    """How many times the variance of the stream's mean a deviation has to be before the prior is doubted."""
    least: float = 2.0
    """Images that the prior counts for in any layer, at least."""
    most: float = 128.0
    """And at most: a stream that goes on is right in the end."""
    unknown: float = 64.0
    """Images that it counts for where experts do not tell."""
    bias: float = 0.005
    """How uneven the classes of a mixed stream are predicted, by a model that prefers some."""
    floor: float = 0.02
    """Share of its images that a stream counts for, at least: predictions of one class may also be wrong ones."""
    trusted: float = 0.5
    """The same for a stream that is known to be mixed."""
    memory: float = 2000.0
    """Images of the stream that are remembered, at most: it may drift."""


class DomainMoments:
    """A prior and a stream, each of which counts for so many images: empirical Bayes.

    If a domain's moment is drawn around the prior with the variance τ², and an image's own around the domain's with the
    variance s², then E images and the prior weigh E : s²/τ². Deep layers hardly differ between domains and much between
    images, so the prior counts for much there, and for little after the stem. How many images a stream is worth depends
    on how mixed its classes look (`classes.py`).

    Predictions that all are of one class may come from a stream of one class or from a prior that is far off. The first
    moves a layer's moments by at most about s²; so what is beyond that (`doubt`) is taken for τ² of this very domain,
    and the prior counts for less.

    Parameters
    ----------
    sizes
        Channels of each layer.
    classes
        How many the model tells apart.

    References
    ----------
    Morris 1983, Parametric empirical Bayes inference: the variance between groups, estimated from the groups.

    >>> moments = DomainMoments([1], classes=2, variances=Variances(np.ones((2, 1)), np.ones((2, 1))))
    >>> moments.learn(np.array([[[1.0], [0.0]]] * 2), np.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> moments.value(np.array([[0.0], [1.0]])).tolist()   # two of each
    [[0.5], [0.75]]
    """

    def __init__(
        self,
        sizes: Sequence[int],
        classes: int,
        variances: Variances | None = None,
        settings: MomentSettings | None = None,
    ) -> None:
        self.sizes, self.variances = tuple(sizes), variances
        if variances is not None and variances.images.shape[1] != len(self.sizes):
            raise MergettaError("Variances between images and domains are of another model's layers.")
        self.settings = settings or MomentSettings()
        self.stream = StreamMoments(sum(self.sizes), self.settings.memory)
        self.classes = np.zeros(classes)
        """How often each class was predicted, older images fading as in the stream."""
        self.floor = self.settings.floor
        """Share of its images that the stream counts for, at least."""

    @property
    def count(self) -> float:
        """How many independent images the stream is worth."""
        return self._count(self.classes)

    def _count(self, classes: NDArray[Any]) -> float:
        return max(independent_images(classes, self.settings.bias), self.floor * float(classes.sum()))

    def worth(self, prior: NDArray[Any], sums: NDArray[Any], images: float) -> NDArray[np.float64]:
        """What the prior counts for in each channel, beside a mean and second moment that are worth so many images."""
        chosen, variances = self.settings, self.variances
        if variances is None:
            return np.full(sum(self.sizes), chosen.unknown)
        ratio = variances.ratio(variances.domains)
        if images > 0:
            apart = variances.ratio(over_layers((sums - with_seconds(prior)) ** 2, self.sizes))
            ratio = np.maximum(ratio, apart - chosen.doubt / images)
        counts = np.clip(chosen.caution / np.maximum(ratio, 1e-9), chosen.least, chosen.most)
        return np.repeat(counts, self.sizes)

    def value(self, prior: NDArray[Any]) -> NDArray[np.float64]:
        """(2, C): mean and variance."""
        count = self.count
        sums = self.stream.sums / max(self.stream.count, 1e-12)
        return self.stream.value(prior, self.worth(prior, sums, count), count)

    def share(self, prior: NDArray[Any], moments: NDArray[Any], probabilities: NDArray[Any]) -> NDArray[np.float64]:
        """Of a batch in all that is known with it, one number per channel, if these are its predictions."""
        images = len(moments)
        sums = self.stream.sums + images * with_seconds(batch_moments(moments))
        count = self._count(self.classes + predicted(probabilities))
        total = self.stream.count + images
        return np.asarray(count * (images / total) / (self.worth(prior, sums / total, count) + count))

    def expected(self, prior: NDArray[Any], images: int) -> NDArray[np.float64]:
        """The share of a batch of so many images, if they are like those before."""
        before = self.stream.count
        sums, share = self.stream.sums / max(before, 1e-12), images / (before + images)
        count = self._count(self.classes / max(1 - share, 1e-12))
        return np.asarray(count * share / (self.worth(prior, sums, count) + count))

    def learn(self, moments: NDArray[Any], probabilities: NDArray[Any]) -> None:
        """Take in images by their own moments, (B, 2, C), and what is predicted for them."""
        batch, before = batch_moments(moments), self.stream.count
        if not (np.isfinite(batch).all() and np.isfinite(probabilities).all()):
            return
        self.stream.add(batch, len(moments))
        kept = max(0.0, self.stream.count - len(moments)) / before if before else 0.0
        self.classes = kept * self.classes + predicted(probabilities)

    def fade(self, share: float) -> None:
        """What was taken in counts for a part of it: the network has changed."""
        self.stream.sums, self.stream.count = share * self.stream.sums, share * self.stream.count
        self.classes = share * self.classes

    def clear(self) -> None:
        self.stream.clear()
        self.classes = np.zeros_like(self.classes)
        self.floor = self.settings.floor

    def trust(self) -> None:
        """The stream is known to be mixed: predictions that pile up are wrong ones."""
        self.floor = self.settings.trusted

    @property
    def is_trusted(self) -> bool:
        return self.floor >= self.settings.trusted

    def state(self) -> dict[str, Any]:
        return {**self.stream.state("moments."), "moments.classes": self.classes.copy(), "moments.floor": self.floor}

    def check(self, state: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """What `restore` would take, or one sentence."""
        self.stream.check(state, "moments.")
        return checked(state, {"classes": Field(self.classes.shape, low=0), "floor": Field(low=0, high=1)}, "moments.")

    def restore(self, state: Mapping[str, Any]) -> None:
        found = self.check(state)
        self.classes, self.floor = found["classes"], float(found["floor"])
        self.stream.restore(state, "moments.")
