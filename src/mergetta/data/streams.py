"""Labelled images in the order in which a device meets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergetta.seeds import generator


@dataclass(frozen=True)
class Domain:
    """uint8 images (N, H, W, C) and their labels, which only the scoring sees."""

    name: str
    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def stream(self, seed: int, batch_size: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        """Batches of (NCHW in [0, 1], labels) in an order fixed by the seed: the same for every method."""
        order = generator(seed, 0, f"stream/{self.name}").permutation(len(self.images))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            yield as_input(self.images[chosen]), self.labels[chosen]


def as_input(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 NHWC → float32 NCHW in [0, 1]: what adapters and runtimes take."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
