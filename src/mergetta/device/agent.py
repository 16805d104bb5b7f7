"""The loop: take a batch, predict (and adapt), write the predictions, save the state; survive anything in between."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array
from mergetta.bundle import Bundle
from mergetta.data.streams import as_input
from mergetta.device.predictions import STANDARD_OUTPUT, Predictions
from mergetta.device.state import Progress, Saved, load_state, save_state
from mergetta.device.stream import Item
from mergetta.errors import MergettaError
from mergetta.files import make_durable
from mergetta.losses.information import entropy_of
from mergetta.losses.probabilities import softmax

if TYPE_CHECKING:
    from mergetta.device.hub_link import HubLink

SAVE_EVERY = 10.0
"""Seconds between two saves where no rows are written that a state must agree with."""
SYNC_EVERY = 1.0
"""Seconds between two saves where rows are written: as much is predicted again after a crash."""


@dataclass
class Summary:
    """What has been done for a file of predictions, for people and programs."""

    images: int = 0
    bad: int = 0
    batches: int = 0
    steps: int = 0
    shifts: int = 0
    fallbacks: int = 0
    forwards: float = 0.0
    milliseconds: float = field(default=0.0, compare=False)
    """Per image, from when it is at hand to when its row and the state are written, since this start."""
    state: str = ""
    entropy: float = 0.0
    bundle: str = ""
    generation: int = 0
    """Of the bundle, as its hub counts them; 0 if it comes from no hub."""
    normalises: str = ""
    runs: float | None = None
    """How likely classes come in runs."""
    weights: Mapping[str, float] = field(default_factory=dict)


class Agent:
    """Predictions are on disk before the state that counts them, so a crash repeats at most the last second.

    The state has what was learnt, which serves any stream, and how far each file of predictions has got. After a
    restart such a file is cut back to what the state knows of, and the stream goes on from there: no step is lost and
    none is taken twice. A file that is gone is begun anew, with what was learnt. Rows are handed to the system batch by
    batch. Both files are brought to the disk together: once a second (every ten seconds where no rows are written that
    a state must agree with), when the stream pauses, with a change of bundle, and at the end.

    With a link to a hub (already started: the adapter has its bundle), a newer bundle is taken between batches. It is
    on disk before the state that refers to it, and the old one until then, so a crash never leaves a state without
    its bundle. Every `report_every` batches, and at the end, a report is left with the link.
    """

    def __init__(
        self,
        adapter: Adapter,
        bundle: str,
        classes: list[str],
        out: Path | None = None,
        state: Path | None = None,
        link: HubLink | None = None,
        report_every: int = 10,
        generation: int = 0,
    ) -> None:
        """`bundle` is the digest of what the adapter works on: a state belongs to it. Without `out` no rows are
        written; `-` is standard output, of which a state remembers nothing.
        """
        if report_every < 1:
            raise MergettaError(f"report_every must be at least 1, not {report_every}.")
        self.adapter = adapter
        self.classes = classes
        self.state = state
        self.family = adapter.runtime.family
        self.link, self.report_every = link, report_every
        self.bundle, self.generation = bundle, generation
        self._kept = ""  # the bundle that the link was told to keep
        self._unreported = 0  # batches since the last report
        self._known: dict[str, Progress] = {}  # of all files of predictions
        self.progress = self._resume(out)
        self.predictions = Predictions(out, self.progress.written) if out else None
        self.entropy = 0.0
        self._seconds, self._timed = 0.0, 0  # of images since this start
        self._saved = time.monotonic()
        self._unsaved = False  # whether whole batches have come since

    def _resume(self, out: Path | None) -> Progress:
        saved = load_state(self.state, self.family, self.bundle) if self.state else None
        if saved:
            self.adapter.load_state_dict(saved.learnt)
            self._known = saved.progress
        if self.state is None or out is None or out == STANDARD_OUTPUT:
            return Progress()
        name = seen_from(self.state.parent, out)
        if not out.exists():
            self._known[name] = Progress()
        elif saved and name not in self._known:
            raise MergettaError(f"{out} was not written with {self.state}: delete it, or write to another file.")
        progress = self._known.setdefault(name, Progress())
        if out.exists() and out.stat().st_size < progress.written:
            raise MergettaError(f"{out} is shorter than {self.state} knows: delete it to predict all of it anew.")
        return progress

    @property
    def position(self) -> int:
        """How many rows there are."""
        return self.progress.images + self.progress.bad

    def step(self, batch: list[Item]) -> Summary:
        """One batch: predict, write, and save if it is time."""
        began, first = time.perf_counter(), self.position
        if not first:
            self._save()  # a file of predictions is known to be this state's before it has a row
        good = [item.image for item in batch if item.image is not None]
        found = iter(self.predict(as_input(np.stack(good)))) if good else iter(())
        rows = []
        for index, item in enumerate(batch, first):
            row: dict[str, Any] = {"index": index, "name": item.name or str(index)}
            if item.content:
                row["content"] = item.content
            rows.append(row | ({"error": item.problem} if item.image is None else self._named(next(found))))
        self._write(rows)
        self.progress.bad += len(batch) - len(good)
        self.finish(began, len(good))
        return self.summary()

    def predict(self, images: Array) -> NDArray[np.float32]:
        """Probabilities of a batch, with the newest bundle that there is."""
        self._unsaved = False  # until `finish`: what is half done is not saved
        self._take_newer()
        before = self.adapter.runtime.forwarded
        probabilities = softmax(np.asarray(self.adapter.predict(images)))
        self.progress.batches += 1
        self.progress.images += len(images)
        self.progress.passes += self.adapter.runtime.forwarded - before
        self.entropy = float(np.mean(entropy_of(probabilities)))
        return np.asarray(probabilities)

    def finish(self, began: float, images: int) -> None:
        """After a batch of so many good images, which was at hand at `began`: save if it is time, and tell the hub."""
        self._unsaved = True
        swapped = self.link is not None and self._kept != self.bundle
        if swapped or time.monotonic() - self._saved >= (SYNC_EVERY if self.predictions else SAVE_EVERY):
            self._save()
        self._seconds += time.perf_counter() - began
        self._timed += images
        if self.link:
            self._tell(self.link)

    def _named(self, probabilities: NDArray[np.float32]) -> dict[str, Any]:
        label = int(np.argmax(probabilities))
        return {"label": label, "class": self.classes[label], "confidence": round(float(probabilities[label]), 6)}

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
        self.bundle, self.generation = id, generation_of(bundle)

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
        status, report = self.adapter.status(), dataclasses.asdict(self.summary())
        for name in ("normalises", "milliseconds", "generation", "runs"):  # for people beside the device
            del report[name]
        report["entropy"] = finite(self.entropy)
        report["loss"] = None if status.loss is None else finite(status.loss)
        report["moved"] = None if status.moved is None else finite(status.moved)
        report["refused"] = link.refused
        link.report(report)
        self._unreported = 0

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        if self.predictions:
            self.predictions.write(rows)
            self.progress.written = self.predictions.written

    def save(self) -> None:
        """Bring to the disk what whole batches have brought since the last time."""
        if self._unsaved:
            self._save()

    def _save(self) -> None:
        if self.predictions:
            self.predictions.sync()
        if self.state:
            save_state(self.state, Saved(self.adapter.state_dict(), self._known), self.family, self.bundle)
        self._saved, self._unsaved = time.monotonic(), False

    def summary(self) -> Summary:
        status, progress = self.adapter.status(), self.progress
        return Summary(
            images=progress.images,
            bad=progress.bad,
            batches=progress.batches,
            steps=status.steps,
            shifts=status.shifts,
            fallbacks=status.fallbacks,
            forwards=progress.passes / max(1, progress.images),
            milliseconds=1000 * self._seconds / max(1, self._timed),
            state=status.phase,
            entropy=self.entropy,
            bundle=self.bundle,
            generation=self.generation,
            normalises=status.normalises,
            runs=status.runs,
            weights=status.weights,
        )

    def run(self, batches: Iterable[list[Item]]) -> Iterator[Summary]:
        """A summary after each batch."""
        try:
            for batch in batches:
                yield self.step(batch)
        finally:
            self.close()

    def close(self) -> None:
        """Save what was learnt since the last time, leave a last report, and close the file."""
        self.save()
        if self.link and self._unreported:
            self._report(self.link)
        if self.predictions:
            self.predictions.close()


def generation_of(bundle: Bundle) -> int:
    """Which of a hub's bundles it is, as the hub counts them; 0 if it comes from no hub."""
    found = bundle.settings.get("generation")
    return found if isinstance(found, int) else 0


def seen_from(folder: Path, file: Path) -> str:
    """A path that stays the same where both are moved together."""
    try:
        return Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()
    except ValueError:  # on another drive of Windows
        return file.resolve().as_posix()


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None
