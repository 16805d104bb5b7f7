"""The embedded images: 4,000 of the Fashion-MNIST test set, 2,000 of its training set (MIT licence, Zalando SE)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergetta.data.streams import Domain

EMBEDDED = Path(__file__).parent / "embedded"
FILE, CLEAN_FILE = EMBEDDED / "fashion_mnist_4000.npz", EMBEDDED / "fashion_mnist_train_2000.npz"
CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def load_fashion() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (4000, 28, 28, 1) uint8 and labels (4000,)."""
    with np.load(FILE, allow_pickle=False) as file:
        return file["images"][..., None], file["labels"].astype(np.int64)


def load_fashion_clean(count: int) -> Domain:
    """Images of the training set, which no target shows: what methods may know of the source is measured here."""
    with np.load(CLEAN_FILE, allow_pickle=False) as file:
        return Domain("clean", file["images"][:count, ..., None], file["labels"][:count].astype(np.int64))
