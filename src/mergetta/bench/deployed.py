"""A plain export as anyone would deploy it: what `cost` compares with. Its process imports nothing of ours.

It is run as a file, `python deployed.py FOLDER THREADS`, because `python -m` would import the package around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BATCHES = 3
"""That are predicted before memory is measured."""


def deployed(folder: str, threads: int) -> Callable[[np.ndarray], Any]:
    """A session over `deployed.onnx`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(f"{folder}/deployed.onnx", options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})


def stream(images: np.ndarray, start: int, count: int) -> Iterator[np.ndarray]:
    """Batches of a stream whose images differ: rows of pixels move on, and the first pixel is of any grey (`Mixed`)."""
    for index in range(start, start + count):
        batch = np.roll(images, index, axis=2)
        batch[:, 0, 0, 0] = (np.arange(len(images)) + index * len(images)) * 7919 % 256 / np.float32(255)
        yield batch


def of_process(field: str, process: int | str = "self") -> float:
    """`VmRSS` (now) or `VmHWM` (at most so far), in megabytes."""
    with open(f"/proc/{process}/status") as lines:  # noqa: PTH123 (pathlib would be half a megabyte)
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main() -> None:
    """In a fresh process: print its peak resident memory in megabytes."""
    folder, threads = sys.argv[1:]
    predict = deployed(folder, int(threads))
    for batch in stream(np.load(f"{folder}/images.npy"), 0, BATCHES):
        predict(batch)
    if "mergetta" in sys.modules:
        raise RuntimeError("the plain process imported what nobody else would have")
    print(of_process("VmHWM"))  # not ru_maxrss, which a child inherits from the process that started it


if __name__ == "__main__":
    main()
