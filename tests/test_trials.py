"""The images that candidates are compared on: held until they look mixed, shown to one after another, kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.adapters.forward_only.trials import BROKEN, Trials, unpacked
from mergetta.losses.information import information
from tests.trial_images import CLASSES, SIZE, assert_same_state, images_of, sure, trials_with, uncertain


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
