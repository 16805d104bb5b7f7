"""Covariance matrix adaptation (Hansen & Ostermeier 2001), by the package `cmaes`. Needs the extra `peers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.errors import MergettaError, how_to_install
from mergetta.groups import Vector
from mergetta.seeds import generator
from mergetta.streams.state import Field, checked

LARGE = 1000
"""From this many dimensions on, the full matrix costs hundreds of megabytes; its diagonal learns faster, too."""


class CMAES:
    """Ask for the points of a generation, tell their losses.

    The best point of each generation (`best`, at first) takes the place of one sample of the next, where it is
    evaluated again: a loss that changes from batch to batch is fair to it. Random numbers come from (seed, step).
    """

    def __init__(self, point: Vector, seed: int, sigma: float, population: int, best: Vector) -> None:
        """The search starts around `point`, with a standard deviation of `sigma`."""
        try:
            import cmaes
        except ModuleNotFoundError as error:
            raise MergettaError(f"CMA-ES needs the package cmaes: {how_to_install('peers')}") from error
        if not sigma > 0 or population < 2:
            raise MergettaError(f"sigma must be positive and population at least 2, not {sigma} and {population}.")
        self.seed, self.steps = seed, 0
        self.best = np.array(best, dtype=np.float64)
        kind = cmaes.SepCMA if point.size >= LARGE else cmaes.CMA
        self._search: Any = kind(np.array(point, dtype=np.float64), sigma, population_size=population)
        self._asked: np.ndarray | None = None

    def ask(self) -> np.ndarray:
        """Points whose losses are wanted, (population, d); the same ones until they are told."""
        if self._asked is None:
            random = generator(self.seed, self.steps, "population")
            self._search.reseed_rng(int(random.integers(2**32)))
            points = [self._search.ask() for _ in range(self._search.population_size - 1)]
            self._asked = np.stack([*points, self.best])
        return self._asked.copy()

    def tell(self, losses: Sequence[float] | Vector) -> None:
        """The losses of the points asked for, in order; where none is finite, the search stays as it is."""
        asked, values = self.ask(), np.array(losses, dtype=np.float64)
        values = np.where(np.isfinite(values), values, np.inf)
        self._asked = None
        self.steps += 1
        if not np.isfinite(values).any():
            return
        self.best = asked[np.argmin(values)].copy()
        self._search.tell(list(zip(asked, values.tolist(), strict=True)))
        # The package keeps one half of the symmetric matrix in its state: what a reloaded search would go on with.
        self._search.__setstate__(self._search.__getstate__())

    def state_dict(self) -> dict[str, Any]:
        search = {f"cma/{name}": np.array(value) for name, value in self._changing().items()}
        return {"steps": self.steps, "best": self.best.copy(), **search}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` exactly; a state that does not fit changes nothing."""
        found = checked(state, {name: Field(np.shape(value)) for name, value in self.state_dict().items()})
        changing = {name: (found[f"cma/{name}"], type(value)) for name, value in self._changing().items()}
        loaded = {name: stored if stored.ndim else kind(stored) for name, (stored, kind) in changing.items()}
        derived = {name: None for name in ("_B", "_D") if hasattr(self._search, name)}
        self._search.__setstate__({**self._search.__getstate__(), **loaded, **derived})
        self.steps, self.best = int(found["steps"]), found["best"]
        self._asked = None

    def _changing(self) -> dict[str, Any]:
        """What a generation changes in the package's search."""
        names = ("_g", "_mean", "_sigma", "_p_sigma", "_pc", "_c_1d", "_C")
        inner = self._search.__getstate__()
        return {name: inner[name] for name in names if name in inner}
