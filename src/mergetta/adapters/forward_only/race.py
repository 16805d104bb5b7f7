"""Which of several candidates suits the images best: all are shown some, the better half others, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import entry
from mergetta.errors import MergettaError
from mergetta.groups import Vector

BROKEN = 1e6
"""Mean entropy of a candidate whose predictions are no numbers."""


class Race:
    """Each round shows the candidates of the field the same images, and the better half of them is the next field.

    A candidate's score is the entropy of its mean prediction minus its mean entropy: sure of each image, varied over
    all. Scores are means over the rounds, and chance makes them differ by less the more rounds there are: so both
    the handicap (what is taken off a score) and the temperature of their softmax shrink, with the square root.

    >>> race = Race(np.zeros(2), temperature=0.01)
    >>> race.enter(mean_entropy=2.0, entropy=1.0), race.enter(mean_entropy=2.0, entropy=0.5)
    (None, None)
    >>> race.over, race.standing.round(2).tolist()
    (True, [0.0, 1.0])
    """

    def __init__(self, handicap: Vector, temperature: float, rounds: int | None = None) -> None:
        self.handicap, self.temperature, self.most = handicap, temperature, rounds
        self.field = np.arange(len(handicap))
        """Who is shown the images of this round, in this order."""
        self.shown = 0
        """How many of them have been."""
        self.rounds = 0
        """How many are complete."""
        self.sums = np.zeros((len(handicap), 2))
        """Over the rounds, of each candidate: entropy of the mean prediction, mean entropy."""
        self.standing = np.eye(len(handicap))[0]
        """Softmax of the scores in the last complete round; in the first round, of those shown so far."""

    @property
    def over(self) -> bool:
        return not len(self.field)

    @property
    def next(self) -> int:
        """The candidate whose turn it is."""
        return int(self.field[self.shown])

    def enter(self, mean_entropy: float, entropy: float) -> None:
        """What the next candidate made of the images."""
        self.sums[self.next] += mean_entropy, entropy
        self.shown += 1
        complete = self.shown == len(self.field)
        if not complete and self.rounds:
            return
        seen = self.field[: self.shown]
        exponents = self.exponents(seen)
        self.standing = np.zeros(len(self.handicap))
        self.standing[seen] = soften(exponents)
        if complete:
            self.rounds, self.shown = self.rounds + 1, 0
            ranked = seen[np.argsort(-exponents, kind="stable")]
            last = len(seen) <= 2 or self.rounds == self.most
            self.field = ranked[: 0 if last else (len(seen) + 1) // 2]

    def exponents(self, seen: np.ndarray) -> Vector:
        rounds = self.rounds + 1
        mean, each = self.sums[seen].T / rounds
        return np.asarray((np.sqrt(rounds) * (mean - each) - self.handicap[seen]) / self.temperature)

    def state(self, name: str) -> dict[str, Any]:
        counts = {"shown": self.shown, "rounds": self.rounds}
        arrays = {key: getattr(self, key).copy() for key in ("field", "sums", "standing")}
        return {f"{name}.{key}": value for key, value in {**counts, **arrays}.items()}

    def restore(self, name: str, state: Mapping[str, Any]) -> None:
        """Continue from a state of a race of as many candidates, or say in one sentence that it does not fit."""
        try:
            field, sums, standing, shown, rounds = (
                np.array(entry(state, f"{name}.{key}")) for key in ("field", "sums", "standing", "shown", "rounds")
            )
        except (TypeError, ValueError) as error:
            raise MergettaError(f"This state does not fit the adapter: {name}.") from error
        fits = (
            (sums.shape, standing.shape) == (self.sums.shape, self.standing.shape)
            and all(x.dtype.kind == "f" and np.isfinite(x).all() for x in (sums, standing))
            and np.isclose(standing.sum(), 1)
            and (standing >= 0).all()
            and field.ndim == 1
            and field.dtype.kind in "iu"
            and len(np.unique(field)) == len(field)
            and bool(np.isin(field, np.arange(len(sums))).all())
            and all(x.ndim == 0 and x.dtype.kind in "biu" and x >= 0 for x in (shown, rounds))
            and (shown < len(field) or not shown)
            and (rounds > 0 or len(field) in (0, len(sums)))
            and rounds <= len(sums)
        )
        if not fits:
            raise MergettaError(f"This state does not fit the adapter: {name}.")
        self.field, self.sums, self.standing = field, sums.astype(np.float64), standing.astype(np.float64)
        self.shown, self.rounds = int(shown), int(rounds)


def soften(exponents: Vector) -> Vector:
    exponents = np.nan_to_num(exponents, nan=-np.inf)
    weights = np.exp(exponents - exponents.max()) if np.isfinite(exponents.max()) else np.ones(len(exponents))
    return np.asarray(weights / weights.sum())
