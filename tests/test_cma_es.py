"""CMA-ES on a quadratic, with and without noise: determinism, NaN losses, state. ZOA's perturbations."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.seeds import generator
from mergetta.zeroth_order import cma_es
from mergetta.zeroth_order.cma_es import CMAES
from mergetta.zeroth_order.segmented import draw_segmented

TARGET = np.linspace(-1, 1, 6)
START = np.ones(6)


def quadratic(w: np.ndarray) -> float:
    return float((w - TARGET) @ (w - TARGET))


def create(seed: int = 0, sigma: float = 1.0, population: int = 9, best: np.ndarray = START) -> CMAES:
    return CMAES(START, seed, sigma, population, best)


def run(search: CMAES, generations: int, noise: float = 0.0) -> np.ndarray:
    for _ in range(generations):
        rng = generator(0, search.steps, "noise")
        search.tell([quadratic(w) + noise * rng.standard_normal() for w in search.ask()])
    return search.best


@pytest.fixture(params=[False, True], ids=["full", "diagonal"])
def diagonal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either kind of matrix, whatever the dimension."""
    if request.param:
        monkeypatch.setattr(cma_es, "LARGE", 0)


@pytest.mark.usefixtures("diagonal")
class TestEitherKind:
    def test_quadratic(self) -> None:
        assert quadratic(START) == pytest.approx(8.8)
        assert quadratic(run(create(), 160)) < 0.1

    def test_noisy_quadratic(self) -> None:
        assert quadratic(run(create(), 160, noise=0.1)) < 1.0

    def test_the_same_seed_goes_the_same_way(self) -> None:
        first, again = (run(create(), 7, noise=0.1) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(run(create(seed=1), 7, noise=0.1), first)

    def test_nan_losses_leave_the_search(self) -> None:
        search = create()
        before = search.state_dict()
        for bad in (math.nan, math.inf, -math.inf, math.nan):
            search.tell([bad] * len(search.ask()))
        assert search.steps == 4
        for name, value in search.state_dict().items():
            if name != "steps":
                np.testing.assert_array_equal(value, before[name])
        assert quadratic(run(search, 160)) < 1.0  # and it goes on from there

    def test_some_nan_losses_do_no_harm(self) -> None:
        search = create()
        for _ in range(200):
            wrong = generator(0, search.steps, "wrong")
            search.tell([math.nan if wrong.random() < 0.2 else quadratic(w) for w in search.ask()])
        assert quadratic(search.best) < 1.0

    def test_state_continues_exactly(self) -> None:
        search = create()
        run(search, 5)
        state = search.state_dict()
        expected = run(search, 10)
        other = create()
        other.load_state_dict(state)
        np.testing.assert_array_equal(run(other, 10), expected)
        for bad in ({}, {**state, "best": np.zeros(2)}, {k: v for k, v in state.items() if k != "steps"}):
            with pytest.raises(MergettaError, match="does not fit"):
                other.load_state_dict(bad)
        np.testing.assert_array_equal(other.best, expected)


def test_asking_again_asks_the_same() -> None:
    search = create()
    first = search.ask()
    first[0] += 1  # a copy
    np.testing.assert_array_equal(search.ask()[1:], first[1:])
    with pytest.raises(ValueError, match="shorter"):
        search.tell([0.0] * (len(first) - 1))


def test_the_best_is_tried_again() -> None:
    search = create(population=5, best=np.full(6, 3.0))
    assert search.ask().shape == (5, 6)
    np.testing.assert_array_equal(search.ask()[-1], 3.0)
    third = search.ask()[2]
    search.tell([3.0, 2.0, 1.0, 4.0, 5.0])
    np.testing.assert_array_equal(search.ask()[-1], third)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(MergettaError, match=r"CMA-ES needs the package cmaes: pip install .*\[peers\]"):
        create()


def test_what_is_refused() -> None:
    with pytest.raises(MergettaError):
        create(sigma=0.0)
    with pytest.raises(MergettaError):
        create(population=1)


def test_segmented_perturbations() -> None:
    z = draw_segmented(1, 2, (("a", 500), ("b", 500)))
    assert (np.abs(z) >= 0.5).all()
    assert (np.abs(z) <= 1).all()
    assert 0.4 < (z > 0).mean() < 0.6
    np.testing.assert_array_equal(draw_segmented(1, 2, (("b", 500),)), z[500:])
