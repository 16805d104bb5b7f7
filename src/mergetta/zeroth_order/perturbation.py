"""The random directions z of the paper: drawn again from (seed, step, group) whenever needed, never stored."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mergetta.groups import Vector
from mergetta.seeds import rewind

Sizes = tuple[tuple[str, int], ...]
"""Names and sizes of the groups whose coefficients lie one after the other in a vector."""


@lru_cache(maxsize=1)  # a step draws the same z twice: to measure and to move
def draw(seed: int, step: int, sizes: Sizes) -> Vector:
    """z ~ N(0, I). A group's part of it does not depend on which other groups there are."""
    bits = np.random.Philox(key=0)  # without a key it would ask the system for entropy
    rng = np.random.Generator(bits)
    z = np.empty(sum(size for _, size in sizes))
    start = 0
    for name, size in sizes:
        rewind(bits, seed, step, f"z/{name}")
        rng.standard_normal(out=z[start : start + size])
        start += size
    z.flags.writeable = False
    return z
