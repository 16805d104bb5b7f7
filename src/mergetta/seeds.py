"""Counter-based random generators, keyed by what they are for, so that every machine draws the same numbers."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mergetta.files import sha256

MASK = 2**64 - 1


@lru_cache(maxsize=4096)
def key_of(seed: int, purpose: str) -> NDArray[np.uint64]:
    word = int.from_bytes(sha256(purpose.encode()).digest()[:8], "little")
    return np.array([seed & MASK, word], dtype=np.uint64)


def generator(seed: int, counter: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each (seed, counter, purpose); none of them overlap.

    >>> bool(generator(0, 3, "a").random() == generator(0, 3, "a").random())
    True
    """
    return np.random.Generator(rewind(np.random.Philox(key=0), seed, counter, purpose))


def rewind(bits: np.random.Philox, seed: int, counter: int, purpose: str) -> np.random.Philox:
    """Put a bit generator where `generator` starts it: ten times cheaper than a new one."""
    bits.state = {
        "bit_generator": "Philox",
        "state": {"counter": np.array([0, 0, 0, counter & MASK], dtype=np.uint64), "key": key_of(seed, purpose)},
        "buffer": np.zeros(4, dtype=np.uint64),
        "buffer_pos": 4,  # the buffer is used up: the next number comes from the counter
        "has_uint32": 0,
        "uinteger": 0,
    }
    return bits
