"""Black-box optimisers: each on a quadratic, with and without noise; determinism, NaN losses, counting, state."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.seeds import generator
from mergetta.zeroth_order.descent import Descent
from mergetta.zeroth_order.nelder_mead import NelderMead
from mergetta.zeroth_order.optimisers import OPTIMISERS, Optimiser, create_optimiser
from mergetta.zeroth_order.particle_swarm import ParticleSwarm
from mergetta.zeroth_order.perturbation import draw
from mergetta.zeroth_order.random_search import RandomSearch
from mergetta.zeroth_order.segmented import draw_segmented

TARGET = np.linspace(-1, 1, 6)
START = np.ones(6)
OPTIONS: dict[str, dict[str, Any]] = {
    "spsa": {"lr": 0.05, "delta": 0.1},
    "spsa-one-sided": {"lr": 0.05, "delta": 0.1, "queries": 3},
    "zo-adam": {"lr": 0.05, "delta": 0.1},
    "zo-sign": {"lr": 0.02, "delta": 0.1},
    "random-search": {"candidates": 3, "sigma": 0.2},
}


def quadratic(w: np.ndarray) -> float:
    return float((w - TARGET) @ (w - TARGET))


def create(name: str, seed: int = 0, **options: Any) -> Optimiser:
    return create_optimiser(name, START, seed, **{**OPTIONS.get(name, {}), **options})


def run(optimiser: Optimiser, budget: int, noise: float = 0.0) -> np.ndarray:
    while optimiser.evaluations < budget:
        rng = generator(0, optimiser.steps, "noise")
        optimiser.step(lambda w, rng=rng: quadratic(w) + noise * rng.standard_normal())
    return optimiser.point


@pytest.mark.parametrize("name", OPTIMISERS)
class TestEveryOptimiser:
    def test_quadratic(self, name: str) -> None:
        assert quadratic(START) == pytest.approx(8.8)
        assert quadratic(run(create(name), 1500)) < 0.1

    def test_noisy_quadratic(self, name: str) -> None:
        assert quadratic(run(create(name), 1500, noise=0.1)) < 1.0

    def test_the_same_seed_goes_the_same_way(self, name: str) -> None:
        first, again = (run(create(name), 60, noise=0.1) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        if name != "nelder-mead":  # which draws nothing
            assert not np.array_equal(run(create(name, seed=1), 60, noise=0.1), first)

    def test_nan_losses_leave_the_point(self, name: str) -> None:
        optimiser = create(name)
        for bad in (math.nan, math.inf, -math.inf, math.nan):
            np.testing.assert_array_equal(optimiser.step(lambda w, bad=bad: bad), START)
        assert optimiser.steps == 4
        assert quadratic(run(optimiser, 2000)) < 1.0  # and it goes on from there

    def test_some_nan_losses_do_no_harm(self, name: str) -> None:
        optimiser = create(name)
        while optimiser.evaluations < 2000:
            wrong = generator(0, optimiser.steps, "wrong")
            optimiser.step(lambda w, wrong=wrong: math.nan if wrong.random() < 0.2 else quadratic(w))
        assert quadratic(optimiser.point) < 1.0

    def test_counts_evaluations(self, name: str) -> None:
        optimiser, calls = create(name), []
        for _ in range(9):
            optimiser.step(lambda w: calls.append(w) or quadratic(w))
        assert optimiser.evaluations == len(calls)
        assert all(point.dtype == np.float64 and point.shape == START.shape for point in calls)

    def test_asking_again_asks_the_same(self, name: str) -> None:
        optimiser = create(name)
        first = optimiser.ask()
        first[0] += 1  # a copy
        np.testing.assert_array_equal(optimiser.ask()[1:], first[1:])
        assert optimiser.evaluations == 0
        with pytest.raises(MergettaError, match="losses are wanted"):
            optimiser.tell([0.0] * (len(first) + 1))

    def test_state_continues_exactly(self, name: str) -> None:
        optimiser = create(name)
        run(optimiser, 40)
        state = optimiser.state_dict()
        expected = run(optimiser, 120)
        other = create(name)
        other.load_state_dict(state)
        np.testing.assert_array_equal(run(other, 120), expected)
        for bad in ({}, {**state, "point": np.zeros(2)}, {k: v for k, v in state.items() if k != "steps"}):
            with pytest.raises(MergettaError, match="does not fit"):
                other.load_state_dict(bad)
        np.testing.assert_array_equal(other.point, expected)

    def test_one_dimension(self, name: str) -> None:
        optimiser = create_optimiser(name, np.array([2.0]), **OPTIONS.get(name, {}))
        for _ in range(300):
            optimiser.step(lambda w: float(w @ w))
        assert abs(optimiser.point[0]) < 0.5


class TestDescent:
    def test_two_sides_by_hand(self) -> None:
        z = draw(3, 0, (("", 2),))
        optimiser = Descent(np.array([1.0, 2.0]), seed=3, lr=0.1, delta=0.5)
        np.testing.assert_allclose(optimiser.ask(), [[1, 2] + 0.5 * z, [1, 2] - 0.5 * z])
        optimiser.tell([3.0, 1.0])  # slope (3 − 1) / (2 · 0.5) = 2
        np.testing.assert_allclose(optimiser.point, [1, 2] - 0.1 * 2 * z)

    def test_one_side_and_two_queries_by_hand(self) -> None:
        z = [draw(3, q, (("", 2),)) for q in (0, 1)]
        optimiser = Descent(np.array([1.0, 2.0]), seed=3, lr=0.1, delta=0.5, sides=1, queries=2, clamp=3.0)
        np.testing.assert_allclose(optimiser.ask(), [[1, 2] + 0.5 * z[0], [1, 2] + 0.5 * z[1], [1, 2]])
        optimiser.tell([2.0, 9.0, 1.0])  # slopes 2 and 16, clamped to 3
        np.testing.assert_allclose(optimiser.point, [1, 2] - 0.1 * (2 * z[0] + 3 * z[1]) / 2)

    def test_a_query_without_a_loss_is_left_out(self) -> None:
        z = draw(3, 1, (("", 2),))
        optimiser = Descent(np.array([1.0, 2.0]), seed=3, lr=0.1, delta=0.5, queries=2)
        optimiser.tell([math.nan, 3.0, 1.0, 1.0])
        np.testing.assert_allclose(optimiser.point, [1, 2] - 0.1 * 2 * z)

    def test_sign_and_adam_start_with_steps_of_lr(self) -> None:
        for rule in ("sign", "adam"):
            optimiser = Descent(np.zeros(4), lr=0.1, delta=0.5, rule=rule)
            optimiser.tell([3.0, 1.0])
            np.testing.assert_allclose(np.abs(optimiser.point), 0.1, rtol=1e-5)


def test_nelder_mead_by_hand() -> None:
    optimiser = NelderMead(np.zeros(2))
    assert optimiser.ask().tolist() == [[0, 0], [1, 0], [0, 1]]
    optimiser.tell([1.0, 2.0, 3.0])
    assert optimiser.ask().tolist() == [[1, -1]]  # (0, 1) reflected at the middle of the others
    optimiser.tell([0.0])  # the best so far: try twice as far
    assert optimiser.ask().tolist() == [[1.5, -2]]
    optimiser.tell([0.5])  # not better than the reflection, which stays
    assert optimiser.point.tolist() == [1, -1]
    assert optimiser.ask().tolist() == [[0, -1]]  # (1, 0) reflected
    optimiser.tell([9.0])  # worse than the worst: contract inside
    assert optimiser.ask().tolist() == [[0.75, -0.25]]
    optimiser.tell([9.0])  # no better: shrink towards the best
    assert optimiser.ask().tolist() == [[0.5, -0.5], [1, -0.5]]


def test_particle_swarm_remembers_the_best() -> None:
    optimiser = ParticleSwarm(np.zeros(2), particles=3)
    first = optimiser.ask()
    np.testing.assert_array_equal(first[0], 0)
    optimiser.tell([2.0, 1.0, 3.0])
    np.testing.assert_array_equal(optimiser.point, first[1])
    moved = optimiser.ask()
    np.testing.assert_array_equal(moved[1], first[1])  # its own best is the common best: no pull, no velocity
    optimiser.tell([5.0, 5.0, 5.0])
    np.testing.assert_array_equal(optimiser.point, first[1])


def test_random_search_goes_to_the_best() -> None:
    optimiser = RandomSearch(np.zeros(2), candidates=2)
    asked = optimiser.ask()
    np.testing.assert_array_equal(asked[0], 0)
    optimiser.tell([1.0, 1.0, 0.5])
    np.testing.assert_array_equal(optimiser.point, asked[2])


class TestCMAES:
    def test_the_best_is_tried_again(self) -> None:
        optimiser = create("cma-es", population=5, best=np.full(6, 3.0))
        assert len(optimiser.ask()) == 5
        np.testing.assert_array_equal(optimiser.ask()[-1], 3.0)
        optimiser.tell([3.0, 2.0, 1.0, 4.0, 5.0])
        np.testing.assert_array_equal(optimiser.ask()[-1], create("cma-es", population=5, best=np.ones(6)).ask()[2])

    def test_diagonal(self) -> None:
        optimiser = create("cma-es", diagonal=True)
        run(optimiser, 100)
        other = create("cma-es", diagonal=True)
        other.load_state_dict(optimiser.state_dict())
        np.testing.assert_array_equal(run(other, 900), run(optimiser, 900))
        assert quadratic(optimiser.point) < 0.1

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cmaes", None)
        with pytest.raises(MergettaError, match=r"install mergetta\[peers\]"):
            create("cma-es")


def test_segmented_perturbations() -> None:
    z = draw_segmented(1, 2, (("a", 500), ("b", 500)))
    assert (np.abs(z) >= 0.5).all()
    assert (np.abs(z) <= 1).all()
    assert 0.4 < (z > 0).mean() < 0.6
    np.testing.assert_array_equal(draw_segmented(1, 2, (("b", 500),)), z[500:])


def test_what_is_refused() -> None:
    with pytest.raises(MergettaError, match="no optimiser 'lbfgs'"):
        create_optimiser("lbfgs", START)
    with pytest.raises(MergettaError, match="does not take these options"):
        create_optimiser("pso", START, speed=3)
    with pytest.raises(MergettaError, match="finite numbers"):
        create_optimiser("pso", np.array([np.nan]))
    for name, options in (
        ("spsa", {"sides": 3}),
        ("spsa", {"rule": "newton"}),
        ("spsa", {"delta": 0.0}),
        ("pso", {"particles": 1}),
        ("cma-es", {"sigma": 0.0}),
        ("nelder-mead", {"sigma": -1.0}),
        ("random-search", {"candidates": 0}),
    ):
        with pytest.raises(MergettaError):
            create(name, **options)
