"""The images that candidates are compared on: held until they look mixed, shown a few at a time, kept in a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.adapters.forward_only.successive_halving import SuccessiveHalving
from mergetta.adapters.forward_only.trials import Trials
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
    logits = np.outer(images[:, 0, 0, 0], np.arange(CLASSES)) * 100 * (1 + candidate)
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
        np.testing.assert_array_equal(trials.held[5:], images_of([1, 2, 3], 100))
        assert trials.labels.tolist() == [2, 2, 2, 2]  # of those that are held
        before = trials.held
        trials.hold(images_of([0], 200), sure([0]))
        assert trials.held is before

    def test_images_that_do_not_look_mixed_are_let_go(self) -> None:
        trials = Trials(SIZE, 0.5, CLASSES)
        for label in (0, 1):
            trials.hold(images_of([label] * SIZE), sure([label] * SIZE))
            assert trials.held is None
            trials.show(SIZE, SuccessiveHalving(np.zeros(2), 0.1), uncertain)
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
        assert trials.held is not None and trials.held.dtype == np.float32
        np.testing.assert_array_equal(trials.held, kept)


class TestShow:
    @pytest.mark.parametrize("portion", [1, 3, 8, 20])
    def test_whatever_the_portions_the_score_is_the_information(self, portion: int) -> None:
        trials, search, calls = trials_with(SIZE), SuccessiveHalving(np.zeros(3), 0.1), 0
        held = trials.held
        assert held is not None
        while not search.rungs:
            trials.show(portion, search, uncertain)
            calls += 1
        assert calls == -(-3 * SIZE // portion) or portion == 20
        assert trials.count == 3
        np.testing.assert_allclose(search.sums, [information(uncertain(held, c)) for c in range(3)], rtol=1e-9)
        assert trials.held is None  # the next rung has images of its own
        assert trials.shown == 0
        assert not trials.tally.any()

    def test_at_most_as_many_images_as_told(self) -> None:
        trials, search, seen = trials_with(SIZE), SuccessiveHalving(np.zeros(3), 0.1), []

        def predict(images: np.ndarray, candidate: int) -> np.ndarray:
            seen.append((len(images), candidate))
            return uncertain(images, candidate)

        for portion in (5, 6, 4, 1):
            trials.show(portion, search, predict)
            again = trials.restored(trials.state(""), "")
            assert (again.owed, again.shown) == (trials.owed, trials.shown)
        assert seen == [(8, 0), (8, 1)]  # single frames wait until a pass is worth it
        assert (trials.count, trials.owed, trials.begun) == (2, 0, True)

    @pytest.mark.parametrize("portion", [1, 2, 8, 40])
    def test_the_first_candidates_are_shown_more(self, portion: int) -> None:
        """Half of them, by up to eight images for each of the stream; a large portion gives no more than it has."""
        trials, search = Trials(SIZE, 0.5, CLASSES, eager=True), SuccessiveHalving(np.zeros(6), 0.1)
        labels = [i % CLASSES for i in range(SIZE)]
        trials.hold(images_of(labels), sure(labels))
        counts = []
        for _ in range(3 + SIZE):
            trials.show(portion, search, uncertain)
            trials = trials.restored(trials.state(""), "")
            counts.append(trials.count)
        assert counts[:4] == {1: [1, 2, 3, 3], 2: [2, 3, 3, 3], 8: [3, 4, 5, 6], 40: [5, 6, 6, 6]}[portion]
        assert counts[3 + SIZE - 1] == {1: 4, 2: 5}.get(portion, 6)

    def test_nothing_is_shown_before_there_are_enough(self) -> None:
        trials, search = trials_with(SIZE - 1), SuccessiveHalving(np.zeros(3), 0.1)
        trials.show(SIZE, search, lambda images, candidate: pytest.fail("shown too early"))
        assert not trials.begun

    def test_a_candidate_without_numbers_has_lost(self) -> None:
        trials, search = trials_with(SIZE), SuccessiveHalving(np.zeros(2), 0.1)

        def broken(images: np.ndarray, candidate: int) -> np.ndarray:
            return np.full((len(images), CLASSES), np.nan) if candidate == 0 else uncertain(images, candidate)

        for _ in range(6):
            trials.show(3, search, broken)
        assert search.over
        assert np.isfinite(search.sums).all()
        assert search.weights.tolist() == [0, 1]


class TestState:
    @pytest.mark.parametrize("count", [0, 5, SIZE])
    def test_goes_on_exactly(self, count: int) -> None:
        trials = trials_with(count) if count else Trials(SIZE, 0.5, CLASSES)
        searches = [SuccessiveHalving(np.zeros(3), 0.1) for _ in range(2)]
        for search in searches[: 1 if count == SIZE else 0]:
            trials.show(11, search, uncertain)
            searches[1].restore(search.state(""), "")
        again = Trials(SIZE, 0.5, CLASSES).restored(trials.state("trials."), "trials.")
        assert_same_state(again.state(""), trials.state(""))
        labels = [3, 2, 1, 0]
        for each, search in zip((trials, again), searches, strict=True):
            each.hold(images_of(labels, 50), sure(labels))
            each.show(7, search, uncertain)
        assert_same_state(again.state(""), trials.state(""))
        np.testing.assert_array_equal(searches[0].sums, searches[1].sums)

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
        assert again.held.dtype == np.float32
        np.testing.assert_array_equal(again.held, trials.held)

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
            ("shown", SIZE),
            ("shown", -1),
            ("shown", "3"),
            ("labels", np.zeros(CLASSES + 1)),
            ("labels", -np.ones(CLASSES)),
            ("labels", np.full(CLASSES, np.inf)),
            ("tally", np.zeros(CLASSES)),
            ("tally", np.full(1 + CLASSES, np.nan)),
            ("tally", -np.ones(1 + CLASSES)),
            ("held", np.zeros((SIZE + 1, 1, 2, 3), np.uint8)),
            ("held", np.zeros((0, 1, 2, 3), np.uint8)),
            ("held", np.zeros((2, 2, 3), np.uint8)),
            ("held", np.full((2, 1, 2, 3), np.nan)),
            ("held", np.full((2, 1, 2, 3), np.inf)),
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

    @pytest.mark.parametrize("name", ["count", "shown", "labels", "tally"])
    def test_a_state_that_lacks_something_is_refused(self, name: str) -> None:
        state = trials_with(SIZE).state("trials.")
        del state[f"trials.{name}"]
        with pytest.raises(MergettaError, match=f"it has no 'trials.{name}'"):
            trials_with(1).restored(state, "trials.")
