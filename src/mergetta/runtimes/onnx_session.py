"""Opens and runs ONNX Runtime sessions; whatever goes wrong is said in one sentence."""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort

from mergetta.errors import MergettaError
from mergetta.files import UNKNOWN, looks_like, read_start
from mergetta.runtimes.base import Output, joined, portion_of


def open_session(
    model: str | Path | bytes,
    source: str,
    threads: int | None,
    providers: Sequence[str],
    initializers: Mapping[str, ort.OrtValue] | None = None,
) -> Any:
    """From a file rather than its bytes where possible: the weights then exist once in memory.

    `initializers` are constants that the file leaves open. The session reads them where they are, so they must live as
    long as it does.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # it saves no time, and has all memory of a batch twice: found out, and planned
    if threads:
        options.intra_op_num_threads = threads
    return_large_blocks()
    available = ort.get_available_providers()
    unknown = set(providers) - set(available)
    if unknown:
        raise MergettaError(f"ONNX Runtime has no provider {min(unknown)!r} here, only {', '.join(available)}.")
    kind = looks_like(model[:16] if isinstance(model, bytes) else read_start(model))
    if initializers:
        options.add_external_initializers(list(initializers), list(initializers.values()))
    try:
        return ort.InferenceSession(
            model if isinstance(model, bytes) else str(model), options, providers=list(providers)
        )
    except Exception as error:
        if kind != UNKNOWN:
            raise MergettaError(f"{source} is not an ONNX model: it is {kind}.") from error
        raise MergettaError(f"{source} is damaged, or not an ONNX model: {' '.join(str(error).split())}") from error


def in_portions(images: np.ndarray, run: Callable[[np.ndarray], Output]) -> Output:
    size = portion_of(images)
    return joined([run(images[start : start + size]) for start in range(0, len(images), size)])


ROOM = 4 * 2**20
"""Bytes of model files whose sessions stay open beside each other: of a small model a few, of a large one only one."""


class Sessions:
    """Sessions over the same weights, of which the last ones that were asked for are open.

    To open one takes as long as 3 to 5 single frames of a large model, and 60 of a very small one. To have another one
    open costs a large model two to three times its file, and a small one next to nothing.
    """

    def __init__(self, model: str | Path | bytes) -> None:
        known = isinstance(model, bytes) or Path(model).is_file()
        size = ROOM if not known else len(model) if isinstance(model, bytes) else Path(model).stat().st_size
        self.most = max(1, min(3, ROOM // max(1, size)))
        self._open: WeakKeyDictionary[object, Any] = WeakKeyDictionary()
        """By who asks, and open no longer than there is somebody to ask; the last one is at the end."""

    def get(self, key: object, create: Callable[[], Any]) -> Any:
        session = self._open.pop(key, None)
        if session is None:
            if len(self._open) >= self.most:  # closed before the next one is opened
                del self._open[next(iter(self._open))]
                give_back()
            session = create()
            give_back()  # what it took to open it: half a millisecond
        self._open[key] = session
        return session


M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 2**19
"""An option of glibc's `mallopt`, and the bytes of a block that it applies to: less than a frame of a large model."""


def return_large_blocks() -> None:
    """From now on, glibc maps every large block by itself, and gives it back once it is freed. Otherwise it learns from
    the first weights that are freed to keep what comes after them, and a session holds twice of what it uses.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # elsewhere there is no such call
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def give_back() -> None:
    """Freed small blocks go back to the system too: the next session asks for blocks of other sizes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def run_session(session: Any, outputs: list[str], feeds: dict[str, np.ndarray], once: bool = False) -> list[np.ndarray]:
    """Copies of outputs: one that is kept would keep all memory of the session that it came from, open or not.

    What a pass takes is kept for the next one, unless there will hardly be one of its size (`once`).
    """
    options = None
    if once and sys.maxsize > 2**32:  # on others ONNX Runtime keeps nothing
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    try:
        return [value.copy() for value in session.run(outputs, feeds, options)]
    except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
        shape = feeds["images"].shape
        raise MergettaError(f"The model cannot take images of shape {shape}: {' '.join(str(error).split())}") from error


def metadata_of(session: Any) -> dict[str, Any]:
    """What `mergetta export` wrote into the model; nothing if it was not that."""
    text = session.get_modelmeta().custom_metadata_map.get("mergetta")
    try:
        header = json.loads(text or "")
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}
