"""What survives a power cut: the state of the adapter, and how far the predictions have got."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.files import decode, encode, expect, read_bytes, write_atomically

FORMAT, VERSION = "mergetta.state", 2
ANEW = "delete it to start anew"


def save_state(path: Path, state: dict[str, Any], family: str, bundle: str, position: int, written: int) -> None:
    """`position`: items of the stream consumed; `written`: bytes of the prediction file that belong to them."""
    tensors = {name: np.asarray(value) for name, value in state.items() if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in state.items() if not isinstance(value, np.ndarray)}
    header = {"family": family, "bundle": bundle, "position": position, "written": written, "numbers": numbers}
    write_atomically(path, encode(tensors, FORMAT, VERSION, header))


def bundle_of(path: Path) -> str | None:
    """The id (sha256) of the bundle that a state belongs to, or None where there is no state yet."""
    if not path.exists():
        return None
    _, header = decode(read_bytes(path), FORMAT, VERSION, str(path), ANEW)
    bundle: str = expect(header, "bundle", str, str(path))
    return bundle


def load_state(path: Path, family: str, bundle: str) -> tuple[dict[str, Any], int, int] | None:
    """(state, position, written), or None where there is no state yet."""
    if not path.exists():
        return None
    source = str(path)
    tensors, header = decode(read_bytes(path), FORMAT, VERSION, source, ANEW)
    for name, expected in (("family", family), ("bundle", bundle)):
        if expect(header, name, str, source) != expected:
            what = "another family" if name == "family" else "another bundle"
            raise MergettaError(f"{source} belongs to {what}: delete it to start anew, or give its own.")
    position, written = (expect(header, name, int, source) for name in ("position", "written"))
    if position < 0 or written < 0:
        raise MergettaError(f"{source} is damaged: its counters are negative.")
    return {**expect(header, "numbers", dict, source), **tensors}, position, written
