"""Mean and variance per channel of a stream, taken in batch by batch or frame by frame, with a prior."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.streams.state import Field, checked

LARGEST = 1e30
"""No mean is larger, nor a second moment: groups are float32."""


def batch_moments(images: NDArray[Any]) -> NDArray[np.float64]:
    """(2, C): mean and variance over several images from those of each, (B, 2, C).

    >>> batch_moments(np.array([[[1.0], [0.0]], [[3.0], [0.0]]])).tolist()
    [[2.0], [1.0]]
    """
    means, variances = np.moveaxis(np.asarray(images, dtype=np.float64), 1, 0)
    mean = means.mean(axis=0)
    return np.stack([mean, variances.mean(axis=0) + ((means - mean) ** 2).mean(axis=0)])


class StreamMoments:
    """What has been seen of a stream: sums of means and of second moments, which add up whatever the batches were.

    Parameters
    ----------
    channels
        How many numbers a mean has.
    memory
        At most so many images are remembered: older ones fade, so that the moments follow a stream that drifts.

    Attributes
    ----------
    count
        How many images have been taken in and not faded.

    >>> stream = StreamMoments(1)
    >>> stream.add(np.array([[1.0], [0.0]]))
    >>> stream.add(np.array([[3.0], [0.0]]))
    >>> stream.value().tolist()
    [[2.0], [1.0]]
    >>> stream.value(prior=np.array([[0.0], [1.0]]), worth=2).tolist()   # a prior that counts as two images
    [[1.0], [2.0]]
    """

    def __init__(self, channels: int, memory: float = np.inf) -> None:
        self.memory = memory
        self.count = 0.0
        self.sums = np.zeros((2, channels))

    def add(self, moments: NDArray[Any], images: float = 1.0) -> None:
        """Take in a batch by its own mean and variance, as so many images. One that is not finite leaves no trace."""
        new = np.array(moments, dtype=np.float64)
        new[1] += new[0] * new[0]
        if images <= 0 or not np.isfinite(new).all():
            return
        keep = 1.0 if self.count + images <= self.memory else max(0.0, self.memory - images) / max(self.count, 1e-12)
        self.sums = min(keep, 1.0) * self.sums + images * new
        self.count = min(keep, 1.0) * self.count + images

    def value(
        self, prior: NDArray[Any] | None = None, worth: float | NDArray[Any] = 0.0, images: float | None = None
    ) -> NDArray[np.float64]:
        """(2, C): mean and variance of the stream, together with a prior that counts as `worth` images, per channel.

        The stream itself counts as `images` instead of as many as have been taken in.
        """
        sums = self.sums / max(self.count, 1e-12)
        if prior is not None:
            known = np.array(prior, dtype=np.float64)
            known[1] += known[0] * known[0]
            own = self.count if images is None else images
            share = own / np.maximum(own + worth, 1e-12)
            sums = share * sums + (1 - share) * known
        sums[1] = np.maximum(sums[1] - sums[0] * sums[0], 0.0)
        return np.asarray(sums)

    def clear(self) -> None:
        self.count = 0.0
        self.sums = np.zeros_like(self.sums)

    def state(self, prefix: str) -> dict[str, Any]:
        return {f"{prefix}count": self.count, f"{prefix}sums": self.sums.copy()}

    def restore(self, state: Mapping[str, Any], prefix: str) -> None:
        found = self.check(state, prefix)
        self.count, self.sums = float(found["count"]), found["sums"]

    def check(self, state: Mapping[str, Any], prefix: str) -> dict[str, NDArray[Any]]:
        """What `restore` would take, or one sentence."""
        found = checked(state, {"count": Field(low=0), "sums": Field(self.sums.shape)}, prefix)
        if (np.abs(found["sums"]) > LARGEST * found["count"]).any():
            raise MergettaError(f"This state does not fit the adapter: '{prefix}sums'.")
        return found
