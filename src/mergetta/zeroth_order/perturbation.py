"""The random directions z of the paper: drawn again from (seed, step, group) whenever needed, never stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from mergetta.groups import Vector
from mergetta.seeds import generator


def draw(seed: int, step: int, sizes: Mapping[str, int]) -> dict[str, Vector]:
    """z ~ N(0, I) for each group. A group's z does not depend on which other groups there are."""
    return dict(_draw(seed, step, tuple(sizes.items())))


@lru_cache(maxsize=1)  # a step draws the same z twice: to measure and to move
def _draw(seed: int, step: int, sizes: tuple[tuple[str, int], ...]) -> dict[str, Vector]:
    return {name: generator(seed, step, f"z/{name}").standard_normal(size) for name, size in sizes}


def moved(point: Mapping[str, Vector], direction: Mapping[str, Vector], length: float) -> dict[str, Vector]:
    """point + length · direction, out of place: + δ − 2δ + δ in place would not restore the floats."""
    return {name: point[name] + length * direction[name] for name in point}
