"""A target's stream: each batch is predicted as it comes, and its errors are counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters import find_method
from mergetta.adapters.base import Adapter
from mergetta.arrays import Array, to_numpy
from mergetta.bench.cells import Cell
from mergetta.bench.inputs import source_of, target_stream
from mergetta.bench.suite import Suite
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.runtimes.onnx_runtime import OnnxRuntime
from mergetta.runtimes.torch_runtime import TorchRuntime

PORTION = 32
"""Images that an entry of `wrong` and `sizes` in a record counts at least: smaller batches are counted together."""
KEPT = 200
"""The last predictions that a record keeps, to show some."""


def online(
    suite: Suite,
    cell: Cell,
    adapter: Adapter,
    runtime: TorchRuntime | OnnxRuntime,
    after: Callable[[Array], None] = lambda images: None,
    wrapped: Adapter | None = None,
) -> dict[str, Any]:
    """The record of a target's stream: each batch predicted as it comes. `after` sees each batch, untimed; `wrapped` is
    the adapter with what is around it.
    """
    wrong: list[int] = []
    sizes: list[int] = []
    kept: deque[int] = deque(maxlen=KEPT)
    seconds = 0.0
    runtime.forwarded = 0
    skipped = getattr(adapter, "skipped", 0)
    whole = wrapped or adapter
    for images, labels in target_stream(suite, cell.domain, cell.seed):
        start = time.perf_counter()
        logits = whole.predict(images)
        seconds += time.perf_counter() - start
        after(images)
        predicted = labels_of(to_numpy(logits), (len(labels), runtime.classes), cell.method)
        kept.extend(predicted.tolist())
        wrong.append(int(np.count_nonzero(predicted != labels)))
        sizes.append(len(labels))
        if suite.first and sum(sizes) >= suite.first:
            break
    samples, turns = sum(sizes), by_pass(wrong, sizes, suite.samples)
    wrong, sizes = in_portions(wrong, sizes)
    record: dict[str, Any] = {
        "expert": cell.expert,
        "domain": cell.domain,
        "seed": cell.seed,
        "error": 100 * sum(wrong) / samples,
        "samples": samples,
        "seconds": seconds,
        "family": runtime.family,
        "severity": suite.severity,
        "data": source_of(suite).description,
        "batch_size": suite.batch_size,
        "order": suite.order,
        "passes": turns,
        "visit": None if cell.before is None else len(cell.before) + 1,
        "forwards": runtime.forwarded / samples,
        "backprop": find_method(suite.methods[cell.method].adapter).backprop,
        "wrong": wrong,
        "sizes": sizes,
        "predicted": list(kept),
        "skipped": getattr(adapter, "skipped", 0) - skipped,
        "settings": suite.methods[cell.method].model_dump(),
        "suite": suite.name,
        "method": cell.method,
    }
    bundle = getattr(adapter, "bundle", None)
    if isinstance(bundle, Bundle):
        record["dimension"] = bundle.dimension
        record["ranks"] = {name: len(w) if name in bundle.moving else 0 for name, w in bundle.coefficients.items()}
    return record


def labels_of(logits: NDArray[Any], shape: tuple[int, int], method: str) -> NDArray[Any]:
    """What is predicted; −1, which is always wrong, where logits are no numbers."""
    if logits.shape != shape:
        raise MergettaError(f"{method} must give a logit per image and class, {shape}, not {logits.shape}.")
    return np.where(np.isnan(logits).any(axis=1), -1, logits.argmax(axis=1))


def by_pass(wrong: Sequence[int], sizes: Sequence[int], samples: int) -> list[float]:
    """Error in each pass over so many images, in percent.

    >>> by_pass([1, 0, 3, 2], [4, 2, 4, 2], samples=6)
    [16.666666666666668, 83.33333333333333]
    """
    turns = (np.cumsum(sizes) - 1) // samples
    return (100 * np.bincount(turns, wrong) / np.bincount(turns, sizes)).tolist()


def in_portions(wrong: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Errors and images per batch, consecutive batches counted together until they have `PORTION` images: a record of
    single images is not longer than one of batches. The last portion may be smaller.

    >>> in_portions([1, 0, 1, 1], [16, 16, 16, 16])
    ([1, 2], [32, 32])
    """
    portions: list[tuple[int, int]] = []
    for errors, images in zip(wrong, sizes, strict=True):
        if portions and portions[-1][1] < PORTION:
            portions[-1] = portions[-1][0] + errors, portions[-1][1] + images
        else:
            portions.append((errors, images))
    return [errors for errors, _ in portions], [images for _, images in portions]
