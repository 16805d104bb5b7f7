"""The images that candidates are compared on: held until they look mixed, shown to one after another, kept in a state.

And the race on them: what scores make of weights, by hand.
"""

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

SIZE, CLASSES = 8, 4


def images_of(labels: list[int], start: int = 0) -> np.ndarray:
    """Images that can be told apart, of whole grey levels."""
    levels = (start + np.arange(len(labels))).astype(np.float32) / np.float32(255)
    return np.broadcast_to(levels[:, None, None, None], (len(labels), 1, 2, 3)).copy()


def sure(labels: list[int]) -> np.ndarray:
    return np.eye(CLASSES)[labels]


def trials_with(count: int) -> Trials:
    """So many images of all classes in turn."""
    trials, labels = Trials(SIZE, 0.5, CLASSES), [i % CLASSES for i in range(count)]
    trials.hold(images_of(labels), sure(labels))
    return trials


def uncertain(images: np.ndarray, candidate: int) -> np.ndarray:
    """Predictions that depend on the image and on the candidate."""
    logits = np.outer(unpacked(images)[:, 0, 0, 0], np.arange(CLASSES)) * 100 * (1 + candidate)
    return np.asarray(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


class TestHold:
    def test_until_there_are_enough_and_no_more(self) -> None:
        trials = trials_with(5)
        assert trials.held is not None and len(trials.held) == 5
        labels = [1, 2, 3, 0, 0, 0]
        trials.hold(images_of(labels, 100), sure(labels))
        assert len(trials.held) == SIZE
        np.testing.assert_array_equal(unpacked(trials.held[5:]), images_of([1, 2, 3], 100))
        assert trials.labels.tolist() == [2, 2, 2, 2]  # of those that are held
        before = trials.held
        trials.hold(images_of([0], 200), sure([0]))
        assert trials.held is before

    def test_images_that_do_not_look_mixed_are_let_go(self) -> None:
        trials = Trials(SIZE, 0.5, CLASSES)
        for label in (0, 1):
            trials.hold(images_of([label] * SIZE), sure([label] * SIZE))
            assert trials.held is None
            assert trials.show(SIZE, 2, lambda images, candidate: pytest.fail("they were let go")) == []
            assert not trials.begun
        mixed = [0, 1, 2, 3] * 2
        trials.hold(images_of(mixed), sure(mixed))
        assert trials.held is not None
        assert trials.labels.tolist() == [2, 2, 2, 2]  # those that were let go do not count

    def test_how_mixed_is_enough(self) -> None:
        """(5, 1, 1, 1) of 8: 1 / (28/64 − 1/4 + 1/8) = 3.2 images, of which twice as many are 0.8 of them."""
        labels = [0] * 5 + [1, 2, 3]
        for least, kept in ((0.79, True), (0.81, False)):
            trials = Trials(SIZE, least, CLASSES)
            trials.hold(images_of(labels), sure(labels))
            assert (trials.held is not None) == kept

    def test_the_source_model_is_asked_about_what_does_not_look_mixed(self) -> None:
        """What predicts may say one class of everything because it is poisoned."""
        for opinion, kept in (([0, 1, 2, 3] * 2, True), ([0] * 5 + [1, 2, 3], True), ([1] * SIZE, False)):
            trials, asked = Trials(SIZE, 0.5, CLASSES, source=0.35), []

            def source(images: np.ndarray, labels: list[int] = opinion, to: list[np.ndarray] = asked) -> np.ndarray:
                to.append(images)
                return sure(labels)

            trials.hold(images_of([0] * (SIZE - 1)), sure([0] * (SIZE - 1)), source)
            assert not asked
            trials.hold(images_of([0]), sure([0]), source)
            assert [len(images) for images in asked] == [SIZE] and (trials.held is not None) == kept
        trials = Trials(SIZE, 0.5, CLASSES)
        trials.hold(images_of([0, 1, 2, 3] * 2), sure([0, 1, 2, 3] * 2), lambda images: pytest.fail("they look mixed"))

    def test_images_of_another_size_start_anew(self) -> None:
        trials = trials_with(5)
        trials.hold(np.zeros((2, 1, 9, 9), np.float32), sure([0, 1]))
        assert trials.held is not None and trials.held.shape == (2, 1, 9, 9)
        assert trials.labels.tolist() == [1, 1, 0, 0]

    def test_they_are_kept_as_they_were(self) -> None:
        images, trials = images_of([0, 1]), Trials(SIZE, 0.5, CLASSES)
        trials.hold(images.astype(np.float64), sure([0, 1]))
        kept = images.copy()
        images[:] = 9
        assert trials.held is not None and trials.held.dtype == np.uint8
        np.testing.assert_array_equal(unpacked(trials.held), kept)

    def test_bytes_and_numbers_together_are_numbers(self) -> None:
        trials, odd = Trials(SIZE, 0.5, CLASSES), images_of([0]) + np.float32(0.001)
        for images in (images_of([0, 1]), odd, images_of([2])):
            trials.hold(images, sure([0] * len(images)))
        assert trials.held is not None and trials.held.dtype == np.float32
        np.testing.assert_array_equal(trials.held, np.concatenate([images_of([0, 1]), odd, images_of([2])]))
        again = trials.restored(trials.state(""), "")
        assert again.held is not None
        np.testing.assert_array_equal(again.held, trials.held)


class TestShow:
    @pytest.mark.parametrize("portion", [1, 3, 8, 20])
    def test_whatever_the_portions_the_score_is_the_information(self, portion: int) -> None:
        trials = trials_with(SIZE)
        scores: list[float] = []
        assert trials.held is not None
        held = unpacked(trials.held)
        for _ in range(-(-3 * SIZE // portion)):
            assert trials.count == len(scores) < 3
            scores += trials.show(portion, 3, uncertain)
        assert trials.count == 3
        np.testing.assert_allclose(scores, [information(uncertain(held, c)) for c in range(3)], rtol=1e-9)
        assert trials.held is None  # nobody's images are kept longer than needed
        assert trials.owed == 0

    @pytest.mark.parametrize("eager", [False, True])
    @pytest.mark.parametrize("portion", [1, 7, 8, 20, 64, 500])
    def test_all_are_shown_the_same_images_once(self, portion: int, eager: bool) -> None:
        """Also where a candidate's images take several passes, or one portion is enough for all."""
        size, count = 2 * SIZE + 3, 5
        trials, labels = Trials(size, 0.5, CLASSES, eager), [i % CLASSES for i in range(size)]
        trials.hold(images_of(labels), sure(labels))
        seen: list[list[np.ndarray]] = [[] for _ in range(count)]

        def predict(images: np.ndarray, candidate: int) -> np.ndarray:
            seen[candidate].append(images.copy())
            return uncertain(images, candidate)

        scores: list[float] = []
        while trials.count < count:
            scores += trials.show(portion, count, predict)
        for parts in seen:
            np.testing.assert_array_equal(unpacked(np.concatenate(parts)), images_of(labels))
        expected = [information(uncertain(images_of(labels), candidate)) for candidate in range(count)]
        np.testing.assert_allclose(scores, expected, rtol=1e-9)

    def test_nothing_is_shown_after_the_last(self) -> None:
        """Not even if images are held again."""
        trials, labels = trials_with(SIZE), [i % CLASSES for i in range(SIZE)]
        assert len(trials.show(2 * SIZE, 2, uncertain)) == 2
        for _ in range(2):
            assert trials.show(2 * SIZE, 2, lambda images, candidate: pytest.fail("all have been shown them")) == []
            assert (trials.count, trials.owed) == (2, 0)
            trials.hold(images_of(labels), sure(labels))

    def test_at_most_as_many_images_as_told(self) -> None:
        trials, seen = trials_with(SIZE), []

        def predict(images: np.ndarray, candidate: int) -> np.ndarray:
            seen.append((len(images), candidate))
            return uncertain(images, candidate)

        for portion in (5, 6, 4, 1):
            trials.show(portion, 3, predict)
            again = trials.restored(trials.state(""), "")
            assert again.owed == trials.owed
        assert seen == [(8, 0), (8, 1)]
        assert (trials.count, trials.owed, trials.begun) == (2, 0, True)

    @pytest.mark.parametrize("portion", [1, 2, 8, 40])
    def test_the_first_candidates_are_shown_more(self, portion: int) -> None:
        """One more than half, by up to eight for each of the stream; a large portion gives no more than it has."""
        trials = Trials(SIZE, 0.5, CLASSES, eager=True)
        labels = [i % CLASSES for i in range(SIZE)]
        trials.hold(images_of(labels), sure(labels))
        counts = []
        for _ in range(3 + SIZE):
            trials.show(portion, 6, uncertain)
            trials = trials.restored(trials.state(""), "")
            counts.append(trials.count)
        assert counts[:4] == {1: [1, 2, 3, 4], 2: [2, 4, 4, 4], 8: [4, 5, 6, 6], 40: [5, 6, 6, 6]}[portion]
        assert counts[3 + SIZE - 1] == {1: 4}.get(portion, 6)

    def test_nothing_is_shown_before_there_are_enough(self) -> None:
        trials = trials_with(SIZE - 1)
        assert trials.show(SIZE, 3, lambda images, candidate: pytest.fail("shown too early")) == []
        assert not trials.begun

    def test_a_candidate_without_numbers_has_lost(self) -> None:
        """Also if only a single image of its is broken."""
        for images_broken in (SIZE, 1):
            trials, scores = trials_with(SIZE), []
            assert trials.held is not None
            held = unpacked(trials.held)

            def broken(images: np.ndarray, candidate: int, count: int = images_broken) -> np.ndarray:
                p = uncertain(images, candidate)
                p[: 0 if candidate else count] = np.nan
                return p

            for _ in range(6):
                scores += trials.show(3, 2, broken)
            assert len(scores) == 2
            assert scores[0] == -BROKEN
            assert scores[1] == pytest.approx(information(uncertain(held, 1)))


class TestState:
    @pytest.mark.parametrize("count", [0, 5, SIZE])
    def test_goes_on_exactly(self, count: int) -> None:
        trials = trials_with(count) if count else Trials(SIZE, 0.5, CLASSES)
        assert len(trials.show(11, 3, uncertain)) == (count == SIZE)
        again = Trials(SIZE, 0.5, CLASSES).restored(trials.state("trials."), "trials.")
        assert_same_state(again.state(""), trials.state(""))
        labels = [3, 2, 1, 0]
        found = []
        for each in (trials, again):
            each.hold(images_of(labels, 50), sure(labels))
            found.append(each.show(7, 3, uncertain) + each.show(9, 3, uncertain))
        assert_same_state(again.state(""), trials.state(""))
        assert len(found[0]) == {0: 0, 5: 2, SIZE: 2}[count]
        assert found[0] == found[1]

    def test_images_are_bytes_where_nothing_is_lost(self) -> None:
        """All grey levels come back as they were."""
        levels = np.arange(256, dtype=np.uint8).reshape(4, 1, 8, 8)
        trials = Trials(SIZE, 0.5, CLASSES)
        trials.hold(levels / np.float32(255), sure([0, 1, 2, 3]))
        state = trials.state("")
        assert state["held"].dtype == np.uint8
        np.testing.assert_array_equal(state["held"], levels)
        again = trials.restored(state, "")
        assert trials.held is not None and again.held is not None
        np.testing.assert_array_equal(unpacked(again.held), levels / np.float32(255))

    @pytest.mark.parametrize("odd", [0.5, 1.5, -1 / 255, 1 / 255 + 1e-6])
    def test_images_are_numbers_where_something_would_be_lost(self, odd: float) -> None:
        trials, images = Trials(SIZE, 0.5, CLASSES), images_of([0, 1])
        images[1, 0, 1, 2] = odd
        trials.hold(images, sure([0, 1]))
        state = trials.state("")
        assert state["held"].dtype == np.float32
        again = trials.restored(state, "")
        assert again.held is not None
        np.testing.assert_array_equal(again.held, images)

    def test_without_images_there_are_none(self) -> None:
        trials = Trials(SIZE, 0.5, CLASSES)
        assert "held" not in trials.state("")
        assert trials_with(3).restored(trials.state(""), "").held is None

    def test_is_a_copy(self) -> None:
        trials = trials_with(5)
        state = trials.state("")
        trials.hold(images_of([0, 1]), sure([0, 1]))
        assert len(state["held"]) == 5
        assert state["labels"].sum() == 5

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("count", -1),
            ("count", 0.5),
            ("count", 2**70),
            ("owed", SIZE + 1),
            ("owed", -1),
            ("owed", "3"),
            ("labels", np.zeros(CLASSES + 1)),
            ("labels", -np.ones(CLASSES)),
            ("labels", np.full(CLASSES, np.inf)),
            ("held", np.zeros((SIZE + 1, 1, 2, 3), np.uint8)),
            ("held", np.zeros((0, 1, 2, 3), np.uint8)),
            ("held", np.zeros((2, 2, 3), np.uint8)),
            ("held", np.full((2, 1, 2, 3), np.nan)),
            ("held", np.full((2, 1, 2, 3), np.inf)),
            ("held", np.full((2, 1, 2, 3), 1e38)),
            ("held", np.full((2, 1, 2, 3), "1")),
            ("held", np.zeros((2, 1, 2, 3), complex)),
            ("held", [[1], [1, 2]]),
            ("held", None),
            ("held", np.zeros((SIZE, 1, 2, 0), np.uint8)),
        ],
    )
    def test_hostile_states_are_refused(self, name: str, value: Any) -> None:
        trials = trials_with(5)
        good, before = trials_with(SIZE).state("trials."), trials.state("")
        with pytest.raises(MergettaError, match=f"does not fit the adapter: '?trials.{name}|trials.held"):
            trials.restored({**good, f"trials.{name}": value}, "trials.")
        assert_same_state(trials.state(""), before)

    @pytest.mark.parametrize("name", ["count", "owed", "labels"])
    def test_a_state_that_lacks_something_is_refused(self, name: str) -> None:
        state = trials_with(SIZE).state("trials.")
        del state[f"trials.{name}"]
        with pytest.raises(MergettaError, match=f"it has no 'trials.{name}'"):
            trials_with(1).restored(state, "trials.")


CANDIDATES = np.array([[0.5, 0.5, 0.0], [2.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
"""The last weight is the source model's."""


def race_of(candidates: np.ndarray = CANDIDATES, caution: float = 0.04, temperature: float = 0.1) -> Race:
    return Race(Trials(SIZE, 0.5, CLASSES), candidates, caution, temperature)


def by_first_weight(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Predictions that depend on the image and on the candidate, here its weights."""
    return uncertain(images, int(2 * weights[0]))


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
        assert not race.over
        race.scores = np.array([1.0, 1.1, 1.06, 0.96])  # 0.96, 1.02, 1.02 and 0.96
        total = 2 + 2 * odds
        np.testing.assert_allclose(race.weights, np.array([0.5 + 3 * odds, 0.5 + 2 * odds, 1]) / total)
        assert race.over

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

        def predict(images: np.ndarray, weights: np.ndarray) -> np.ndarray:
            p = uncertain(images, int(weights.argmax()))
            return np.full_like(p, np.nan) if weights[broken] else p

        for tried in range(1, 5):
            race.run(images_of(labels), sure(labels), predict)
            assert np.isfinite(race.scores).all()
            others = [i for i in range(tried) if i != broken]
            assert np.flatnonzero(race.weights).tolist() == (others or [0])
        assert race.over

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
        assert all(name in ("candidates", "scores") or name.startswith("trials.") for name in state)
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

    @pytest.mark.parametrize("name", ["candidates", "scores", "trials.count"])
    def test_a_state_that_lacks_something_is_refused(self, name: str) -> None:
        state = race_of().state()
        del state[name]
        with pytest.raises(MergettaError, match=f"it has no '{name}'"):
            race_of().restored(state)
