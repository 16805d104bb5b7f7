"""The images of a stream that candidates are compared on, shown to one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.losses.information import information
from mergetta.streams.classes import mixed, predicted
from mergetta.streams.state import Field, checked

AHEAD = 8
"""Images that the source model and half of the others are shown for each of the stream, at most."""
BROKEN = 1e6
"""Mean entropy of a candidate whose predictions are no numbers: it gets no weight."""
IMAGES = Field((None, None, None, None), low=-1e6, high=1e6)


class Trials:
    """Holds images back until there are enough that look mixed; then shows them to one candidate after the other.

    Classes that come one by one would mislead: a candidate that is varied over them would be wrong. So images that do
    not look mixed are let go, and others are held back. What predicts may itself be why they do not: poisoned, it piles
    up predictions on few classes, and would never be put to the test. So the source model is asked too.

    Parameters
    ----------
    size
        How many images a candidate is shown.
    least
        How mixed their predicted classes must look (`streams.classes.mixed`).
    eager
        Whether the first candidates (one, and half of the others) are shown up to eight images for each of the stream;
        the others have one for each.
    source
        How mixed they must look to the source model, if it is asked.
    """

    def __init__(self, size: int, least: float, classes: int, eager: bool = False, source: float = 1.0) -> None:
        self.size, self.least, self.classes, self.eager, self.source = size, least, classes, eager, source
        self.held: NDArray[Any] | None = None
        """As bytes if nothing is lost by it."""
        self._room: NDArray[Any] = np.empty(0, np.uint8)
        self.labels: NDArray[Any] = np.zeros(classes)
        """How often each class was predicted for those that are held."""
        self.count = 0
        """How many trials are over."""
        self.owed = 0
        """How many images the next candidate may be shown by now."""

    def again(self) -> Trials:
        """New ones of the same kind, on other images."""
        return Trials(self.size, self.least, self.classes, self.eager, self.source)

    @property
    def begun(self) -> bool:
        return self.count > 0

    @property
    def fair(self) -> bool:
        """Whether those that are held look mixed as they are predicted: then their statistics are the domain's."""
        return mixed(self.labels) >= self.least

    def hold(
        self,
        images: NDArray[Any],
        probabilities: NDArray[Any],
        source: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ) -> None:
        """Keep images until there are enough that look mixed, as they are predicted or to the source model."""
        if self.held is not None and len(self.held) == self.size:
            return
        same = self.held is not None and self.held.shape[1:] == images.shape[1:]
        kept = self.held if same and self.held is not None else images[:0]
        new = packed(np.asarray(images[: self.size - len(kept)], dtype=np.float32))
        both, bytes_do = len(kept) + len(new), new.dtype == np.uint8 and (not len(kept) or kept.dtype == np.uint8)
        dtype = np.uint8 if bytes_do else np.float32
        if kept.base is not self._room or self._room.dtype != dtype:  # else there is room behind those that are held
            self._room = np.empty((self.size, *images.shape[1:]), dtype)
            self._room[: len(kept)] = kept if bytes_do else unpacked(kept)
        self._room[len(kept) : both] = new if bytes_do else unpacked(new)
        self.held = self._room[:both]
        self.labels = (self.labels if same else 0) + predicted(probabilities[: len(new)])
        if both == self.size and not self.fair:
            opinion = np.zeros(self.classes) if source is None else predicted(source(self.held))
            self.held = self.held if mixed(opinion) >= self.source else None

    def show(self, images: int, candidates: int, predict: Callable[[NDArray[Any], int], NDArray[Any]]) -> list[float]:
        """Show the held images to the candidates whose turn it is: to the next one whenever the stream has had as many.

        To show them at once costs one merge, and one set of groups to fold. They are as they are held (`unpacked`).
        Gives the scores.
        """
        scores: list[float] = []
        if self.held is None or len(self.held) < self.size or self.count >= candidates:
            return scores
        at_once = (candidates // 2 + 1 - self.count) * self.size - self.owed
        self.owed += max(images, min(AHEAD * images, at_once)) if self.eager else images
        while self.count < candidates and self.owed >= self.size:
            p = predict(self.held, self.count)
            scores.append(float(information(p)) if np.isfinite(p).all() else -BROKEN)
            self.owed, self.count = self.owed - self.size, self.count + 1
        if self.count == candidates:
            self.held, self.owed = None, 0  # nobody's images are kept longer than needed
        return scores

    def state(self, prefix: str) -> dict[str, Any]:
        held = {} if self.held is None else {f"{prefix}held": self.held.copy()}
        return {
            f"{prefix}count": self.count,
            f"{prefix}owed": self.owed,
            f"{prefix}labels": self.labels.copy(),
            **held,
        }

    def restored(self, state: Mapping[str, Any], prefix: str) -> Trials:
        """Trials that go on from a state, or one sentence."""
        fields = {
            "count": Field(low=0, whole=True),
            "owed": Field(low=0, high=self.size, whole=True),
            "labels": Field(self.labels.shape, low=0),
        }
        if f"{prefix}held" in state:
            fields["held"] = IMAGES
        found = checked(state, fields, prefix)
        held = found.get("held", np.zeros(1))
        if not held.size or len(held) > self.size:
            raise MergettaError(f"This state does not fit the adapter: {prefix}held.")
        new = self.again()
        new.count, new.owed, new.labels = int(found["count"]), int(found["owed"]), found["labels"]
        if f"{prefix}held" in state:
            new.held = packed(unpacked(state[f"{prefix}held"]))
        return new


def packed(images: NDArray[np.float32]) -> NDArray[Any]:
    """Images as bytes where nothing is lost, which is a quarter."""
    pixels = np.rint(np.clip(images, 0, 1) * 255).astype(np.uint8)
    return pixels if np.array_equal(pixels / np.float32(255), images) else images.copy()


def unpacked(stored: Any) -> NDArray[np.float32]:
    pixels = np.asarray(stored)
    return (pixels / np.float32(255) if pixels.dtype == np.uint8 else pixels).astype(np.float32, copy=False)
