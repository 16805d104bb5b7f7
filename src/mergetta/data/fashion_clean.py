"""Clean images of the embedded families' source: 2,000 of the Fashion-MNIST training set (MIT licence, Zalando SE).

No target shows them. Methods that may know something of the source measure it here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mergetta.data.streams import Domain

FILE = Path(__file__).parent / "embedded" / "fashion_mnist_train_2000.npz"


def load_fashion_clean(count: int) -> Domain:
    with np.load(FILE, allow_pickle=False) as file:
        return Domain("clean", file["images"][:count, ..., None], file["labels"][:count].astype(np.int64))
