"""A race of candidates: what scores make of weights, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergetta import MergettaError
from mergetta.adapters.forward_only.race import Race
from mergetta.adapters.forward_only.trials import BROKEN, Trials, unpacked
from mergetta.losses.information import information
from mergetta.losses.probabilities import softmax
from tests.trial_images import CLASSES, SIZE, assert_same_state, images_of, sure, uncertain

CANDIDATES = np.array([[0.5, 0.5, 0.0], [2.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
"""The last weight is the source model's."""


def race_of(candidates: np.ndarray = CANDIDATES, caution: float = 0.04, temperature: float = 0.1) -> Race:
    def handicap(chosen: np.ndarray) -> np.ndarray:
        return np.asarray(caution * np.sqrt(chosen[:, :-1].sum(axis=1)))

    return Race(Trials(SIZE, 0.5, CLASSES), candidates, handicap, temperature)


def by_first_weight(images: np.ndarray, weights: np.ndarray, alone: bool = True) -> np.ndarray:
    """Predictions that depend on the image and on the candidate, here its weights."""
    return uncertain(images, int(2 * weights[0]))


LABELS = [i % CLASSES for i in range(SIZE)]


def run(race: Race, portion: int = SIZE) -> None:
    labels = [i % CLASSES for i in range(portion)]
    race.run(images_of(labels), sure(labels), by_first_weight)


class TestRace:
    def test_until_somebody_has_been_tried_it_is_the_first(self) -> None:
        race = race_of()
        for _ in range(3):
            assert not race.begun and not race.over
            np.testing.assert_array_equal(race.weights, CANDIDATES[0])
            run(race, 2)

    def test_weights_by_hand(self) -> None:
        """Members have 1, 4, 1 and 0 of the candidates' weights: a caution of 0.04, 0.08, 0.04 and 0."""
        race = race_of()
        race.scores = np.array([1.0])
        np.testing.assert_allclose(race.weights, [0.5, 0.5, 0])
        race.scores = np.array([1.0, 1.1])  # 0.96 and 1.02
        odds = np.exp(0.06 / 0.1)
        each = (0.5 + 2 * odds) / (1 + odds)
        np.testing.assert_allclose(race.weights, [each, each, 0])
        race.scores = np.array([1.0, 1.1, 1.06, 0.96])  # 0.96, 1.02, 1.02 and 0.96
        total = 2 + 2 * odds
        np.testing.assert_allclose(race.weights, np.array([0.5 + 3 * odds, 0.5 + 2 * odds, 1]) / total)

    def test_what_is_shown_is_what_is_scored(self) -> None:
        race, counts = race_of(), []
        while not race.over:
            run(race)
            counts.append(len(race.scores))
            assert race.trials.count == counts[-1]
        assert counts == [1, 2, 3, 4]
        images = images_of([0] * SIZE)
        expected = [information(by_first_weight(images, weights)) for weights in CANDIDATES]
        np.testing.assert_allclose(race.scores, expected, rtol=1e-9)
        assert race.trials.held is None

    @given(st.lists(st.floats(-3, 3), min_size=1, max_size=40))
    def test_without_caution_the_best_has_most(self, scores: list[float]) -> None:
        race = race_of(np.eye(len(scores) + 1)[:-1], caution=0, temperature=0.01)
        race.scores = np.array(scores)
        assert scores[int(race.weights.argmax())] == pytest.approx(max(scores), abs=1e-9)
        assert race.weights.sum() == pytest.approx(1)
        assert race.weights.min() >= 0

    @pytest.mark.parametrize("broken", range(4))
    def test_what_is_broken_gets_no_weight(self, broken: int) -> None:
        """Whenever it is tried, and although nobody is known to be better until the second has been."""
        race, labels = race_of(np.eye(4)), [i % CLASSES for i in range(SIZE)]

        def predict(images: np.ndarray, weights: np.ndarray, alone: bool) -> np.ndarray:
            p = uncertain(images, int(weights.argmax()))
            return np.full_like(p, np.nan) if weights[broken] else p

        for tried in range(1, 5):
            race.run(images_of(labels), sure(labels), predict)
            assert np.isfinite(race.scores).all()
            others = [i for i in range(tried) if i != broken]
            assert np.flatnonzero(race.weights).tolist() == (others or [0])
        assert race.over

    def test_images_that_look_mixed_stand_for_the_domain(self) -> None:
        """Candidates are shown them by their own statistics, and who has won gets them to begin with."""
        race, ways = race_of(temperature=0.01), []

        def predict(images: np.ndarray, weights: np.ndarray, alone: bool) -> np.ndarray:
            ways.append(alone)
            return uncertain(images, int(2 * weights[0]))

        labels = [i % CLASSES for i in range(SIZE)]
        images, p = images_of(labels), sure(labels)
        assert race.run(images, p, predict) is None  # it is the first candidate still
        found, before = race.run(images, p, predict), race.trials.held
        assert before is not None and found is before  # one that is surer
        assert ways == [True, True]

    def test_images_that_only_the_source_model_finds_mixed_do_not(self) -> None:
        race, ways = race_of(temperature=0.01), []
        race.trials.source = 0.25

        def predict(images: np.ndarray, weights: np.ndarray, alone: bool) -> np.ndarray:
            ways.append(alone)
            labels = np.arange(len(images)) % CLASSES
            return sure(list(labels)) if weights[-1] else uncertain(images, int(2 * weights[0]))

        piled = [0] * SIZE
        while not race.over:
            assert race.run(images_of(piled), sure(piled), predict) is None
        assert not any(ways)
        assert np.abs(race.weights - CANDIDATES[0]).sum() > 0.2

    def test_finals_by_hand(self) -> None:
        """The best six of eight go on, on other images; scores are means over all that they have been shown."""
        race = Race(Trials(SIZE, 0.5, CLASSES), np.eye(9)[:8], lambda chosen: np.zeros(len(chosen)), 0.1, finals=2)
        values, seen = np.array([0.1, 0.9, 0.5, 0.6, 0.7, 0.2, 0.8, 0.3]), []

        def predictions(start: int, candidate: int) -> np.ndarray:
            """Surer or less so; by how much depends on the images."""
            return softmax(np.eye(CLASSES)[LABELS] * (1 + values[candidate] + 0.3 * (start * (candidate + 1) % 5)))

        def predict(images: np.ndarray, weights: np.ndarray, alone: bool) -> np.ndarray:
            seen.append(round(float(unpacked(images)[0, 0, 0, 0] * 255)))
            return predictions(seen[-1], int(weights.argmax()))

        scores: list[list[float]] = []
        while not race.over:
            race.run(images_of(LABELS, start=SIZE * len(seen)), sure(LABELS), predict)
            scores.append(race.scores.tolist())
        assert race.tried == 8 + 6 + 6 == len(seen)
        assert [len(each) for each in scores] == [*range(1, 8), *[6] * 13]
        starts = [seen[0], seen[8], seen[14]]
        assert seen == [starts[0]] * 8 + [starts[1]] * 6 + [starts[2]] * 6
        assert len(set(starts)) == 3
        each = np.array([[information(predictions(start, c)) for start in starts] for c in range(8)])
        best = np.argsort(-each[:, 0])[:6]
        better = best[np.argsort(-each[best, :2].mean(axis=1), kind="stable")]
        assert race.candidates.argmax(axis=1).tolist() == better.tolist()
        np.testing.assert_allclose(race.scores, each[better].mean(axis=1))
        assert scores[7] == scores[12] and scores[13] == scores[18]  # a final counts once it is over
        again = Race(
            Trials(SIZE, 0.5, CLASSES), np.eye(9)[:8], lambda chosen: np.zeros(len(chosen)), 0.1, finals=2
        ).restored(race.state())
        assert again.over and again.begun
        assert_same_state(again.state(), race.state())

    def test_if_all_are_broken_weights_are_numbers(self) -> None:
        race = race_of(np.eye(4), caution=0)
        race.scores = np.full(4, -BROKEN)
        np.testing.assert_allclose(race.weights, 1 / 4)

    @pytest.mark.parametrize("portions", [[], [5], [SIZE], [SIZE, 12], [SIZE] * 4])
    def test_a_state_goes_on_exactly(self, portions: list[int]) -> None:
        race = race_of()
        for portion in portions:
            run(race, portion)
        state = race.state()
        assert all(
            name in ("candidates", "scores", "again", "rounds", "tried") or name.startswith("trials.") for name in state
        )
        again = race_of(np.eye(3)).restored(state)  # its candidates are those of the state
        assert_same_state(again.state(), state)
        while not race.over:
            for each in (race, again):
                run(each, 3)
            assert_same_state(again.state(), race.state())
            np.testing.assert_array_equal(again.weights, race.weights)
        assert again.over

    def test_a_state_is_a_copy(self) -> None:
        race = race_of()
        run(race)
        state = race.state()
        for each in (race, race.restored(state)):
            each.scores *= 2
            each.candidates *= 2
        np.testing.assert_array_equal(state["candidates"], CANDIDATES)
        assert state["scores"].tolist() == [race.scores[0] / 2]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"scores": np.zeros(0)},
            {"scores": np.zeros(1)},
            {"scores": np.zeros(3)},
            {"scores": np.zeros(5)},
            {"scores": np.zeros((2, 1))},
            {"scores": np.array(1.0)},
            {"scores": np.array([1.0, np.nan])},
            {"scores": np.array([1.0, np.inf])},
            {"scores": np.array(["1", "1"])},
            {"scores": np.zeros(2, complex)},
            {"scores": [[1], [1, 2]]},
            {"scores": None},
            {"scores": np.zeros(5), "trials.count": 5},  # more than there are candidates
            {"trials.count": 1},
            {"trials.count": 3},
            {"candidates": CANDIDATES[:1]},
            {"candidates": CANDIDATES[:0]},
            {"candidates": CANDIDATES[:0], "scores": np.zeros(0), "trials.count": 0},
            {"candidates": CANDIDATES[:, :2]},
            {"candidates": CANDIDATES[0]},
            {"candidates": -CANDIDATES},
            {"candidates": np.full((4, 3), np.nan)},
            {"again": np.zeros(1)},
            {"rounds": 1},
            {"rounds": -1},
            {"rounds": 0.5},
            {"tried": -1},
        ],
    )
    def test_hostile_states_are_refused(self, wrong: dict[str, Any]) -> None:
        race, other = race_of(), race_of()
        run(race)
        for _ in range(2):
            run(other)
        good, before = other.state(), race.state()
        with pytest.raises(MergettaError, match="does not fit"):
            race.restored({**good, **wrong})
        assert_same_state(race.state(), before)
        assert_same_state(race.restored(good).state(), good)

    @pytest.mark.parametrize("name", ["candidates", "scores", "again", "rounds", "tried", "trials.count"])
    def test_a_state_that_lacks_something_is_refused(self, name: str) -> None:
        state = race_of().state()
        del state[name]
        with pytest.raises(MergettaError, match=f"it has no '{name}'"):
            race_of().restored(state)
