"""A bundle's members, merged by weights and run: their groups, the moments of their domains, their features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.forward_only.normaliser import TOGETHER as MOST
from mergetta.adapters.forward_only.normaliser import Aligner, Normalisation, Normaliser, Plain
from mergetta.adapters.forward_only.refinement import Forward
from mergetta.adapters.forward_only.source_features import check_source
from mergetta.adapters.forward_only.trials import unpacked
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle, Members
from mergetta.errors import MergettaError
from mergetta.groups import Vector, has_batch_norm
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Output, Predict, Runtime, portion_of
from mergetta.streams.domain import DomainMoments
from mergetta.streams.variances import Variances, between_domains, with_seconds

TOGETHER, PIXELS = 16, 64 * 32 * 32
"""Images whose own statistics stand for a domain, at least, and pixels of all that go through a model in one pass where
they depend on each other: 16 images of 224 pixels would take four times the memory of a plain model.
"""


class Mixture:
    """Weights are one per member, and the last one is the source model's, which needs no merging.

    Without `moments`, BatchNorm has the batch's own; `source` (`measure_source`) is what features are aligned with
    where there is no BatchNorm.
    """

    def __init__(self, runtime: Runtime, bundle: Bundle, moments: bool, source: Sequence[Vector] | None) -> None:
        self.runtime, self.bundle = runtime, bundle
        self.normalise = normaliser_of(runtime, bundle, moments, source)
        self.width = 0
        """Images that the stream brings in one batch, which may go through the model in one pass then."""
        self._merged = lru_cache(2)(self._merge)
        """Of the last two: what predicts, and what is tried."""

    def _merge(self, weights: bytes) -> tuple[dict[str, Vector], NDArray[Any] | None]:
        """All groups, and what features look like in the merged domains."""
        members = np.frombuffer(weights)[:-1]
        return self.bundle.mixture(members), features_of(self.bundle.members, members)

    def _of(self, weights: Vector) -> tuple[dict[str, Vector], NDArray[Any] | None]:
        return self._merged(np.asarray(weights, dtype=np.float64).tobytes())

    def __call__(
        self, images: Array, weights: Vector, learn: bool = False, moved: Mapping[str, Vector] | None = None
    ) -> Output:
        """A pass over images; with `learn` they are the next ones of the stream. `moved` is added to the groups."""
        return self.normalise(images, self.groups(weights, moved), self._of(weights)[1], learn)

    def follow(self, images: Array, weights: Vector, learn: bool = True) -> Output:
        """A pass over the next images of a stream, as cheap as it gets."""
        self.width = max(self.width, len(images))
        run = self.normalise.follow if learn else self.normalise.glance
        return run(images, *self._of(weights))

    def tried(self, held: NDArray[Any], weights: Vector, alone: bool) -> NDArray[np.float64]:
        """What a candidate predicts for the images that are held, unpacked a few at a time: probabilities. They are
        normalised by their own statistics `alone`, if they stand for the domain and are not too large: moments are
        another network's.
        """
        alone = alone and self.fits(held)
        if alone and self.normalise.moments is not None and not self.small(held):
            self.normalise.moments.trust()
        predict = self.normalise.once(*self._of(weights), alone)
        size = portion_of(held) if self.normalise.moments is not None and not alone else self.together(held)
        return np.concatenate([probabilities(predict(unpacked(held[i : i + size]))) for i in range(0, len(held), size)])

    def begin(self, held: NDArray[Any], weights: Vector) -> None:
        """These weights make another network, whose moments begin with the images that are held, if these are not too
        large to stand for the domain: else moments stay those of the stream.
        """
        if self.fits(held):
            self.normalise.begin(unpacked(held[: self.together(held)]), *self._of(weights))

    def fits(self, images: NDArray[Any]) -> bool:
        """Whether images are so small, or so independent, that enough of them go through the model in one pass, or come
        so.
        """
        return self.small(images) or self.width >= TOGETHER

    def small(self, images: NDArray[Any]) -> bool:
        return not has_batch_norm(self.runtime.structure) or TOGETHER * images[0, 0].size <= PIXELS

    def together(self, images: NDArray[Any]) -> int:
        """How many go through the model in one pass where they depend on each other."""
        pixels = images[0, 0].size
        return int(max(TOGETHER, PIXELS // pixels, 0 if self.small(images) else min(self.width, MOST // pixels)))

    def moving(self, weights: Vector, images: NDArray[Any]) -> tuple[Forward, Forward | None]:
        """Logits of images with something added to the groups: normalised as the stream is, or with the statistics of
        these images themselves, if they are not too large.
        """

        def alone(images: NDArray[Any], moved: Mapping[str, Vector]) -> NDArray[Any]:
            groups, size = self.groups(weights, moved), self.together(images)
            parts = (images[i : i + size] for i in range(0, len(images), size))
            return np.concatenate([to_numpy(self.runtime(part, groups).logits) for part in parts])

        return lambda images, moved: to_numpy(self(images, weights, moved=moved).logits), (
            alone if self.small(images) else None
        )

    def groups(self, weights: Vector, moved: Mapping[str, Vector] | None = None) -> dict[str, Vector]:
        merged, _ = self._of(weights)
        return {**merged, **{name: merged[name] + vector for name, vector in moved.items()}} if moved else merged

    def folded(self, weights: Vector, moved: Mapping[str, Vector] | None = None, home: bool = False) -> Predict:
        """A pass with these weights and the moments as they are now, at the cost of a plain model: at `home` the source
        model as it is.
        """
        if home:
            return self.runtime.folded(self.runtime.groups)
        return self.normalise.folded(self.groups(weights, moved), self._of(weights)[1])


def normaliser_of(runtime: Runtime, bundle: Bundle, moments: bool, source: Sequence[Vector] | None) -> Normalisation:
    """What a family's moments are put to use by."""
    if has_batch_norm(runtime.structure) and moments:
        return Normaliser.of_bundle(runtime, bundle)
    features = None if bundle.members is None else bundle.members.features
    if has_batch_norm(runtime.structure) or source is None or features is None:
        return Plain(runtime)
    known = check_source(runtime, source)
    at_source = np.stack([known.mean, known.std**2])
    if features.shape[1:] != at_source.shape:
        raise MergettaError("The members' features are not of this model.")
    width = at_source.shape[1]
    variances = bundle.variances
    if variances is not None:
        variances = Variances(variances.images, between_domains(np.stack([*features, at_source]), [width]))
    return Aligner(runtime, DomainMoments([width], runtime.classes, variances), at_source)


def features_of(members: Members | None, weights: Vector) -> NDArray[Any] | None:
    """Mean and variance of the classifier's input in a mixture of the members' domains, (2, F)."""
    if members is None or members.features is None:
        return None
    total, count = weights.sum(), len(weights)
    shares = weights / total if total > 0 else np.full(count, 1 / count)
    mean, seconds = np.tensordot(shares, [with_seconds(each) for each in members.features], axes=1)
    return np.stack([mean, np.maximum(seconds - mean**2, 0)])


def probabilities(output: Output) -> NDArray[np.float64]:
    return np.asarray(softmax(to_numpy(output.logits)), dtype=np.float64)
