"""Covariance matrix adaptation (Hansen & Ostermeier 2001), by the package `cmaes`. Needs the extra `peers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.zeroth_order.optimisers import Optimiser

LARGE = 1000
"""From this many dimensions on, the full matrix costs hundreds of megabytes; its diagonal learns faster, too."""


class CMAES(Optimiser):
    """`point` is the mean of the population: what is left of a noisy loss when it is averaged.

    With `best`, the best point of each generation (that one, at first) takes the place of one sample of the next, where
    it is evaluated again.
    """

    kept: ClassVar[tuple[str, ...]] = ("point", "best")

    def __init__(
        self,
        point: Vector,
        seed: int = 0,
        sigma: float = 1.0,
        population: int | None = None,
        best: Vector | None = None,
        diagonal: bool | None = None,
    ) -> None:
        """`population` is 4 + 3 ln d unless given; `diagonal` (a SepCMA) is chosen from 1,000 dimensions on."""
        super().__init__(point, seed)
        try:
            import cmaes
        except ModuleNotFoundError as error:
            raise MergettaError("CMA-ES needs the package cmaes: install mergetta[peers].") from error
        if not sigma > 0 or (population is not None and population < 2):
            raise MergettaError(f"sigma must be positive and population at least 2, not {sigma} and {population}.")
        if diagonal is None:
            diagonal = self.point.size >= LARGE
        kind = cmaes.SepCMA if diagonal and self.point.size > 1 else cmaes.CMA
        self._search: Any = kind(self.point.copy(), sigma, population_size=population)
        self.injects = best is not None
        self.best = self.point.copy() if best is None else np.array(best, dtype=np.float64)

    def _ask(self) -> np.ndarray:
        self._search.reseed_rng(int(self.random("population").integers(2**32)))
        points = [self._search.ask() for _ in range(self._search.population_size - self.injects)]
        return np.stack([*points, self.best] if self.injects else points)

    def _tell(self, asked: np.ndarray, losses: Vector) -> None:
        if not np.isfinite(losses).any():
            return
        self.best = asked[np.argmin(losses)].copy()
        self._search.tell(list(zip(asked, losses.tolist(), strict=True)))
        # The package keeps one half of the symmetric matrix in its state: what a reloaded search would go on with.
        self._search.__setstate__(self._search.__getstate__())
        self.point = self._search.mean.copy()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{f"cma/{name}": np.array(value) for name, value in self._changing().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded: dict[str, Any] = {}
        for name, value in self._changing().items():
            stored = np.array(state.get(f"cma/{name}", np.nan))
            if stored.shape != np.shape(value) or not np.isfinite(stored).all():
                raise MergettaError("This state does not fit the CMA-ES search.")
            loaded[name] = stored if stored.ndim else type(value)(stored)
        super().load_state_dict(state)
        derived = {name: None for name in ("_B", "_D") if hasattr(self._search, name)}
        self._search.__setstate__({**self._search.__getstate__(), **loaded, **derived})

    def _changing(self) -> dict[str, Any]:
        """What a generation changes in the package's search."""
        names = ("_g", "_mean", "_sigma", "_p_sigma", "_pc", "_c_1d", "_C")
        inner = self._search.__getstate__()
        return {name: inner[name] for name in names if name in inner}
