"""Successive halving among candidates, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergetta import MergettaError
from mergetta.adapters.forward_only.successive_halving import SuccessiveHalving, soften
from mergetta.adapters.forward_only.trials import BROKEN


def run(search: SuccessiveHalving, scores: list[float]) -> list[list[int]]:
    """The candidates of each rung, if each always has the same score."""
    rungs = []
    while not search.over:
        if not search.shown:
            rungs.append(search.rung.tolist())
        search.enter(scores[search.next])
    return rungs


def test_the_better_half_goes_on() -> None:
    search = SuccessiveHalving(np.zeros(7), temperature=0.1)
    assert run(search, [1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]) == [[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3], [6, 5]]
    assert search.rungs == 3
    np.testing.assert_allclose(search.sums, [1.3, 1.4, 1.5, 2 * 1.6, 2 * 1.7, 3 * 1.8, 3 * 1.9])
    # after three rungs 0.1 between the last two counts √3 times as much
    odds = np.exp(np.sqrt(3) * 0.1 / 0.1)
    np.testing.assert_allclose(search.weights, [0, 0, 0, 0, 0, 1 / (1 + odds), odds / (1 + odds)])


def test_a_handicap_counts_less_from_rung_to_rung() -> None:
    """The first is better by 0.03 and has a handicap of 0.04: 0.03 < 0.04, but √2 · 0.03 > 0.04."""
    search = SuccessiveHalving(np.array([0.04, 0, 0]), temperature=0.01)
    for score in (1.5, 1.47, 1.1):
        search.enter(score)
    assert search.weights.argmax() == 1
    assert search.rung.tolist() == [1, 0]
    for score in (1.47, 1.5):
        search.enter(score)
    assert search.over
    assert search.weights.argmax() == 0


def test_in_the_first_rung_those_shown_so_far_count_later_those_of_the_last_complete_one() -> None:
    search = SuccessiveHalving(np.zeros(4), temperature=0.01)
    assert search.weights.tolist() == [1, 0, 0, 0]
    search.enter(1.0)
    search.enter(1.5)
    assert search.weights.argmax() == 1
    search.enter(1.0)
    search.enter(1.1)
    before = search.weights
    search.enter(-9.0)  # half of a rung
    assert search.weights is before


def test_one_rung_at_most() -> None:
    search = SuccessiveHalving(np.zeros(8), 0.1, rungs=1)
    assert len(run(search, [1.0] * 8)) == 1
    np.testing.assert_allclose(search.weights, 1 / 8)


def test_what_broke_once_has_lost() -> None:
    search = SuccessiveHalving(np.zeros(3), temperature=0.01)
    for score in (-BROKEN, 0.5, 0.4):
        search.enter(score)
    assert search.rung.tolist() == [1, 2]
    assert search.weights[0] == 0
    for score in (0.4 - BROKEN, -0.2):  # in later rungs too
        search.enter(score)
    assert search.weights.tolist() == [0, 0, 1]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=40))
def test_it_ends_and_the_best_is_first(scores: list[float]) -> None:
    search = SuccessiveHalving(np.zeros(len(scores)), temperature=0.01)
    rungs = run(search, scores)
    assert [len(rung) for rung in rungs[1:]] == [(len(rung) + 1) // 2 for rung in rungs[:-1]]
    assert len(rungs[-1]) <= 2
    assert scores[int(search.weights.argmax())] == pytest.approx(max(scores), abs=1e-9)
    assert search.weights.sum() == pytest.approx(1)


def test_a_state_goes_on_exactly() -> None:
    scores = [1.3, 1.4, 1.5, 1.6, 1.7]
    search, again = (SuccessiveHalving(np.zeros(5), 0.1) for _ in range(2))
    for score in (*scores, 1.7):
        search.enter(score)
    again.restore(search.state("search."), "search.")
    assert run(search, scores) == run(again, scores)
    np.testing.assert_array_equal(search.weights, again.weights)


def test_a_state_is_a_copy() -> None:
    search = SuccessiveHalving(np.zeros(3), 0.1)
    state = search.state("")
    search.enter(1.0)
    assert state["sums"].tolist() == [0, 0, 0]
    search.restore(state, "")
    search.enter(1.0)
    assert state["sums"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rung": np.array([0, 0, 1])},
        {"rung": np.array([0, 5, 1])},
        {"rung": np.array([0, -1, 1])},
        {"rung": np.array(0)},
        {"rung": np.array([[0, 1, 2]])},
        {"rung": np.array([0.0, 1.0, 2.0])},
        {"sums": [[1], [1, 2]]},
        {"rungs": np.array(2**64 - 1, np.uint64)},
        {"rung": np.array([0, 1])},  # in the first rung, all
        {"sums": np.zeros(4)},
        {"sums": np.zeros((3, 2))},
        {"sums": np.full(3, np.nan)},
        {"weights": np.array([0.5, 0.2, 0.2])},
        {"weights": np.array([1.5, -0.5, 0.0])},
        {"shown": 3},
        {"shown": -1},
        {"rungs": 0.5},
        {"rungs": 4},
    ],
)
def test_states_that_are_refused_change_nothing(wrong: dict[str, Any]) -> None:
    search = SuccessiveHalving(np.zeros(3), 0.1)
    good = search.state("search.")
    search.enter(1.0)
    before = search.state("search.")
    with pytest.raises(MergettaError, match="does not fit"):
        search.restore({**good, **{f"search.{name}": value for name, value in wrong.items()}}, "search.")
    for name, value in search.state("search.").items():
        np.testing.assert_array_equal(value, before[name])
    search.restore(good, "search.")
    assert search.rung.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["rung", "sums", "weights", "shown", "rungs"])
def test_a_state_that_lacks_something_is_refused(name: str) -> None:
    search = SuccessiveHalving(np.zeros(3), 0.1)
    state = search.state("search.")
    del state[f"search.{name}"]
    with pytest.raises(MergettaError, match=f"it has no 'search.{name}'"):
        search.restore(state, "search.")


def test_no_numbers_at_all_are_equal() -> None:
    np.testing.assert_allclose(soften(np.full(4, np.nan)), 0.25)
