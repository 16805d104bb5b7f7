"""The random directions z of the paper: drawn again from (seed, step, group) whenever needed, never stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from mergetta.groups import Vector
from mergetta.seeds import rewind


def draw(seed: int, step: int, sizes: Mapping[str, int]) -> dict[str, Vector]:
    """z ~ N(0, I) for each group. A group's z does not depend on which other groups there are."""
    return dict(_draw(seed, step, tuple(sizes.items())))


@lru_cache(maxsize=1)  # a step draws the same z twice: to measure and to move
def _draw(seed: int, step: int, sizes: tuple[tuple[str, int], ...]) -> dict[str, Vector]:
    bits = np.random.Philox(key=0)  # without a key it would ask the system for entropy
    rng = np.random.Generator(bits)
    z = {}
    for name, size in sizes:
        rewind(bits, seed, step, f"z/{name}")
        z[name] = rng.standard_normal(size)
    return z


def moved(point: Mapping[str, Vector], direction: Mapping[str, Vector], length: float) -> dict[str, Vector]:
    """point + length · direction, out of place: + δ − 2δ + δ in place would not restore the floats."""
    return {name: point[name] + length * direction[name] for name in point}
