"""Perturbations with entries ±U[½, 1]: bounded away from zero, so that SPSA may divide by them (ZOA)."""

from __future__ import annotations

import numpy as np

from mergetta.groups import Vector
from mergetta.seeds import rewind
from mergetta.zeroth_order.perturbation import Sizes


def draw_segmented(seed: int, step: int, sizes: Sizes) -> Vector:
    """A group's part of it does not depend on which other groups there are."""
    bits = np.random.Philox(key=0)
    rng = np.random.Generator(bits)
    parts = []
    for name, size in sizes:
        rewind(bits, seed, step, f"segmented/{name}")
        parts.append(rng.uniform(0.5, 1.0, size) * rng.choice((-1.0, 1.0), size))
    return np.concatenate(parts)
