"""A stay in one domain: what its signature is so far, and whether the stream is still there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.streams.moments import StreamMoments
from mergetta.streams.shift import ShiftDetector, distance
from mergetta.streams.state import Field, checked


class Visit:
    """The domain's signature over up to `memory` images, and a detector of shifts, after which it begins anew.

    >>> visit = Visit(threshold=0.2, portion=2, memory=100)
    >>> for x in (0.0, 0.1, 3.0, 3.1):
    ...     begins = visit.begins(np.array([[x], [1.0]]), images=1)
    ...     visit.learn(np.array([[x], [1.0]]), images=1)
    >>> begins, visit.shifts, visit.signature.round(2).tolist()
    (True, 1, [[3.1], [1.0]])
    """

    def __init__(self, threshold: float, portion: int, memory: float) -> None:
        self.detector = ShiftDetector(threshold, portion)
        self.seen = StreamMoments(1, memory)
        self.shifts = 0
        self.images = 0
        """How long it has lasted."""
        self._distances: dict[bool, tuple[Any, Any, float]] = {}
        """The last ones, from the running signature and from another one: of a domain that rests every frame asks."""

    @property
    def count(self) -> float:
        """Images that its signature is that of."""
        return self.seen.count

    @property
    def signature(self) -> NDArray[np.float64]:
        """(2, C)."""
        return self.seen.value()

    @property
    def channels(self) -> int | None:
        """Of a signature, once there is one."""
        known = self.detector.signature
        return None if known is None else known.shape[1]

    def begins(self, signature: NDArray[Any], images: int, classes: NDArray[Any] | None = None) -> bool:
        """Whether a batch is the first one of a domain. `classes` says how often each was predicted."""
        first = self.detector.signature is None
        shifted = self.detector.add(signature, images, classes)
        self.shifts += shifted
        if np.isfinite(signature).all():
            if first or shifted:
                self.seen, self.images = StreamMoments(signature.shape[1], self.seen.memory), 0
            self.images += images
        return first or shifted

    def learn(self, signature: NDArray[Any], images: int) -> None:
        self.seen.add(signature, images)

    def distance_from(self, signature: NDArray[Any] | None) -> float:
        """Of the domain; infinite if either is not known."""
        if signature is None or not self.seen.count or signature.shape != self.seen.sums.shape:
            return np.inf
        running = signature is self.detector.running
        sums, other, found = self._distances.get(running, (None, None, 0.0))
        if sums is not self.seen.sums or other is not signature:  # both are replaced, never changed
            found = float(distance(self.seen.value(), signature))
            self._distances[running] = self.seen.sums, signature, found
        return found

    def is_near(self, signature: NDArray[Any] | None, least: float) -> bool:
        """Whether the domain is known well enough to tell that it is no farther from this signature."""
        return self.count >= self.detector.portion and self.distance_from(signature) < least

    @property
    def drift(self) -> float:
        """Distance of the last images from the domain that was learnt."""
        return self.distance_from(self.detector.running) if self.detector.running is not None else 0.0

    def state(self) -> dict[str, Any]:
        counts = {"shifts": self.shifts, "images": self.images}
        return {**counts, **self.detector.state("signature."), **self.seen.state("domain.")}

    def restored(self, state: Mapping[str, Any], classes: int, channels: int | None) -> Visit:
        """One that goes on from a state, or one sentence; `channels` are those of the signature, if known."""
        new = Visit(self.detector.threshold, self.detector.portion, self.seen.memory)
        counts = checked(state, {name: Field(low=0, whole=True) for name in ("shifts", "images")})
        new.shifts, new.images = int(counts["shifts"]), int(counts["images"])
        new.detector = self.detector.restored(state, "signature.", classes, channels)
        new.seen = StreamMoments(new.channels or 1, self.seen.memory)
        new.seen.restore(state, "domain.")
        return new
