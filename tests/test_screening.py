"""What the hub measures of an expert, by hand, and which of a crowd it finds odd."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mergetta.hub.screening import TINY, moments_apart, screen, sketch_of

from .hub_parts import BASE, expert_of, task_vector

ONE = {
    "bn.weight": np.ones(2),
    "bn.running_mean": np.array([0.0, 1.0]),
    "bn.running_var": np.array([4.0, 1.0]) - TINY,
}


def test_distance_of_moments_by_hand() -> None:
    other = {**ONE, "bn.running_mean": np.array([2.0, 1.0]), "bn.running_var": np.array([4.0, math.e**3]) - TINY}
    # one standard deviation in the first channel, three powers of e in the second: √((1 + 9) / 2)
    assert moments_apart(other, ONE) == pytest.approx(math.sqrt(5), rel=1e-5)
    assert moments_apart(ONE, ONE) == 0
    assert moments_apart({**ONE, "bn.weight": np.full(2, 100.0)}, ONE) == 0
    assert moments_apart({"a.weight": np.ones(2)}, {"a.weight": np.zeros(2)}) == 0.0


def test_a_variance_of_zero_is_finite() -> None:
    dead = {**ONE, "bn.running_var": np.zeros(2)}
    assert 0 < moments_apart(dead, ONE) < 20
    assert 0 < moments_apart(ONE, dead) < np.inf


def test_a_sketch_is_of_what_was_learnt() -> None:
    """Moments of domains lie in all directions, and would drown what the experts have in common."""
    near, far = (expert_of(task_vector(1), "fog", apart=apart).groups for apart in (0.1, 3.0))
    assert sketch_of(near, BASE) == sketch_of(far, BASE)
    assert sketch_of(expert_of(task_vector(2)).groups, BASE) != sketch_of(near, BASE)


def crowd(apart: dict[str, float], suspects: list[str]) -> dict[str, str]:
    names = list(apart)
    sketches = {n: sketch_of(expert_of(task_vector(i)).groups, BASE)[1] for i, n in enumerate(names)}
    return screen(dict.fromkeys(names, 1.0), sketches, names, suspects, apart)


@pytest.mark.parametrize(("apart", "odd"), [(0.0, False), (0.1, False), (1.1, False), (1.3, True), (50.0, True)])
def test_moments_compare_by_length(apart: float, odd: bool) -> None:
    """Four times the median is too far; near the source is not odd, because a mild domain is that."""
    others = {f"{i}": 0.3 for i in range(9)}
    found = crowd({**others, "suspect": apart}, ["suspect"])
    assert bool(found) == odd
    if odd:
        assert "moments are" in found["suspect"]


def test_without_batch_norm_nobody_is_odd() -> None:
    assert crowd({f"{i}": 0.0 for i in range(9)}, [f"{i}" for i in range(9)]) == {}
