"""Simultaneous perturbation stochastic approximation (Spall 1992), two-sided as in Algorithm 2, or one-sided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mergetta.groups import Vector
from mergetta.zeroth_order.perturbation import draw, moved


class Step(NamedTuple):
    """One step in a few bytes: with the learning rate, enough to repeat it anywhere."""

    seed: int
    step: int
    slope: float
    """S = clamp((L⁺ − L⁻) / 2δ); 0 if a loss was not finite, and then nothing moves."""
    loss_plus: float
    loss_minus: float

    @property
    def skipped(self) -> bool:
        return not (math.isfinite(self.loss_plus) and math.isfinite(self.loss_minus))


def probe(
    loss: Callable[[Mapping[str, Vector]], float],
    point: Mapping[str, Vector],
    seed: int,
    step: int,
    delta: float,
    clamp: float,
    here: float | None = None,
) -> Step:
    """Measure the loss at point ± δz: two evaluations, whatever the dimension.

    With `here`, the loss at the point itself, one-sided: a single evaluation, and `here` stands for L⁻.
    """
    z = draw(seed, step, {name: vector.size for name, vector in point.items()})
    plus = loss(moved(point, z, delta))
    minus = loss(moved(point, z, -delta)) if here is None else here
    if not (math.isfinite(plus) and math.isfinite(minus)):
        return Step(seed, step, 0.0, plus, minus)
    slope = (plus - minus) / (2 * delta if here is None else delta)
    return Step(seed, step, max(-clamp, min(clamp, slope)), plus, minus)


def apply(point: Mapping[str, Vector], step: Step, lr: float) -> dict[str, Vector]:
    """point − η S z."""
    z = draw(step.seed, step.step, {name: vector.size for name, vector in point.items()})
    return moved(point, z, -lr * step.slope)


def replay(point: Mapping[str, Vector], history: Iterable[Step], lr: float) -> dict[str, Vector]:
    """Where the steps lead from `point`: bit for bit where the device that recorded them went."""
    current = dict(point)
    for step in history:
        current = apply(current, step, lr)
    return current
