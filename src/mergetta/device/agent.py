"""The loop: take a batch, predict (and adapt), write the predictions, save the state; survive anything in between."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from mergetta.adapters.base import Adapter, part
from mergetta.arrays import Array
from mergetta.data.streams import as_input
from mergetta.device.state import load_state, save_state
from mergetta.device.stream import Item
from mergetta.errors import MergettaError
from mergetta.files import make_durable
from mergetta.losses.information import entropy_of
from mergetta.losses.probabilities import softmax
from mergetta.streams.state import Field, checked

if TYPE_CHECKING:
    from mergetta.device.hub_link import HubLink

COUNTS = ("bad", "batches", "images", "passes")
COLUMNS = ("index", "name", "label", "class", "confidence", "error")


@dataclass
class Summary:
    """What a run has done, for people and programs."""

    images: int = 0
    bad: int = 0
    batches: int = 0
    steps: int = 0
    shifts: int = 0
    fallbacks: int = 0
    forwards: float = 0.0
    state: str = ""
    entropy: float = 0.0
    bundle: str = ""
    normalises: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)


class Agent:
    """Predictions are on disk before the state that counts them, so a crash repeats at most the current batch.

    After a restart the prediction file is cut back to what the state knows of, and the stream goes on from there: no
    step is lost and none is taken twice.

    With a link to a hub (already started: the adapter has its bundle), a newer bundle is taken between batches. It is
    on disk before the state that refers to it, and the old one until then, so a crash never leaves a state without
    its bundle. Every `report_every` batches, and at the end, a report is left with the link.
    """

    def __init__(
        self,
        adapter: Adapter,
        bundle: str,
        classes: list[str],
        out: Path,
        state: Path | None = None,
        link: HubLink | None = None,
        report_every: int = 10,
    ) -> None:
        """`bundle` is the digest of what the adapter works on: a state belongs to it."""
        if report_every < 1:
            raise MergettaError(f"report_every must be at least 1, not {report_every}.")
        self.adapter = adapter
        self.classes = classes
        self.out, self.state = out, state
        self.family = adapter.runtime.family
        self.link, self.report_every = link, report_every
        self.bundle = bundle
        self._kept = ""  # the bundle that the link was told to keep
        self._unreported = 0  # batches since the last report
        self.position = 0
        self.bad = self.batches = self.images = self.passes = 0
        self.entropy = 0.0
        self.summary = Summary()
        self._file = self._resume()

    def _resume(self) -> BinaryIO:
        saved = load_state(self.state, self.family, self.bundle) if self.state else None
        written = 0
        if saved is not None:
            state, self.position, written = saved
            found = checked(state, {name: Field(low=0, whole=True) for name in COUNTS}, "run.")
            self.adapter.load_state_dict(part(state, "adapter/"))
            for name in COUNTS:
                setattr(self, name, int(found[name]))
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
        self._take_newer()
        good = [item for item in batch if item.image is not None]
        rows: dict[int, dict[str, Any]] = {
            item.number: {"index": item.number, "name": item.name, "error": item.problem} for item in batch
        }
        if good:
            probabilities = self._predict(as_input(np.stack([item.image for item in good if item.image is not None])))
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
            state = {f"adapter/{name}": value for name, value in self.adapter.state_dict().items()}
            state |= {f"run.{name}": getattr(self, name) for name in COUNTS}
            save_state(self.state, state, self.family, self.bundle, self.position, self._file.tell())
        self._summarise()
        if self.link:
            self._tell(self.link)
        return self.summary

    def _predict(self, images: Array) -> np.ndarray:
        before = self.adapter.runtime.forwarded
        probabilities = softmax(np.asarray(self.adapter.predict(images)))
        self.batches += 1
        self.images += len(images)
        self.passes += self.adapter.runtime.forwarded - before
        self.entropy = float(np.mean(entropy_of(probabilities)))
        return np.asarray(probabilities)

    def _take_newer(self) -> None:
        newer = self.link.newer() if self.link else None
        if self.link is None or newer is None:
            return
        bundle, id = newer
        try:
            self.adapter.swap(bundle)
        except MergettaError as error:
            self.link.refuse(error)
            return
        self.bundle = id

    def _tell(self, link: HubLink) -> None:
        """After the state was saved: which bundle is needed, and from time to time how it goes."""
        if self._kept != self.bundle:
            if self.state:
                make_durable(self.state.parent)
            link.keep(self.bundle)
            self._kept = self.bundle
        self._unreported += 1
        if self._unreported >= self.report_every:
            self._report(link)

    def _report(self, link: HubLink) -> None:
        """Counts and norms; never an image, nor what was predicted for one."""
        status, summary = self.adapter.status(), dataclasses.asdict(self.summary)
        del summary["normalises"]  # for people beside the device
        summary["entropy"] = finite(self.entropy)
        summary["loss"] = None if status.loss is None else finite(status.loss)
        summary["moved"] = None if status.moved is None else finite(status.moved)
        summary["refused"] = link.refused
        link.report(summary)
        self._unreported = 0

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

    def _summarise(self) -> None:
        status = self.adapter.status()
        self.summary = Summary(
            images=self.position - self.bad,
            bad=self.bad,
            batches=self.batches,
            steps=status.steps,
            shifts=status.shifts,
            fallbacks=status.fallbacks,
            forwards=self.passes / max(1, self.images),
            state=status.phase,
            entropy=self.entropy,
            bundle=self.bundle,
            normalises=status.normalises,
            weights=status.weights,
        )

    def run(self, batches: Iterator[list[Item]]) -> Iterator[Summary]:
        """A summary after each batch."""
        try:
            for batch in batches:
                yield self.step(batch)
            if self.link and self._unreported:
                self._report(self.link)
        finally:
            self._file.close()


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None
