"""The race between candidates, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergetta import MergettaError
from mergetta.adapters.forward_only.race import BROKEN, Race, soften


def run(race: Race, entropies: list[float], mean_entropy: float = 2.0) -> list[list[int]]:
    """The field of each round, if each candidate always has the same entropy."""
    fields = []
    while not race.over:
        if not race.shown:
            fields.append(race.field.tolist())
        race.enter(mean_entropy, entropies[race.next])
    return fields


def test_the_better_half_goes_on() -> None:
    race = Race(np.zeros(7), temperature=0.1)
    assert run(race, [0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]) == [[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3], [6, 5]]
    assert race.rounds == 3
    # after three rounds 0.1 between the last two counts √3 times as much
    odds = np.exp(np.sqrt(3) * 0.1 / 0.1)
    np.testing.assert_allclose(race.standing, [0, 0, 0, 0, 0, 1 / (1 + odds), odds / (1 + odds)])


def test_a_handicap_counts_less_from_round_to_round() -> None:
    """The first is better by 0.03 and has a handicap of 0.04: 0.03 < 0.04, but √2 · 0.03 > 0.04."""
    race = Race(np.array([0.04, 0, 0]), temperature=0.01)
    for entropy in (0.5, 0.53, 0.9):
        race.enter(2.0, entropy)
    assert race.standing.argmax() == 1
    assert race.field.tolist() == [1, 0]
    for entropy in (0.53, 0.5):
        race.enter(2.0, entropy)
    assert race.over
    assert race.standing.argmax() == 0


def test_in_the_first_round_those_shown_so_far_stand_later_those_of_the_last_complete_one() -> None:
    race = Race(np.zeros(4), temperature=0.01)
    assert race.standing.tolist() == [1, 0, 0, 0]
    race.enter(2.0, 1.0)
    race.enter(2.0, 0.5)
    assert race.standing.argmax() == 1
    race.enter(2.0, 1.0)
    race.enter(2.0, 0.9)
    before = race.standing
    race.enter(0.0, 9.0)  # half of a round
    assert race.standing is before


def test_one_round_at_most() -> None:
    race = Race(np.zeros(8), 0.1, rounds=1)
    assert len(run(race, [1.0] * 8)) == 1
    np.testing.assert_allclose(race.standing, 1 / 8)


def test_what_broke_once_has_lost() -> None:
    race = Race(np.zeros(3), temperature=0.01)
    for mean, each in ((0.0, BROKEN), (1.0, 0.5), (1.0, 0.6)):
        race.enter(mean, each)
    assert race.field.tolist() == [1, 2]
    assert race.standing[0] == 0
    for mean, each in ((0.4, BROKEN), (0.4, 0.6)):  # in later rounds too
        race.enter(mean, each)
    assert race.standing.tolist() == [0, 0, 1]


@given(st.lists(st.floats(0, 3), min_size=1, max_size=40))
def test_it_ends_and_the_best_is_first(entropies: list[float]) -> None:
    race = Race(np.zeros(len(entropies)), temperature=0.01)
    fields = run(race, entropies)
    assert [len(field) for field in fields[1:]] == [(len(field) + 1) // 2 for field in fields[:-1]]
    assert len(fields[-1]) <= 2
    assert entropies[int(race.standing.argmax())] == pytest.approx(min(entropies), abs=1e-9)
    assert race.standing.sum() == pytest.approx(1)


def test_a_state_goes_on_exactly() -> None:
    entropies = [0.7, 0.6, 0.5, 0.4, 0.3]
    race, again = (Race(np.zeros(5), 0.1) for _ in range(2))
    for entropy in (*entropies, 0.3):
        race.enter(2.0, entropy)
    again.restore("race", race.state("race"))
    assert run(race, entropies) == run(again, entropies)
    np.testing.assert_array_equal(race.standing, again.standing)


@pytest.mark.parametrize(
    "wrong",
    [
        {"field": np.array([0, 0, 1])},
        {"field": np.array([0, 5, 1])},
        {"field": np.array(0)},
        {"field": np.array([[0, 1, 2]])},
        {"field": np.array([0.0, 1.0, 2.0])},
        {"sums": [[1], [1, 2]]},
        {"rounds": np.array(2**64 - 1, np.uint64)},
        {"field": np.array([0, 1])},  # in the first round, all
        {"sums": np.zeros((4, 2))},
        {"sums": np.full((3, 2), np.nan)},
        {"standing": np.array([0.5, 0.2, 0.2])},
        {"standing": np.array([1.5, -0.5, 0.0])},
        {"shown": 3},
        {"shown": -1},
        {"rounds": 0.5},
    ],
)
def test_states_that_are_refused(wrong: dict[str, Any]) -> None:
    race = Race(np.zeros(3), 0.1)
    good = race.state("race")
    race.restore("race", good)
    with pytest.raises(MergettaError, match="does not fit"):
        race.restore("race", {**good, **{f"race.{name}": value for name, value in wrong.items()}})
    assert race.field.tolist() == [0, 1, 2]


def test_no_numbers_at_all_are_equal() -> None:
    np.testing.assert_allclose(soften(np.full(4, np.nan)), 0.25)
