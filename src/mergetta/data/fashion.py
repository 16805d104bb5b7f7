"""The embedded images: 4,000 of the Fashion-MNIST test set (MIT licence, Zalando SE)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).parent / "embedded" / "fashion_mnist_4000.npz"
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
