"""How much of a model can learn by back-propagation within a budget of memory: measured, in fresh processes."""

from __future__ import annotations

import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mergetta.adapters.backprop.hybrid import layers_of
from mergetta.bench.cost import Model, peak_memory
from mergetta.bench.deployed import of_process
from mergetta.errors import MergettaError
from mergetta.models.family import Family
from mergetta.runtimes.torch_runtime import TorchRuntime

TIMES = 2
"""How often a number of layers is measured before it is called within the budget: the highest peak counts."""


def layers_within(family: Family, budget: float, images: np.ndarray, report: Callable[[str], None] = print) -> int:
    """The most last norm layers with which `hybrid` stays below `budget` megabytes in this process.

    Each trial is a process of its own that imports, loads the family and predicts a batch of these images three times,
    with as many threads as this one. What this process holds beside the imports is measured and left to it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        family.save(folder / "family.safetensors")
        np.save(folder / "images.npy", images)

        def trial(variant: str) -> float:
            model, threads = Model(str(folder / "family.safetensors")), torch.get_num_threads()
            return max(peak_memory("torch", variant, model, folder, threads) for _ in range(TIMES))

        beside = max(0.0, of_process("VmRSS") - trial("imports"))

        def peak(layers: int) -> float:
            try:
                found = trial(f"hybrid-{layers}") + beside
            except MemoryError:
                found = math.inf
            report(f"{layers} layers: {found:.0f} MB")
            return found

        return largest(len(layers_of(TorchRuntime(family).structure)), budget, peak)


def largest(most: int, budget: float, peak: Callable[[int], float]) -> int:
    """The largest number from 0 to `most` with a peak below the budget, by bisection: more layers take more memory."""
    least = peak(0)
    if least > budget:
        raise MergettaError(f"{budget:.0f} MB are not enough: forward passes alone take {least:.0f} MB.")
    return bisect_right(range(1, most + 1), budget, key=peak)
