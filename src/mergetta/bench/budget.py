"""How much of a model can learn by back-propagation within a budget of memory: measured, in fresh processes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mergetta.adapters.backprop.hybrid import layers_of
from mergetta.bench.cost import peak_memory, some_images
from mergetta.errors import MergettaError
from mergetta.models.family import Family
from mergetta.runtimes.torch_runtime import TorchRuntime

TIMES = 2
"""How often a number of layers is measured before it is called within the budget: the highest peak counts."""


def layers_within(family: Family, budget: float, batch_size: int, report: Callable[[str], None] = print) -> int:
    """The most last norm layers with which `hybrid` stays below `budget` megabytes, on one thread.

    Each trial is a process of its own that imports, loads the family and predicts three batches; what else the caller
    keeps in memory, such as images, is not in it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family.save(folder / "family.safetensors")
        np.save(folder / "images.npy", some_images(family, batch_size))

        def peak(layers: int) -> float:
            place = str(folder / "family.safetensors")
            try:
                found = max(peak_memory("torch", f"hybrid-{layers}", place, folder, 1).peak for _ in range(TIMES))
            except RuntimeError:  # killed for want of memory
                found = math.inf
            report(f"{layers} layers: {found:.0f} MB")
            return found

        return largest(len(layers_of(TorchRuntime(family).structure)), budget, peak)


def largest(most: int, budget: float, peak: Callable[[int], float]) -> int:
    """The largest number from 0 to `most` with a peak below the budget, by halving: more layers take more memory."""
    least = peak(0)
    if least > budget:
        raise MergettaError(f"{budget:.0f} MB are not enough: forward passes alone take {least:.0f} MB.")
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle - 1)
    return low
