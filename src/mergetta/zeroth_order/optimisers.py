"""Black-box optimisers by name, behind one interface: ask for points, tell their losses.

Each of them minimises over a flat float64 vector, draws its random numbers from (seed, step), and keeps its point where
it is when no loss is finite.

>>> optimiser = create_optimiser("spsa", np.ones(3), lr=0.1)
>>> for _ in range(100):
...     point = optimiser.step(lambda w: float(w @ w))
>>> bool(point @ point < 0.1)
True
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.seeds import generator


class Optimiser(ABC):
    """`point` is the best guess so far; `evaluations` counts the losses told, whatever the method."""

    kept: ClassVar[tuple[str, ...]] = ("point",)
    """Attributes that make up the state, beside the two counters: arrays and numbers."""

    def __init__(self, point: Vector, seed: int = 0) -> None:
        self.point = np.array(point, dtype=np.float64)
        if self.point.ndim != 1 or not self.point.size or not np.isfinite(self.point).all():
            raise MergettaError("An optimiser starts from a vector of finite numbers.")
        self.seed = seed
        self.steps = 0
        self.evaluations = 0
        self._asked: np.ndarray | None = None

    def ask(self) -> np.ndarray:
        """Points whose losses are wanted, (n, d); the same ones until they are told."""
        if self._asked is None:
            self._asked = self._ask()
        return self._asked.copy()

    def tell(self, losses: Sequence[float] | Vector) -> None:
        """The losses of the points asked for, in order; NaN where there is none."""
        asked, values = self.ask(), np.array(losses, dtype=np.float64)
        if values.shape != (len(asked),):
            raise MergettaError(f"{len(asked)} losses are wanted, one for each point, not {values.size}.")
        self._tell(asked, np.where(np.isfinite(values), values, np.inf))
        self._asked = None
        self.evaluations += len(asked)
        self.steps += 1

    def step(self, loss: Callable[[Vector], float]) -> Vector:
        """Ask, evaluate, tell; the point after it."""
        self.tell([loss(point) for point in self.ask()])
        return self.point

    @abstractmethod
    def _ask(self) -> np.ndarray: ...

    @abstractmethod
    def _tell(self, asked: np.ndarray, losses: Vector) -> None:
        """Losses that were not finite come as +∞."""

    def random(self, purpose: str) -> np.random.Generator:
        """A generator of this step's own."""
        return generator(self.seed, self.steps, purpose)

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: np.copy(getattr(self, name)) for name in self.kept}
        return {"steps": self.steps, "evaluations": self.evaluations, **arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` exactly; a state that does not fit changes nothing."""
        complete = {"steps", "evaluations", *self.kept} <= state.keys()
        if not complete or any(np.shape(state[name]) != np.shape(getattr(self, name)) for name in self.kept):
            raise MergettaError("This state does not fit the optimiser.")
        for name in self.kept:
            setattr(self, name, np.array(state[name]))
        self.steps, self.evaluations = int(state["steps"]), int(state["evaluations"])
        self._asked = None


OPTIMISERS: dict[str, tuple[str, dict[str, Any]]] = {
    "spsa": ("descent:Descent", {}),
    "spsa-one-sided": ("descent:Descent", {"sides": 1}),
    "zo-adam": ("descent:Descent", {"rule": "adam"}),
    "zo-sign": ("descent:Descent", {"rule": "sign"}),
    "cma-es": ("cma_es:CMAES", {}),
    "pso": ("particle_swarm:ParticleSwarm", {}),
    "nelder-mead": ("nelder_mead:NelderMead", {}),
    "random-search": ("random_search:RandomSearch", {}),
}


def create_optimiser(name: str, point: Vector, seed: int = 0, **options: Any) -> Optimiser:
    """An optimiser by name, with the options of its constructor."""
    if name not in OPTIMISERS:
        raise MergettaError(f"There is no optimiser {name!r}; choose one of {', '.join(OPTIMISERS)}.")
    path, preset = OPTIMISERS[name]
    module, _, kind = path.partition(":")
    create = partial(getattr(import_module(f"mergetta.zeroth_order.{module}"), kind), point, seed)
    try:
        made: Optimiser = create(**{**preset, **options})
    except TypeError as error:
        raise MergettaError(f"{name} does not take these options: {error}.") from error
    return made
