"""Labelled images in the order in which a device meets them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mergetta.seeds import generator

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]


class Images(Protocol):
    """What a domain needs of its images: arrays, memory maps and `mergetta.data.lazy` are interchangeable."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.uint8]:
        """uint8 (n, H, W, C) of the n images at `index`."""


@dataclass(frozen=True)
class Domain:
    """uint8 images (N, H, W, C) and their labels, which only the scoring sees."""

    name: str
    images: Images
    labels: NDArray[np.int64]

    def stream(self, seed: int, batch_size: int) -> Iterator[Batch]:
        """Batches of (NCHW in [0, 1], labels) in an order fixed by the seed: the same for every method.

        A thread prepares the next batch while the consumer works on this one, so that decoding costs no time of its
        own; it ends with the stream, also when the consumer leaves early.
        """
        order = generator(seed, 0, f"stream/{self.name}").permutation(len(self.images))
        batches = (order[start : start + batch_size] for start in range(0, len(order), batch_size))
        with ThreadPoolExecutor(1, "mergetta-stream") as thread:
            ahead = None
            for chosen in batches:
                ready, ahead = ahead, thread.submit(self.batch, chosen)
                if ready is not None:
                    yield ready.result()
            if ahead is not None:
                yield ahead.result()

    def batch(self, chosen: NDArray[np.int64]) -> Batch:
        return as_input(self.images[chosen]), self.labels[chosen]


def as_input(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 NHWC → float32 NCHW in [0, 1]: what adapters and runtimes take."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
