"""Labelled images in the order in which a device meets them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.seeds import generator

Batch = tuple[NDArray[np.float32], NDArray[np.int64]]
Order = Literal["mixed", "sorted", "correlated"]
ORDERS: tuple[Order, ...] = get_args(Order)
CONCENTRATION = 0.1
"""Of the Dirichlet distribution of `correlated`: NOTE's and RoTTA's."""
MOST_SLOTS = 100
"""Of `correlated`, however many classes there are: RoTTA's."""


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

    def stream(self, seed: int, batch_size: int, order: Order = "mixed", turn: int = 0) -> Iterator[Batch]:
        """Batches of (NCHW in [0, 1], labels) in an order fixed by seed and turn: the same for every method.

        A thread prepares the next batch while the consumer works on this one, so that decoding costs no time of its
        own; it ends with the stream, also when the consumer leaves early.
        """
        indices = self.indices(seed, order, turn)
        batches = (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))
        with ThreadPoolExecutor(1, "mergetta-stream") as thread:
            ahead = None
            for chosen in batches:
                ready, ahead = ahead, thread.submit(self.batch, chosen)
                if ready is not None:
                    yield ready.result()
            if ahead is not None:
                yield ahead.result()

    def indices(self, seed: int, order: Order = "mixed", turn: int = 0) -> NDArray[np.int64]:
        """Every image once. `mixed` is a random permutation; the other orders keep it among the images of a class."""
        mixed = generator(seed, turn, f"stream/{self.name}").permutation(len(self.images))
        rng = generator(seed, turn, f"{order}/{self.name}")
        if order == "mixed":
            return mixed
        if order == "sorted":
            return in_classes(mixed, self.labels, rng)
        if order == "correlated":
            return in_slots(mixed, self.labels, rng)
        raise MergettaError(f"There is no order {order!r}; choose from {', '.join(ORDERS)}.")

    def batch(self, chosen: NDArray[np.int64]) -> Batch:
        return as_input(self.images[chosen]), self.labels[chosen]


def in_classes(mixed: NDArray[np.int64], labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """One class after the other, the classes in random order."""
    return np.concatenate([mixed[labels[mixed] == label] for label in rng.permutation(np.unique(labels))])


def in_slots(mixed: NDArray[np.int64], labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A temporally correlated stream: every class is divided over slots by a Dirichlet draw, slot follows slot.

    This is RoTTA's construction. There are as many slots as classes, but at most 100. The shares of a class in the
    slots are drawn from Dirichlet(0.1), so that most of a class falls into one or two slots. Within a slot the classes
    come one after the other, in an order drawn for that slot. Two details differ: the images of a class are shuffled
    by the seed before they are divided, as NOTE does it (RoTTA keeps the order of the files), and only classes that the
    domain has count. NOTE further keeps slots from growing beyond their share and draws again until each has ten
    images; RoTTA does not, nor does this.

    References
    ----------
    T. Gong et al., NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation, NeurIPS 2022.
    L. Yuan, B. Xie and S. Li, Robust Test-Time Adaptation in Dynamic Scenarios (RoTTA), CVPR 2023.
    """
    classes = np.unique(labels)
    slots: list[list[NDArray[np.int64]]] = [[] for _ in range(min(len(classes), MOST_SLOTS))]
    for label in classes:
        members = mixed[labels[mixed] == label]
        shares = rng.dirichlet([CONCENTRATION] * len(slots))
        cuts = (np.cumsum(shares)[:-1] * len(members)).astype(int)
        for slot, part in zip(slots, np.split(members, cuts), strict=True):
            slot.append(part)
    return np.concatenate([slot[place] for slot in slots for place in rng.permutation(len(slot))])


def as_input(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 NHWC → float32 NCHW in [0, 1]: what adapters and runtimes take."""
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)
