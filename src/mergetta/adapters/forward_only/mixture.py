"""A bundle's members, merged by weights and run: their groups, the moments of their domains, their features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.forward_only.normaliser import Aligner, Normaliser, Plain
from mergetta.adapters.forward_only.source_features import check_source
from mergetta.arrays import Array
from mergetta.bundle import Bundle, Members
from mergetta.errors import MergettaError
from mergetta.groups import Vector, has_batch_norm
from mergetta.runtimes.base import Output, Predict, Runtime
from mergetta.streams.domain import DomainMoments, Variances, between_domains, with_seconds


class Mixture:
    """Weights are one per member, and the last one is the source model's, which needs no merging.

    Without `moments`, BatchNorm has the batch's own; `source` (`measure_source`) is what features are aligned with
    where there is no BatchNorm.
    """

    def __init__(self, runtime: Runtime, bundle: Bundle, moments: bool, source: Sequence[Vector] | None) -> None:
        self.bundle = bundle
        self.normalise = normaliser_of(runtime, bundle, moments, source)
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

    def follow(self, images: Array, weights: Vector, known: float, learn: bool = True) -> Output:
        """A pass over the next images of a stream of which `known` have been seen, as cheap as it gets."""
        run = self.normalise.follow if learn else self.normalise.glance
        return run(images, *self._of(weights), known)

    def once(self, weights: Vector) -> Predict:
        """A pass for weights that may never be used again."""
        return self.normalise.once(*self._of(weights))

    def groups(self, weights: Vector, moved: Mapping[str, Vector] | None = None) -> dict[str, Vector]:
        merged, _ = self._of(weights)
        return {**merged, **{name: merged[name] + vector for name, vector in moved.items()}} if moved else merged

    def folded(self, weights: Vector, moved: Mapping[str, Vector] | None = None) -> Predict:
        """A pass with these weights and the moments as they are now, at the cost of a plain model."""
        return self.normalise.folded(self.groups(weights, moved), self._of(weights)[1])


def normaliser_of(
    runtime: Runtime, bundle: Bundle, moments: bool, source: Sequence[Vector] | None
) -> Normaliser | Aligner | Plain:
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
