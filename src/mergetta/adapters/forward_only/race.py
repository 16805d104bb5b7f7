"""A race of candidates on images of the stream: who is tried, on what, and what it makes of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.forward_only.trials import BROKEN, Trials
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.streams.state import Field, checked

LEAST = 1e-3
"""Part of the best candidate's weight that is next to nothing."""
LARGEST = 100.0
"""No candidate weighs a member more."""
FINALISTS = 6
"""Candidates that go on after the first round."""
MOVED = 0.2
"""Sum of changes of weights that makes another network of it."""
Candidate = Callable[[NDArray[Any], Vector, bool], NDArray[Any]]
"""Probabilities for images by weights; by the statistics of these images alone, if they stand for the domain."""

Handicap = Callable[[NDArray[Any]], Vector]
"""One number for each of some candidates, (N, M + 1)."""


class Race:
    """Candidates are weights of members, the last weight the source model's; `weights` is their mixture by score.

    Parameters
    ----------
    trials
        Which images candidates are shown.
    candidates
        (N, M + 1), in the order in which they are tried.
    handicap
        What candidates have to gain over the source model.
    temperature
        Of the softmax over scores.
    finals
        How often the best ones are tried again once all have been, each time on other images: their scores are means.
    """

    def __init__(
        self,
        trials: Trials,
        candidates: Sequence[Vector] | NDArray[Any],
        handicap: Handicap,
        temperature: float,
        finals: int = 0,
    ) -> None:
        self.trials, self.candidates = trials, np.vstack(list(candidates))
        self.rules, self.finals = (handicap, temperature), finals
        self.scores: Vector = np.empty(0)
        """Of those that have been tried."""
        self.rounds = 0
        """That are over: one of all, and the finals."""
        self.again: Vector = np.empty(0)
        """Scores in a final that is not over."""
        self.tried = 0
        """Trials in all of them."""
        self._weights: tuple[Vector, Vector] | None = None
        """The scores that they are of, and the weights: every frame asks for them."""

    @property
    def begun(self) -> bool:
        return self.trials.begun or self.rounds > 0

    @property
    def over(self) -> bool:
        return self.rounds > self.finals

    @property
    def weights(self) -> Vector:
        """The softmax of the scores over the candidates that have been tried; until then, the first one."""
        if self._weights is None or self._weights[0] is not self.scores:
            self._weights = self.scores, self._mixture()
        return self._weights[1]

    @property
    def _tried(self) -> tuple[NDArray[Any], Vector]:
        """Who has been, and their scores less the handicap."""
        tried = self.candidates[: len(self.scores)]
        return tried, self.scores - self.rules[0](tried)

    def _mixture(self) -> Vector:
        tried, scores = self._tried
        return np.asarray(soften(scores / self.rules[1]) @ tried) if len(scores) else self.candidates[0]

    @property
    def lost(self) -> bool:
        """Whether the first candidate is known to be worse than the source model."""
        tried, scores = self._tried
        return bool((scores[:1] < scores[tried[:, -1] == 1]).any())

    def run(self, images: NDArray[Any], p: NDArray[Any], predict: Candidate) -> NDArray[Any] | None:
        """Take in images of the stream with their predictions; as many are shown to candidates. Gives those that were
        shown, if they stand for the domain and weights are others by now.
        """
        source, before = np.eye(self.candidates.shape[1])[-1], self.weights
        self.trials.hold(images, p, lambda held: predict(held, source, False))
        held, count, fair = self.trials.held, len(self.candidates), self.trials.fair
        new = self.trials.show(len(images), count, lambda part, index: predict(part, self.candidates[index], fair))
        if new:
            self._score(np.array(new))
        return held if fair and np.abs(self.weights - before).sum() > MOVED else None

    def _score(self, new: Vector) -> None:
        """Take in scores of the next candidates; those of a final count once it is over, and then the best go on."""
        self.tried += len(new)
        known = np.append(self.again if self.rounds else self.scores, new)
        ends = len(known) == len(self.candidates)
        if not self.rounds:
            self.scores = known
        elif ends:
            self.scores = self.scores + (known - self.scores) / (1 + self.rounds)
        self.again = known if self.rounds and not ends else np.empty(0)
        self.rounds += ends
        if ends and not self.over:
            _, scores = self._tried
            best = np.argsort(-scores, kind="stable")[:FINALISTS]
            self.candidates, self.scores = self.candidates[best], self.scores[best]
            self.trials = self.trials.again()

    def state(self) -> dict[str, Any]:
        own: dict[str, Any] = {name: getattr(self, name).copy() for name in ("candidates", "scores", "again")}
        own |= {"rounds": self.rounds, "tried": self.tried}
        return {**own, **self.trials.state("trials.")}

    def restored(self, state: Mapping[str, Any]) -> Race:
        """One that goes on from a state, or one sentence."""
        members = self.candidates.shape[1] - 1
        weights = Field((None, members + 1), low=0, high=LARGEST)
        scores = Field((None,), low=-2 * BROKEN, high=np.log(self.trials.classes) + 1e-6)
        rounds = Field(low=0, high=1 + self.finals, whole=True)
        tried = Field(low=0, whole=True)
        fields = {"candidates": weights, "scores": scores, "again": scores, "rounds": rounds, "tried": tried}
        found = checked(state, fields)
        trials, count = self.trials.restored(state, "trials."), len(found["candidates"])
        finals, over, done = found["rounds"] > 0, found["rounds"] > self.finals, trials.count
        lengths = (count, 0 if over else done) if finals else (done, 0)
        wrong = lengths != (len(found["scores"]), len(found["again"])) or done > count or (done == count) != over
        if wrong or not count:
            raise MergettaError(f"This state does not fit race-merge with {members} members.")
        new = Race(trials, found["candidates"], *self.rules, self.finals)
        new.scores, new.again = found["scores"], found["again"]
        new.rounds, new.tried = int(found["rounds"]), int(found["tried"])
        return new


def soften(exponents: Vector) -> Vector:
    """Softmax, without those that would have next to nothing: what is merged stays exactly what it was without them."""
    weights = np.exp(exponents - exponents.max())
    weights = np.where(weights < LEAST, 0.0, weights)
    return np.asarray(weights / weights.sum())
