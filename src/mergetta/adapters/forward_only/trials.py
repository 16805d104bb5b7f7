"""The images of a stream that candidates are compared on, shown to them a few per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.losses.information import entropy_of
from mergetta.streams.classes import mixed
from mergetta.streams.domain import predicted
from mergetta.streams.state import Field, checked

TOGETHER = 8
"""Images that a candidate is shown in one pass, at least: single frames would cost a merge and a pass each."""
BROKEN = 1e6
"""Mean entropy of a candidate whose predictions are no numbers: it gets no weight."""
IMAGES = Field((None, None, None, None), low=-1e6, high=1e6)


class Trials:
    """Holds images back until there are enough that look mixed; then shows them to one candidate after the other.

    Classes that come one by one would mislead: a candidate that is varied over them would be wrong. So images that do
    not look mixed are let go, and others are held back.

    Parameters
    ----------
    size
        How many images a candidate is shown.
    least
        How mixed their predicted classes must look (`streams.classes.mixed`).
    eager
        Whether the first half of the candidates is shown up to eight images for each of the stream; the others have one
        for each.
    """

    def __init__(self, size: int, least: float, classes: int, eager: bool = False) -> None:
        self.size, self.least, self.classes, self.eager = size, least, classes, eager
        self.held: NDArray[np.float32] | None = None
        self._room: NDArray[np.float32] = np.empty(0, np.float32)
        self.labels: NDArray[Any] = np.zeros(classes)
        """How often each class was predicted for those that are held."""
        self.count = 0
        """How many trials are over."""
        self.shown = 0
        """How many of the images the next candidate has been shown so far."""
        self.owed = 0
        """How many it may be shown by now."""
        self.tally = np.zeros(1 + classes)
        """Its sum of entropies, then of predictions: what its score, the information, is made of."""

    @property
    def begun(self) -> bool:
        return bool(self.count or self.shown)

    def hold(self, images: NDArray[Any], probabilities: NDArray[Any]) -> None:
        """Keep images until there are enough."""
        if self.held is not None and len(self.held) == self.size:
            return
        same = self.held is not None and self.held.shape[1:] == images.shape[1:]
        kept = self.held if same and self.held is not None else images[:0]
        new = images[: self.size - len(kept)]
        if kept.base is not self._room:  # else there is room behind those that are held: frame by frame none is copied
            self._room = np.empty((self.size, *images.shape[1:]), np.float32)
            self._room[: len(kept)] = kept
        self._room[len(kept) : len(kept) + len(new)] = new
        self.held = self._room[: len(kept) + len(new)]
        self.labels = (self.labels if same else 0) + predicted(probabilities[: len(new)])
        if len(self.held) == self.size and mixed(self.labels) < self.least:
            self.held = None

    def show(self, images: int, candidates: int, predict: Callable[[NDArray[Any], int], NDArray[Any]]) -> list[float]:
        """Show the candidates whose turn it is as many of the held images as the stream has had, not one by one.

        Gives the scores of those that have now seen them all.
        """
        scores: list[float] = []
        if self.held is None or len(self.held) < self.size or self.count >= candidates:
            return scores
        at_once = (candidates // 2 - self.count) * self.size - self.shown
        self.owed += max(images, min(TOGETHER * images, at_once)) if self.eager else images
        while self.count < candidates and self.owed >= min(TOGETHER, self.size - self.shown):
            part = self.held[self.shown : self.shown + self.owed]
            p = predict(part, self.count)
            self.owed -= len(part)
            self.shown += len(part)
            entropies = entropy_of(p).sum() if np.isfinite(p).all() else BROKEN * self.size
            self.tally = self.tally + np.append(entropies, np.nan_to_num(p).sum(axis=0))
            if self.shown < self.size:
                continue
            entropy = min(self.tally[0] / self.size, BROKEN)  # in however many parts it was broken
            scores.append(float(entropy_of(self.tally[1:] / self.size) - entropy))
            self.count, self.shown, self.tally = self.count + 1, 0, np.zeros_like(self.tally)
        if self.count == candidates:
            self.held, self.owed = None, 0  # nobody's images are kept longer than needed
        return scores

    def state(self, prefix: str) -> dict[str, Any]:
        held = {} if self.held is None else {f"{prefix}held": packed(self.held)}
        return {
            f"{prefix}count": self.count,
            f"{prefix}shown": self.shown,
            f"{prefix}owed": self.owed,
            f"{prefix}labels": self.labels.copy(),
            f"{prefix}tally": self.tally.copy(),
            **held,
        }

    def restored(self, state: Mapping[str, Any], prefix: str) -> Trials:
        """Trials that go on from a state, or one sentence."""
        fields = {
            "count": Field(low=0, whole=True),
            "shown": Field(low=0, whole=True),
            "owed": Field(low=0, high=TOGETHER, whole=True),
            "labels": Field(self.labels.shape, low=0),
            "tally": Field(self.tally.shape, low=0, high=BROKEN * self.size**2),
        }
        if f"{prefix}held" in state:
            fields["held"] = IMAGES
        found = checked(state, fields, prefix)
        held = found.get("held", np.zeros(1))
        too_much = found["tally"][1:].sum() > found["shown"] + 1e-3  # predictions of an image are one in sum
        if too_much or found["shown"] >= self.size or not held.size or len(held) > self.size:
            raise MergettaError(f"This state does not fit the adapter: {prefix}held.")
        new = Trials(self.size, self.least, self.classes, self.eager)
        new.count, new.shown, new.owed = (int(found[name]) for name in ("count", "shown", "owed"))
        new.labels, new.tally = found["labels"], found["tally"]
        if f"{prefix}held" in state:
            new.held = unpacked(state[f"{prefix}held"])
        return new


def packed(images: NDArray[np.float32]) -> NDArray[Any]:
    """Images as bytes where nothing is lost, which is a quarter."""
    pixels = np.rint(np.clip(images, 0, 1) * 255).astype(np.uint8)
    return pixels if np.array_equal(pixels / np.float32(255), images) else images.copy()


def unpacked(stored: Any) -> NDArray[np.float32]:
    pixels = np.asarray(stored)
    return (pixels / np.float32(255) if pixels.dtype == np.uint8 else pixels).astype(np.float32)
