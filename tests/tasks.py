"""Tasks for the tests of executors, which a worker imports quickly: nothing of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from mergetta import MergettaError
from mergetta.files import write_atomically

PATIENCE = 120
"""Seconds after which something that should happen will not."""


def make(name: str, cache: Path) -> None:
    write_atomically(cache / name, b"made")


def copy(source: str, name: str, cache: Path) -> None:
    write_atomically(cache / name, (cache / source).read_bytes())


def stumble(counter: Path, times: int, how: str, name: str, cache: Path) -> None:
    """Fail the first times that it is called; the counter grows by a byte each time."""
    with counter.open("a") as file:
        file.write("x")
    if counter.stat().st_size > times:
        make(name, cache)
    elif how == "die":
        os._exit(7)
    else:
        raise MergettaError("There is no such image.") if how == "refuse" else RuntimeError("out of luck")


def meet(folder: Path, guests: int, name: str, cache: Path) -> None:
    """Wait until so many run at the same time; leave the name of the node."""
    import ray

    (folder / name).touch()
    await_(lambda: len(list(folder.iterdir())) >= guests)
    write_atomically(cache / name, ray.get_runtime_context().get_node_id().encode())


def linger(marker: Path, cache: Path) -> None:
    marker.touch()
    time.sleep(PATIENCE)


def linger_on(node: str, marker: Path, cache: Path) -> None:
    """Linger on that node; elsewhere wait until it lingers there, so that both nodes must take a task."""
    import ray

    if ray.get_runtime_context().get_node_id() == node:
        linger(marker, cache)
    await_(marker.exists)
    make("after", cache)


def await_(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def count_threads(name: str, cache: Path) -> None:
    import cv2
    import numpy as np
    import torch

    before = len(list(Path("/proc/self/task").iterdir()))
    matrix = np.ones((600, 600))
    np.dot(matrix, matrix)
    more = len(list(Path("/proc/self/task").iterdir())) - before
    text = f"torch {torch.get_num_threads()}, OpenCV {cv2.getNumThreads()}, NumPy {more} more"
    write_atomically(cache / name, text.encode())
