"""After the race: steps along the directions that members share, by a gradient that forward passes have learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.forward_only.duel import Duel
from mergetta.adapters.forward_only.trials import IMAGES, packed, unpacked
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.groups import Vector, learnable
from mergetta.losses.probabilities import softmax
from mergetta.losses.roid import likelihood_ratio_slope, sample_weights
from mergetta.losses.views import colour_and_geometry
from mergetta.seeds import generator
from mergetta.streams.classes import mixed, predicted
from mergetta.streams.domain import DomainMoments
from mergetta.streams.state import Field, checked
from mergetta.zeroth_order.broyden import Jacobian

Forward = Callable[[NDArray[Any], dict[str, Vector]], NDArray[Any]]
"""Logits of images with something added to the groups."""
LARGEST = 2**20
"""Numbers that the Jacobian has at most, or one for each class and coordinate: with more classes, several share one."""
LEAST = -1e30
"""No logit is less: of a class that is ruled out it may be −∞, which no state can hold."""
VECTORS = ("point", "mean", "square", "average")
"""What a state keeps of a refinement as it is."""
FARTHEST = 1000.0
"""No coordinate is larger: that is beyond all steps together."""


@dataclass(frozen=True)
class RefineSettings:
    """Chosen at severity 4 of fashion-bn (docs/research-log.md)."""

    rank: int = 3
    """Directions per group, the strongest of the members' task vectors. Five are no better, and one gains half."""
    delta: float = 0.1
    """How far a perturbation goes, in units of how far members go along a direction."""
    lr: float = 0.05
    """Of Adam, in the same units."""
    momentum: float = 0.98
    """Of Adam's mean: what single sets of images say is noisy."""
    fade: float = 0.9
    """What moments of the stream, taken before a step, count for after it."""
    pull: float = 0.01
    """Share of the way back to the race's mixture that every step ends with (ROID's weight ensembling)."""
    temperature: float = 1 / 3
    """Of ROID's weights."""
    size: int = 64
    """Images per step."""
    together: int = 8
    """Images that share a direction."""
    warm: int = 20
    """Sets of images that only teach the Jacobian, before the first step."""
    again: int = 8
    """From then on, every so many sets teach it: it hardly changes."""
    block: int = 32
    """Sets of images from one duel to the next."""
    duel: int = 8
    """The last sets of a block, on which the point meets the best one so far."""
    gain: float = 0.001
    """Information that it has to have gained there."""
    failures: int = 2
    """Lost duels after which it is over; each halves the steps to come."""
    blocks: int = 6
    """After which it is over in any case."""


class Refinement:
    """θ = mixture + Σ c v: a few directions v per group, one coordinate c each.

    Once in 64 images that look mixed:

    - **Perturb**: eight images at a time go through a pass with a direction of their own. What that changes in their
      logits is taken in by the Jacobian (`zeroth_order/broyden.py`).
    - **Loss**: ROID's, with the weights of the unperturbed pass. The likelihood ratio of the images, and the
      cross-entropy of a second view of those that ROID keeps, with the prediction of the first as its target. Their
      gradients in the logits are exact.
    - **Step**: Adam on Jᵀ ∂loss/∂logits, and a pull back to the mixture.
    - **Duel**: after 24 steps the point rests, and meets the best one so far on 8 sets of images, each with the batch's
      own statistics. The score is that of the race, information: steps that please a loss need not be right.

    Moments belong to a point: with every step those of before fade, and who goes back to a point gets its own back.

    That is 1 to 2 more forward passes for each of these images, for at most 212 sets of 64.

    References
    ----------
    Marsden et al. 2024 (ROID): the loss, its weights, weight ensembling. Sohn et al. 2020 (FixMatch): a second view is
    to agree with the prediction for the first.
    """

    def __init__(self, bundle: Bundle, classes: int, least: float, settings: RefineSettings | None = None) -> None:
        self.bundle, self.least = bundle, least
        self.settings = settings or RefineSettings()
        self.names, self.directions = directions(bundle, self.settings.rank)
        self.size = sum(len(each) for each in self.directions)
        self.point, self.mean, self.square = (np.zeros(self.size) for _ in range(3))
        self.classes = classes
        self.cells = min(classes, max(1, LARGEST // max(1, classes * self.size)))
        self.jacobian = Jacobian(self.cells, classes, self.size)
        self.average = np.full(classes, 1 / classes)
        """ROID's running mean of the predictions."""
        self.steps = 0
        """Sets of images that were taken in."""
        self.duel = Duel(self.point, classes, FARTHEST)
        """With the best point so far, to go back to."""
        self.idle = 0
        """Sets in a row that did not look mixed."""
        self.held: list[NDArray[np.float32]] = []
        self.logits: list[NDArray[np.float64]] = []

    @property
    def over(self) -> bool:
        chosen = self.settings
        return (
            self.duel.lost >= chosen.failures
            or self.steps >= chosen.warm + chosen.blocks * chosen.block
            or not self.size
        )

    def moved(self, point: Vector | None = None) -> dict[str, Vector]:
        """What is added to the groups."""
        point = self.point if point is None else point
        if not point.any():
            return {}
        ends = np.cumsum([len(each) for each in self.directions])
        return {
            name: (point[end - len(each) : end] @ each).astype(np.float32)
            for name, each, end in zip(self.names, self.directions, ends, strict=True)
        }

    def run(
        self,
        images: NDArray[Any],
        logits: NDArray[Any],
        forward: Forward,
        alone: Forward | None,
        moments: DomainMoments | None = None,
    ) -> None:
        """Take in images of the stream with what was predicted for them, until there are 64 for a step. `forward`
        normalises as the stream does (with `moments`), `alone` with their own statistics: without it no step is taken.
        """
        if alone is None:
            self.duel.lost = self.settings.failures
            return
        if moments is not None and not self.steps:
            self.duel.moments = moments.state()
        images, logits = np.asarray(images, dtype=np.float32), np.maximum(logits, LEAST).astype(np.float64)
        if self.held and self.held[0].shape[1:] != images.shape[1:]:
            self.held, self.logits = [], []
        sets = (sum(map(len, self.held)) + len(images)) // self.settings.size
        if not sets:
            self.held, self.logits = [*self.held, images.copy()], [*self.logits, logits]
            return
        if self.held:
            images, logits = np.concatenate([*self.held, images]), np.concatenate([*self.logits, logits])
        start, self.held, self.logits = self.point, [], []  # of what is left over, logits are of another point
        for chosen in np.arange(sets * self.settings.size).reshape(sets, -1):
            if self.over:
                return
            if mixed(predicted(softmax(logits[chosen]))) >= self.least:
                self.idle = 0
                self._take(images[chosen], logits[chosen], forward, alone, moments, start)
            else:
                self.idle += 1
                if self.idle >= self.settings.block:
                    self._go_back(moments)
                    self.duel.lost = self.settings.failures  # classes are no longer mixed: it may rest

    def _take(
        self,
        images: NDArray[Any],
        logits: NDArray[Any],
        forward: Forward,
        alone: Forward,
        moments: DomainMoments | None,
        start: Vector,
    ) -> None:
        """A set of images, predicted at the point `start`: for a step, or for a duel."""
        chosen = self.settings
        within = (self.steps - chosen.warm) % chosen.block
        self.steps += 1
        if self.steps > chosen.warm and within >= chosen.block - chosen.duel:
            self.duel.show(self.point, lambda point: alone(images, self.moved(point)))
            last = within == chosen.block - 1
            if last and not self.duel.won(self.point, chosen.gain, moments):
                self._go_back(moments)
            return
        gradient = self._gradient(images, logits, forward, start)
        if gradient is not None and np.isfinite(gradient).all():
            self._move(gradient, self.steps - chosen.warm)
            if moments is not None:
                moments.fade(chosen.fade)

    def _gradient(self, images: NDArray[Any], logits: NDArray[Any], forward: Forward, start: Vector) -> Vector | None:
        """Of the loss at a point; None as long as the Jacobian is only being learnt."""
        chosen, rng = self.settings, generator(0, self.steps, "refine")
        cells = logits.argmax(axis=1) % self.cells
        teaching = self.steps <= chosen.warm or self.steps % chosen.again == 0
        for first in range(0, len(images) if teaching else 0, chosen.together):
            some, z = slice(first, first + chosen.together), rng.standard_normal(self.size)
            change = forward(images[some], self.moved(start + chosen.delta * z)) - logits[some]
            if np.isfinite(change).all():
                self.jacobian.learn(cells[some], change / chosen.delta, z)
        weights, keep = sample_weights(logits, self.average, chosen.temperature)
        self.average = 0.9 * self.average + 0.1 * softmax(logits).mean(axis=0)
        if self.steps <= chosen.warm:
            return None
        weights = np.where(keep, weights, 0)[:, None] / len(images)
        gradient = self.jacobian.gradient(cells, weights * likelihood_ratio_slope(logits))
        seen = forward(second_views(images, rng, keep, chosen.together), self.moved(start)).astype(np.float64)
        apart = softmax(seen) - softmax(logits[keep])
        return gradient + self.jacobian.gradient(seen.argmax(axis=1) % self.cells, weights[keep] * apart)

    def _go_back(self, moments: DomainMoments | None) -> None:
        """To the best point so far, with the moments that belong to it."""
        self.point, self.mean = self.duel.best, np.zeros_like(self.mean)
        if moments is not None:
            moments.restore(self.duel.moments)

    def _move(self, gradient: Vector, step: int) -> None:
        """Adam (Kingma and Ba 2015), and the pull."""
        chosen = self.settings
        self.mean = chosen.momentum * self.mean + (1 - chosen.momentum) * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        scale = np.sqrt(self.square / (1 - 0.999**step)) + 1e-8
        moved = self.point - chosen.lr * 0.5**self.duel.lost * self.mean / (1 - chosen.momentum**step) / scale
        self.point = (1 - chosen.pull) * moved

    def state(self, prefix: str) -> dict[str, Any]:
        own: dict[str, Any] = {name: getattr(self, name).copy() for name in VECTORS}
        own |= {"steps": self.steps, "idle": self.idle}
        if self.held:
            own |= {"held": packed(np.concatenate(self.held)), "logits": np.concatenate(self.logits)}
        jacobian = self.jacobian.state(f"{prefix}jacobian.") if self.steps and not self.over else {}
        own = {f"{prefix}{key}": value for key, value in own.items()}
        return {**own, **self.duel.state(prefix, self.over), **jacobian}

    def restored(self, state: Mapping[str, Any], prefix: str, moments: DomainMoments | None = None) -> Refinement:
        """One that goes on from a state, or one sentence."""
        each, count = Field((self.size,)), Field(low=0, whole=True)
        fields = {
            "steps": count,
            "idle": count,
            "point": Field((self.size,), low=-FARTHEST, high=FARTHEST),
            "mean": each,
            "square": Field((self.size,), low=0),
            "average": Field((self.classes,), low=0),
        }
        if f"{prefix}held" in state:
            fields |= {"held": IMAGES, "logits": Field((None, self.classes))}
        found = checked(state, fields, prefix)
        if (np.abs(found["mean"]) > 32 * np.sqrt(found["square"]) + 1e-12).any():  # whatever the gradients were
            raise MergettaError(f"This state does not fit the adapter: {prefix}mean.")
        new = Refinement(self.bundle, self.classes, self.least, self.settings)
        new.steps, new.idle, new.duel = int(found["steps"]), int(found["idle"]), self.duel.restored(state, prefix)
        for name in VECTORS:
            setattr(new, name, found[name])
        if "held" in found:
            if not 0 < len(found["held"]) == len(found["logits"]) < self.settings.size or not found["held"].size:
                raise MergettaError(f"This state does not fit the adapter: {prefix}held.")
            new.held, new.logits = [unpacked(state[f"{prefix}held"])], [found["logits"]]
        if new.steps and not new.over:
            new.jacobian = self.jacobian.restored(state, f"{prefix}jacobian.")
        if moments is not None and (new.duel.moments or (new.steps and not new.over)):
            moments.check(new.duel.moments)  # who loses a duel gets them back
        return new


def second_views(images: NDArray[Any], rng: np.random.Generator, keep: NDArray[Any], together: int) -> NDArray[Any]:
    """ROID's views of those to keep, a few at a time: of 64 large images at once they would take half a gigabyte."""
    parts = np.array_split(np.flatnonzero(keep), -(-np.count_nonzero(keep) // together))
    chosen = (np.isin(np.arange(len(keep)), part) for part in parts)
    return np.concatenate([colour_and_geometry(images, deepcopy(rng), some) for some in chosen])


@lru_cache(maxsize=1)  # every domain begins anew
def directions(bundle: Bundle, rank: int) -> tuple[list[str], list[NDArray[np.float64]]]:
    """The strongest directions of the members' task vectors in each group, as long as members go along them."""
    names, found = [], []
    for name in learnable(bundle.base):
        tasks = bundle.member_tasks[name].astype(np.float64)
        _, lengths, rows = np.linalg.svd(tasks, full_matrices=False)
        kept = lengths[:rank] > 1e-3 * max(lengths[0], 1e-12)
        if kept.any():
            names.append(name)
            found.append((lengths[:rank, None] * rows[:rank])[kept] / np.sqrt(len(tasks)))
    return names, found
