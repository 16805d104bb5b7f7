"""Groups as an expert might have them: every kind moved by chance, variances kept above zero."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mergetta.groups import kind_of


def moved(groups: Mapping[str, np.ndarray], rng: np.random.Generator, scale: float = 0.1) -> dict[str, np.ndarray]:
    noise = {name: scale * rng.normal(size=value.shape) for name, value in groups.items()}
    return {
        name: value * np.exp(noise[name]) if kind_of(name) == "variance" else value + noise[name]
        for name, value in groups.items()
    }
