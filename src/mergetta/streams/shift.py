"""Has the domain changed? The stream's signature is compared with that of the last images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.streams.classes import mixed
from mergetta.streams.moments import StreamMoments
from mergetta.streams.state import Field, checked


class ShiftDetector:
    """Takes signatures (mean and variance after the stem) in portions of at least `portion` images.

    A portion whose distance from the running signature exceeds the threshold is a shift, and starts a new one; any
    other moves the running signature by 1 − `memory`. The signature depends on no weights that adapt.

    References
    ----------
    CoLA (Chen et al. 2025): the distance, its thresholds and the running mean, there batch by batch.

    >>> detector = ShiftDetector(threshold=0.2, portion=2)
    >>> [detector.add(np.array([[x], [1.0]]), images=1) for x in (0.0, 0.1, 0.0, 0.1, 3.0, 3.1)]
    [False, False, False, False, False, True]
    """

    def __init__(self, threshold: float, portion: int = 64, memory: float = 0.8) -> None:
        self.threshold, self.portion, self.memory = threshold, portion, memory
        self.running: NDArray[np.float64] | None = None
        """(2, C); None before the first portion is complete."""
        self.recent: StreamMoments | None = None
        self.classes: NDArray[Any] | None = None
        self.mixed = 0.0
        """How mixed the classes of the last portions looked, older ones counting for less."""

    @property
    def signature(self) -> NDArray[np.float64] | None:
        """What is known of the domain: the running signature, or that of the first images."""
        if self.running is not None or self.recent is None or not self.recent.count:
            return self.running
        return self.recent.value()

    def add(self, signature: NDArray[Any], images: int, classes: NDArray[Any] | None = None) -> bool:
        """Take in a batch; True if it completes a portion of another domain. One without numbers leaves no trace.

        `classes` says how often each was predicted. Where classes come one by one, another class looks different too:
        the less mixed this portion and the last ones are, the larger a distance it takes. (This one may look unmixed
        because it is of another domain.)
        """
        if not np.isfinite(signature).all():
            return False
        if classes is not None:
            self.classes = classes if self.classes is None else self.classes + classes
        if self.recent is None:
            self.recent = StreamMoments(signature.shape[1])
        self.recent.add(signature, images)
        if self.recent.count < self.portion:
            return False
        now, before = self.recent.value(), self.mixed
        self.mixed = 1.0 if self.classes is None else max(mixed(self.classes), self.memory * before, 1e-6)
        self.recent.clear()
        self.classes = None
        if self.running is None:
            self.running = now
            return False
        shifted = bool(distance(self.running, now) > self.threshold / max(before, self.mixed))
        self.running = now if shifted else self.memory * self.running + (1 - self.memory) * now
        return shifted

    def state(self, prefix: str) -> dict[str, Any]:
        running = {} if self.running is None else {f"{prefix}running": self.running.copy()}
        classes = {} if self.classes is None else {f"{prefix}classes": self.classes.copy()}
        return {
            f"{prefix}mixed": self.mixed,
            **running,
            **classes,
            **({} if self.recent is None else self.recent.state(f"{prefix}recent.")),
        }

    def restored(
        self, state: Mapping[str, Any], prefix: str, classes: int, channels: int | None = None
    ) -> ShiftDetector:
        """A detector that goes on from a state, or one sentence; `channels` are those of the signature, if known."""
        new = ShiftDetector(self.threshold, self.portion, self.memory)
        new.mixed = float(checked(state, {"mixed": Field(low=0, high=1)}, prefix)["mixed"])
        if f"{prefix}running" in state:
            new.running = checked(state, {"running": Field((2, channels))}, prefix)["running"]
            channels = new.running.shape[1]
        if f"{prefix}classes" in state:
            new.classes = checked(state, {"classes": Field((classes,), low=0)}, prefix)["classes"]
        if f"{prefix}recent.count" in state:
            fields = {"sums": Field((2, channels))}
            new.recent = StreamMoments(checked(state, fields, f"{prefix}recent.")["sums"].shape[1])
            new.recent.restore(state, f"{prefix}recent.")
        return new


def distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Symmetric KL divergence between Gaussians (mean, variance), averaged over channels; (…, 2, C) → (…)."""
    m1, v1, m2, v2 = a[..., 0, :], a[..., 1, :], b[..., 0, :], b[..., 1, :]
    v1, v2 = np.maximum(v1, 1e-12), np.maximum(v2, 1e-12)
    square = (m1 - m2) ** 2
    return np.asarray(np.mean((v1 + square) / (2 * v2) + (v2 + square) / (2 * v1) - 1, axis=-1))
