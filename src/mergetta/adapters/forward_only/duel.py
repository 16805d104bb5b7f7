"""Who is better on images of the stream, a point that steps have led to or the best one so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import part
from mergetta.adapters.forward_only.trials import BROKEN
from mergetta.groups import Vector
from mergetta.losses.information import entropy_of
from mergetta.losses.probabilities import softmax
from mergetta.streams.domain import DomainMoments
from mergetta.streams.state import Field, checked


class Duel:
    """Both are shown the same sets of images; the score is that of the race, information.

    Parameters
    ----------
    start
        The best point so far, to begin with.
    classes
        How many the model tells apart.
    farthest
        No coordinate of a point is larger.
    """

    def __init__(self, start: Vector, classes: int, farthest: float) -> None:
        self.best, self.classes, self.farthest = start, classes, farthest
        self.moments: dict[str, Any] = {}
        """Those of the best point."""
        self.lost = 0
        """By newcomers, in all."""
        self.tally = np.zeros((2, 1 + classes))
        """Of the newcomer and of the best one: sums of entropies and of predictions."""

    def show(self, point: Vector, logits: Callable[[Vector], NDArray[Any]]) -> None:
        """A set of images, whose logits at a point are these."""
        for row, each in enumerate((point, self.best)):
            p = softmax(logits(each).astype(np.float64))
            entropies = entropy_of(p).sum() if np.isfinite(p).all() else BROKEN * len(p)
            self.tally[row] += np.append(entropies, np.nan_to_num(p, nan=1 / self.classes).sum(axis=0))

    def won(self, point: Vector, gain: float, moments: DomainMoments | None) -> bool:
        """Whether the newcomer has gained enough to be the best from now on, with its moments."""
        here, best = (entropy_of(row[1:] / row[1:].sum()) - row[0] / row[1:].sum() for row in self.tally)
        self.tally = np.zeros_like(self.tally)
        if here > best + gain:
            self.best, self.moments = point, {} if moments is None else moments.state()
            return True
        self.lost += 1
        return False

    def state(self, prefix: str, over: bool) -> dict[str, Any]:
        """When it is `over`, nobody goes back, and moments need not be kept."""
        own = {f"{prefix}best": self.best.copy(), f"{prefix}tally": self.tally.copy(), f"{prefix}lost": self.lost}
        return {**own, **({} if over else {f"{prefix}kept.{name}": value for name, value in self.moments.items()})}

    def restored(self, state: Mapping[str, Any], prefix: str) -> Duel:
        """One that goes on from a state, or one sentence."""
        fields = {
            "best": Field(self.best.shape, low=-self.farthest, high=self.farthest),
            "tally": Field(self.tally.shape, low=0),
            "lost": Field(low=0, whole=True),
        }
        found = checked(state, fields, prefix)
        new = Duel(found["best"], self.classes, self.farthest)
        new.tally, new.lost, new.moments = found["tally"], int(found["lost"]), part(state, f"{prefix}kept.")
        return new
