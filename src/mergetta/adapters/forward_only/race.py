"""A race of candidates on images of the stream: who is tried, on what, and what it makes of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.forward_only.successive_halving import SuccessiveHalving
from mergetta.adapters.forward_only.trials import Trials
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.streams.state import Field, checked


class Race:
    """Candidates are weights of members, the last weight the source model's; `weights` is their mixture by score.

    Parameters
    ----------
    trials
        Which images candidates are shown.
    candidates
        (N, M + 1), in the order in which they are tried.
    caution
        What a candidate has to gain over the source model, times the square root of what it gives to members.
    temperature
        Of the softmax over scores.
    rungs
        At most so many; None: until two are left.
    """

    def __init__(
        self,
        trials: Trials,
        candidates: Sequence[Vector] | NDArray[Any],
        caution: float,
        temperature: float,
        rungs: int | None = None,
    ) -> None:
        self.trials, self.candidates = trials, np.vstack(list(candidates))
        self.rules = caution, temperature, rungs
        handicap = caution * np.sqrt(self.candidates[:, :-1].sum(axis=1))
        self.search = SuccessiveHalving(handicap, temperature, rungs)

    @property
    def begun(self) -> bool:
        return self.trials.begun

    @property
    def over(self) -> bool:
        return self.search.over

    @property
    def weights(self) -> Vector:
        return np.asarray(self.search.weights @ self.candidates)

    def run(
        self, images: NDArray[Any], p: NDArray[Any], predict: Callable[[NDArray[Any], Vector], NDArray[Any]]
    ) -> None:
        """Take in images of the stream with their predictions; as many are shown to candidates."""
        self.trials.hold(images, p)
        self.trials.show(len(images), self.search, lambda part, index: predict(part, self.candidates[index]))

    def state(self) -> dict[str, Any]:
        return {"candidates": self.candidates.copy(), **self.trials.state("trials."), **self.search.state("search.")}

    def restored(self, state: Mapping[str, Any]) -> Race:
        """One that goes on from a state, or one sentence."""
        members = self.candidates.shape[1] - 1
        candidates = checked(state, {"candidates": Field((None, members + 1), low=0)})["candidates"]
        if not len(candidates):
            raise MergettaError(f"This state does not fit race-merge with {members} members.")
        new = Race(self.trials.restored(state, "trials."), candidates, *self.rules)
        new.search.restore(state, "search.")
        return new
