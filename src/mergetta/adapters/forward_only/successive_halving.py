"""Which of several candidates is best: all are tried on some images, the better half on others, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.streams.state import Field, checked


class SuccessiveHalving:
    """Each rung shows its candidates the same images, and the better half of them is the next rung.

    Scores are means over the rungs, and chance makes them differ by less the more rungs there are: so both the
    handicap (what is taken off a score) and the temperature of their softmax shrink, with the square root.

    Parameters
    ----------
    handicap
        One per candidate.
    temperature
        Of the softmax that turns scores into weights.
    rungs
        At most so many; None: until two are left.

    References
    ----------
    Jamieson and Talwalkar 2016, Non-stochastic best arm identification and hyperparameter optimization.

    >>> search = SuccessiveHalving(np.zeros(2), temperature=0.01)
    >>> search.enter(1.0), search.enter(1.5)
    (None, None)
    >>> search.over, search.weights.round(2).tolist()
    (True, [0.0, 1.0])
    """

    def __init__(self, handicap: Vector, temperature: float, rungs: int | None = None) -> None:
        self.handicap, self.temperature, self.most = handicap, temperature, rungs
        self.rung = np.arange(len(handicap))
        """Who is shown the images of this rung, in this order."""
        self.shown = 0
        """How many of them have been."""
        self.rungs = 0
        """How many are complete."""
        self.sums = np.zeros(len(handicap))
        """Of each candidate's scores."""
        self.weights = np.eye(len(handicap))[0]
        """Softmax of the scores in the last complete rung; in the first one, of those shown so far."""

    @property
    def over(self) -> bool:
        return not len(self.rung)

    @property
    def next(self) -> int:
        """The candidate whose turn it is."""
        return int(self.rung[self.shown])

    def enter(self, score: float) -> None:
        """What the next candidate has scored."""
        self.sums[self.next] += score
        self.shown += 1
        complete = self.shown == len(self.rung)
        if not complete and self.rungs:
            return
        seen = self.rung[: self.shown]
        exponents = self.exponents(seen)
        self.weights = np.zeros(len(self.handicap))
        self.weights[seen] = soften(exponents)
        if complete:
            self.rungs, self.shown = self.rungs + 1, 0
            ranked = seen[np.argsort(-exponents, kind="stable")]
            last = len(seen) <= 2 or self.rungs == self.most
            self.rung = ranked[: 0 if last else (len(seen) + 1) // 2]

    def exponents(self, seen: np.ndarray) -> Vector:
        root = np.sqrt(self.rungs + 1)
        return np.asarray((self.sums[seen] / root - self.handicap[seen]) / self.temperature)

    def state(self, prefix: str) -> dict[str, Any]:
        arrays = {key: getattr(self, key).copy() for key in ("rung", "sums", "weights")}
        return {f"{prefix}{key}": value for key, value in (arrays | {"shown": self.shown, "rungs": self.rungs}).items()}

    def restore(self, state: Mapping[str, Any], prefix: str) -> None:
        """Go on from a state of a search among as many candidates, or say in one sentence that it does not fit."""
        count = len(self.handicap)
        fields = {
            "rung": Field((None,), low=0, high=count - 1, whole=True),
            "sums": Field((count,)),
            "weights": Field((count,), low=0),
            "shown": Field(low=0, whole=True),
            "rungs": Field(low=0, high=count, whole=True),
        }
        found = checked(state, fields, prefix)
        rung, shown = found["rung"], int(found["shown"])
        fits = (
            np.isclose(found["weights"].sum(), 1)
            and len(np.unique(rung)) == len(rung)
            and (shown < len(rung) or not shown)
            and (found["rungs"] > 0 or len(rung) in (0, count))
        )
        if not fits:
            raise MergettaError(f"This state does not fit the adapter: {prefix}rung.")
        self.rung, self.sums, self.weights = rung, found["sums"], found["weights"]
        self.shown, self.rungs = shown, int(found["rungs"])


def soften(exponents: Vector) -> Vector:
    exponents = np.nan_to_num(exponents, nan=-np.inf)
    weights = np.exp(exponents - exponents.max()) if np.isfinite(exponents.max()) else np.ones(len(exponents))
    return np.asarray(weights / weights.sum())
