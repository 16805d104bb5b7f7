"""The loop: take a batch, predict (and adapt), write the predictions, save the state; survive anything in between."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mergetta.data.streams import as_input
from mergetta.device.governor import Governor
from mergetta.device.state import load_state, save_state
from mergetta.device.stream import Item
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import softmax

COLUMNS = ("index", "name", "label", "class", "confidence", "error")


@dataclass
class Summary:
    """What a run has done, for people and programs."""

    images: int = 0
    bad: int = 0
    batches: int = 0
    steps: int = 0
    shifts: int = 0
    rollbacks: int = 0
    forwards: float = 0.0
    state: str = ""
    entropy: float = 0.0


class Agent:
    """Predictions are on disk before the state that counts them, so a crash repeats at most the current batch.

    After a restart the prediction file is cut back to what the state knows of, and the stream goes on from there: no
    step is lost and none is taken twice.
    """

    def __init__(self, governor: Governor, classes: list[str], out: Path, state: Path | None = None) -> None:
        self.governor = governor
        self.classes = classes
        self.out, self.state = out, state
        adapter = governor.adapter
        self.family = adapter.runtime.family
        self.bundle = hashlib.sha256(adapter.bundle.to_bytes()).hexdigest()[:16]
        self.position = 0
        self.bad = 0
        self.summary = Summary()
        self._file = self._resume()

    def _resume(self) -> BinaryIO:
        saved = load_state(self.state, self.family, self.bundle) if self.state else None
        written = 0
        if saved is not None:
            state, self.position, written = saved
            self.bad = int(state.pop("bad", 0))
            self.governor.load_state_dict(state)
            if not self.out.exists() or self.out.stat().st_size < written:
                raise MergettaError(f"{self.out} is shorter than {self.state} knows: delete the state to start anew.")
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            file = self.out.open("r+b" if saved is not None else "wb")
            file.truncate(written)
            file.seek(written)
        except OSError as error:
            raise MergettaError(f"Cannot write {self.out}: {error.strerror or error}.") from error
        return file

    def step(self, batch: list[Item]) -> Summary:
        """One batch: predict, write, save."""
        good = [item for item in batch if item.image is not None]
        rows: dict[int, dict[str, Any]] = {
            item.number: {"index": item.number, "name": item.name, "error": item.problem} for item in batch
        }
        if good:
            images = as_input(np.stack([item.image for item in good if item.image is not None]))
            probabilities = softmax(np.asarray(self.governor.predict(images)))
            for item, row in zip(good, probabilities, strict=True):
                label = int(np.argmax(row))
                rows[item.number] = {
                    "index": item.number,
                    "name": item.name,
                    "label": label,
                    "class": self.classes[label],
                    "confidence": round(float(row[label]), 6),
                }
        self.bad += len(batch) - len(good)
        self._write(rows.values())
        self.position += len(batch)
        if self.state:
            state = {**self.governor.state_dict(), "bad": self.bad}
            save_state(self.state, state, self.family, self.bundle, self.position, self._file.tell())
        return self._summarise()

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        text = io.StringIO()
        if self.out.suffix == ".csv":
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            if not self._file.tell():
                writer.writeheader()
            writer.writerows(rows)
        else:
            text.writelines(json.dumps(row) + "\n" for row in rows)
        self._file.write(text.getvalue().encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _summarise(self) -> Summary:
        governor = self.governor
        self.summary = Summary(
            images=self.position - self.bad,
            bad=self.bad,
            batches=governor.batches,
            steps=governor.adapter.steps,
            shifts=governor.shifts,
            rollbacks=governor.rollbacks,
            forwards=governor.passes / max(1, governor.images),
            state=governor.state,
            entropy=governor.last_entropy,
        )
        return self.summary

    def run(self, batches: Iterator[list[Item]]) -> Iterator[Summary]:
        """A summary after each batch."""
        try:
            for batch in batches:
                yield self.step(batch)
        finally:
            self._file.close()
