"""Simultaneous perturbation stochastic approximation (Spall 1992), two-sided as in Algorithm 2, or one-sided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mergetta.groups import Vector
from mergetta.zeroth_order.perturbation import Sizes, draw

DELTA = 0.1
"""How far a perturbation goes where nobody has calibrated it: the paper's δ for int8 models, whose rounding drowns
smaller ones. On float CNNs 0.01 to 1 do equally well (docs/results/claims.md)."""


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
    loss: Callable[[Vector], float],
    point: Vector,
    sizes: Sizes,
    seed: int,
    step: int,
    delta: float,
    clamp: float,
    here: float | None = None,
) -> Step:
    """Measure the loss at point ± δz: two evaluations, whatever the dimension.

    Out of place: + δ − 2δ + δ in place would not restore the floats. With `here`, the loss at the point itself,
    one-sided: a single evaluation, and `here` stands for L⁻.
    """
    z = draw(seed, step, sizes)
    plus = loss(point + delta * z)
    minus = loss(point - delta * z) if here is None else here
    if not (math.isfinite(plus) and math.isfinite(minus)):
        return Step(seed, step, 0.0, plus, minus)
    slope = (plus - minus) / (2 * delta if here is None else delta)
    return Step(seed, step, max(-clamp, min(clamp, slope)), plus, minus)


def apply(point: Vector, sizes: Sizes, step: Step, lr: float) -> Vector:
    """point − η S z."""
    moved: Vector = point - (lr * step.slope) * draw(step.seed, step.step, sizes)
    return moved


def replay(point: Vector, sizes: Sizes, history: Iterable[Step], lr: float) -> Vector:
    """Where the steps lead from `point`: bit for bit where the device that recorded them went."""
    for step in history:
        point = apply(point, sizes, step, lr)
    return point
