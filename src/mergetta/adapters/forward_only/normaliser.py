"""How the moments of a domain are put to use: BatchNorm normalises with them, or features are aligned by them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.arrays import Array, beside, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.groups import GroupValues, has_batch_norm, layer_sizes, moments_of, with_moments
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Output, Predict, Runtime, joined
from mergetta.streams.classes import mixed, predicted
from mergetta.streams.domain import DomainMoments
from mergetta.streams.sampling import Sampling
from mergetta.streams.state import Field, checked
from mergetta.streams.variances import Variances

LARGE = 4
"""A batch shares in what it is normalised with if so many of it are more than all that is known."""
TOGETHER = 32 * 224 * 224
"""Pixels of images that share in it together, at most: more of large images would take more memory than a plain model
does for all of the batch."""
FEWEST, SMALL, MIXED = 16, 64 * 64, 0.5
"""Images above 64 × 64 pixels, so many of them in one batch, are normalised by their own statistics where the stream is
known to be mixed and they look so: networks for such images are deep. What a layer is given that does not fit what the
layers before it were given grows from layer to layer there (53 of MobileNetV2: 64 % of fog are wrong by the stream's
moments, and 50 % by the batch's own statistics).
"""
ROUNDS, SETTLED = 3, 0.1
"""How large its share is depends on what it looks like, and that on the share: so many passes at most, and no more
once the share has moved by less than this.
"""


class Normalisation(ABC):
    """A way to put moments to use. Unless it is said otherwise below, every image of a stream is learnt from: a device
    sees what it wants at no cost, and nothing is gained by folding.
    """

    moments: DomainMoments | None = None
    followed = 0
    """Images of the stream since moments began, whether they were learnt from or not."""

    @abstractmethod
    def __call__(self, images: Array, groups: GroupValues, prior: Any = None, learn: bool = False) -> Output:
        """A pass over images; with `learn` they are the next ones of the stream."""

    @abstractmethod
    def folded(self, groups: GroupValues, prior: Any = None) -> Predict:
        """A pass with these groups and the moments as they are now, for good: at the cost of a plain model."""

    @abstractmethod
    def describe(self) -> str:
        """For people: what it normalises with."""

    def follow(self, images: Array, groups: GroupValues, prior: Any = None) -> Output:
        """A pass over the next images of a stream, as cheap as it gets."""
        return self._counted(self(images, groups, prior, learn=True))

    def _counted(self, output: Output) -> Output:
        self.followed += int(np.isfinite(to_numpy(output.logits)).all(axis=1).sum())
        return output

    def glance(self, images: Array, groups: GroupValues, prior: Any = None) -> Output:
        """The same without learning, whoever comes next."""
        return self(images, groups, prior)

    def once(self, groups: GroupValues, prior: Any = None, alone: bool = False) -> Predict:
        """A pass with groups that may never be used again; `alone` if images stand for the domain by themselves."""
        return lambda images: self(images, groups, prior)

    def look_again(self) -> None:
        """The next images are learnt from as if they were the first."""
        self.followed = 0

    def begin(self, images: Array, groups: GroupValues, prior: Any = None) -> None:
        """Moments are those of a network: of another one they begin with images that stand for the domain."""
        self.clear()
        if self.moments is not None:
            self(images, groups, prior, learn=True)

    def clear(self) -> None:
        """The domain has changed, or the network."""
        self.look_again()
        if self.moments is not None:
            self.moments.clear()

    def state(self) -> dict[str, Any]:
        return {"followed": self.followed, **({} if self.moments is None else self.moments.state())}

    def restore(self, state: Mapping[str, Any]) -> None:
        followed = checked(state, {"followed": Field(low=0, whole=True)})["followed"]
        if self.moments is not None:
            self.moments.restore(state)
        self.followed = int(followed)


class Normaliser(Normalisation):
    """BatchNorm normalises with the moments of the merge, moved to where the stream says they are.

    Single frames and batches are treated alike: nothing depends on who else is in a batch. Only a batch that is large
    beside what is known shares in what it is normalised with, by further passes.
    """

    sampling = Sampling()
    moments: DomainMoments

    def __init__(self, runtime: Runtime, moments: DomainMoments) -> None:
        self.runtime, self.moments = runtime, moments
        self.names = tuple(runtime.groups)
        self._kept: tuple[Any, Any, Predict] | None = None

    def __call__(self, images: Array, groups: GroupValues, prior: Any = None, learn: bool = False) -> Output:
        merged = moments_of(groups, self.names)
        known = with_moments(groups, self.moments.value(merged), self.names)
        large = learn and self._is_large(images)
        share = self.moments.expected(merged, len(images)) if large else np.zeros(1)
        output = self.runtime(images, known, 1.0 - share if large else 1.0, moments=learn)
        if not learn:
            return output
        for _ in range(ROUNDS if large else 0):
            before = share
            share = self.moments.share(merged, to_numpy(output.moments), softmax(to_numpy(output.logits)))
            if not np.abs(share - before).max() > SETTLED:
                break
            output = self.runtime(images, known, 1.0 - share, moments=True)
        self.moments.learn(to_numpy(output.moments), softmax(to_numpy(output.logits)))
        return output

    def _is_large(self, images: Array) -> bool:
        return bool(LARGE * len(images) > self.moments.settings.unknown + self.moments.stream.count)

    def begin(self, images: Array, groups: GroupValues, prior: Any = None) -> None:
        self.clear()
        output = self.runtime(images, groups, moments=True)
        self.moments.learn(to_numpy(output.moments), softmax(to_numpy(output.logits)))
        self.moments.trust()

    def follow(self, images: Array, groups: GroupValues, prior: Any = None) -> Output:
        """Only a part of the images is learnt from."""
        pixels = math.prod(images.shape[2:]) or 1
        together = max(1, TOGETHER // pixels) if self._is_large(images) else 0
        own = self._own(images)
        before = self.moments.state() if len(images) > 1 else {}
        outputs: list[Output] = []
        start = 0
        try:
            while start < len(images) or not outputs:
                stretch = self.sampling.stretch(self.followed + start, self.moments.count)
                looking, count = (True, together) if together else stretch
                part = images[start : start + (own or count)]
                output = self._by_themselves(part, groups, learn=True)
                if output is None:
                    part = part[:count]
                    output = self(part, groups, learn=True) if looking else self._kept_for(groups)(part)
                outputs.append(output)
                start += len(part)
        except MergettaError:  # of an image that cannot be used, when others before it have been learnt from
            if start:
                self.moments.restore(before)
            raise
        return self._counted(joined(outputs))

    def _own(self, images: Array) -> int:
        """How many images may be normalised by their own statistics, in one pass; 0 for small ones."""
        pixels = math.prod(images.shape[2:])
        return max(FEWEST, TOGETHER // pixels) if pixels > SMALL and self.moments.is_trusted else 0

    def _by_themselves(self, images: Array, groups: GroupValues, learn: bool) -> Output | None:
        """Large images by their own statistics, if they are enough and look mixed."""
        if len(images) < FEWEST or not self._own(images):
            return None
        output = self.runtime(images, groups, moments=learn)
        p = softmax(to_numpy(output.logits))
        if not mixed(predicted(p)) >= MIXED:
            return None
        if learn:
            self.moments.learn(to_numpy(output.moments), p)
        return output

    def glance(self, images: Array, groups: GroupValues, prior: Any = None) -> Output:
        if own := self._own(images):
            parts = [images[i : i + own] for i in range(0, len(images), own)]
            found = [self._by_themselves(part, groups, learn=False) or self(part, groups) for part in parts]
            return joined(found)
        looking, _ = self.sampling.stretch(self.followed, self.moments.count)
        return self(images, groups) if looking else self._kept_for(groups)(images)

    def _kept_for(self, groups: GroupValues) -> Predict:
        """What was folded last, as long as neither groups nor moments are others: both are replaced, never changed."""
        sums = self.moments.stream.sums
        if self._kept is None or self._kept[0] is not groups or self._kept[1] is not sums:
            self._kept = None
            self._kept = groups, sums, self.folded(groups)
        return self._kept[2]

    def once(self, groups: GroupValues, prior: Any = None, alone: bool = False) -> Predict:
        return partial(self.runtime, groups=groups) if alone else self.folded(groups)

    def folded(self, groups: GroupValues, prior: Any = None) -> Predict:
        return self.runtime.folded(with_moments(groups, self.moments.value(moments_of(groups, self.names)), self.names))

    @classmethod
    def of_bundle(cls, runtime: Runtime, bundle: Bundle) -> Normalisation:
        """What a device normalises with that merges a bundle."""
        return cls.of_variances(runtime, bundle.variances) if has_batch_norm(runtime.structure) else Plain(runtime)

    @classmethod
    def of_variances(cls, runtime: Runtime, variances: Variances | None) -> Normaliser:
        sizes = layer_sizes(runtime.groups)
        return cls(runtime, DomainMoments(sizes, runtime.classes, variances))

    def describe(self) -> str:
        moments = self.moments
        return f"merged moments and {moments.count:.0f} independent images of the stream"


class Aligner(Normalisation):
    """The classifier's input gets the mean and the variance that it had at the source: without BatchNorm."""

    moments: DomainMoments

    def __init__(self, runtime: Runtime, moments: DomainMoments, source: NDArray[Any]) -> None:
        """`source` is the mean and the variance of the classifier's input at the source, (2, F)."""
        self.runtime, self.moments, self.source = runtime, moments, source
        self.classifier = runtime.classifier

    def __call__(self, images: Array, groups: GroupValues, prior: Any = None, learn: bool = False) -> Output:
        """`prior` is the features' mean and variance in the merged domains."""
        output = self.runtime(images, groups)
        if learn:
            features = to_numpy(output.features).astype(np.float64)
            each = np.stack([features, np.zeros_like(features)], axis=1)
            self.moments.learn(each, softmax(to_numpy(output.logits)))
        return self._aligned(output, self.moments.value(prior))

    def _aligned(self, output: Output, moments: NDArray[Any]) -> Output:
        scale = np.sqrt((self.source[1] + 1e-6) / (moments[1] + 1e-6))
        weight, bias = self.classifier
        features = ((to_numpy(output.features) - moments[0]) * scale + self.source[0]).astype(np.float32)
        logits = beside(features @ weight.T + bias, output.logits)
        return output._replace(logits=logits, features=beside(features, output.features))

    def folded(self, groups: GroupValues, prior: Any = None) -> Predict:
        predict, moments = self.runtime.folded(groups), self.moments.value(prior)
        return lambda images: self._aligned(predict(images), moments)

    def describe(self) -> str:
        moments = self.moments
        return f"features by merged moments and {moments.count:.0f} independent images of the stream"


class Plain(Normalisation):
    """As the paper has it: the batch's own statistics, or none without BatchNorm."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __call__(self, images: Array, groups: GroupValues, prior: Any = None, learn: bool = False) -> Output:
        return self.runtime(images, groups)

    def folded(self, groups: GroupValues, prior: Any = None) -> Predict:
        """Without BatchNorm; a batch's own statistics are no constants."""
        if has_batch_norm(self.runtime.structure):
            return lambda images: self.runtime(images, groups)
        return self.runtime.folded(groups)

    def describe(self) -> str:
        return "the batch's own statistics" if has_batch_norm(self.runtime.structure) else "no BatchNorm"
