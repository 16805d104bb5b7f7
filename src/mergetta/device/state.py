"""What survives a power cut: what the adapter has learnt, and how far each file of predictions has got."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.files import decode, encode, expect, read_bytes, write_atomically
from mergetta.streams.state import Field, checked

FORMAT, VERSION = "mergetta.state", 4
ANEW = "delete it to start anew"


@dataclass
class Progress:
    """Of one file of predictions."""

    written: int = 0
    """Bytes; what stands behind them was not finished."""
    images: int = 0
    """With a prediction."""
    bad: int = 0
    batches: int = 0
    passes: int = 0
    """Images that went through a forward pass, each as often as it did."""


PROGRESS = {field.name: Field(low=0, whole=True) for field in dataclasses.fields(Progress)}


@dataclass
class Saved:
    """One moment of a device."""

    learnt: Mapping[str, Any]
    """The adapter's state; it serves any stream."""
    progress: dict[str, Progress]
    """By file of predictions, its path as seen from the state's folder."""


def save_state(path: Path, saved: Saved, family: str, bundle: str) -> None:
    tensors = {name: value for name, value in saved.learnt.items() if isinstance(value, np.ndarray)}
    numbers = {name: value for name, value in saved.learnt.items() if not isinstance(value, np.ndarray)}
    progress = {name: dataclasses.asdict(each) for name, each in saved.progress.items()}
    header = {"family": family, "bundle": bundle, "progress": progress, "numbers": numbers}
    write_atomically(path, encode(tensors, FORMAT, VERSION, header))


def bundle_of(path: Path) -> str | None:
    """The id (sha256) of the bundle that a state belongs to, or None where there is no state yet."""
    if not path.exists():
        return None
    _, header = decode(read_bytes(path), FORMAT, VERSION, str(path), ANEW)
    bundle: str = expect(header, "bundle", str, str(path))
    return bundle


def load_state(path: Path, family: str, bundle: str) -> Saved | None:
    """None where there is no state yet."""
    if not path.exists():
        return None
    source = str(path)
    tensors, header = decode(read_bytes(path), FORMAT, VERSION, source, ANEW)
    for name, expected in (("family", family), ("bundle", bundle)):
        if expect(header, name, str, source) != expected:
            what = "another family" if name == "family" else "another bundle"
            raise MergettaError(f"{source} belongs to {what}: delete it to start anew, or give its own.")
    progress = {}
    for name, counts in expect(header, "progress", dict, source).items():
        if not isinstance(counts, dict):
            raise MergettaError(f"{source} is damaged: {name!r} has no counters.")
        progress[name] = Progress(**{key: int(value) for key, value in checked(counts, PROGRESS).items()})
    return Saved({**expect(header, "numbers", dict, source), **tensors}, progress)
