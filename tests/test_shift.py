"""Has the domain changed? Distances, portions and states, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta.errors import MergettaError
from mergetta.streams.shift import ShiftDetector, distance


def signature(mean: float) -> np.ndarray:
    return np.array([[mean], [1.0]])


class TestShift:
    def test_distance_by_hand(self) -> None:
        """Means 0 and 1, variances 1 and 2: (1 + 1) / 4 + (2 + 1) / 2 − 1."""
        assert distance(signature(0), np.array([[1.0], [2.0]])) == pytest.approx(1.0)
        assert distance(np.zeros((2, 3)), np.zeros((2, 3))) == pytest.approx(0, abs=1e-9)

    @pytest.mark.parametrize("size", [1, 5, 10, 25])
    def test_portions(self, size: int) -> None:
        """Whatever the batches are, a portion has at least ten images, and the first is no shift."""
        detector, found = ShiftDetector(0.2, portion=10), []
        for mean in (0.0, 0.0, 2.0, 2.0):
            found.append(sum(detector.add(signature(mean), size) for _ in range(-(-10 // size))))
        assert found == [0, 0, 1, 0]
        np.testing.assert_allclose(detector.running, signature(2.0))

    def test_what_is_known_before_the_first_portion(self) -> None:
        detector = ShiftDetector(0.2, portion=10)
        assert detector.signature is None
        detector.add(signature(1.0), 4)
        np.testing.assert_allclose(detector.signature, signature(1.0))
        assert detector.running is None

    def test_the_running_signature_moves_by_a_fifth(self) -> None:
        detector = ShiftDetector(10.0, portion=1)
        for mean in (0.0, 1.0):
            assert not detector.add(signature(mean), 1)
        np.testing.assert_allclose(detector.running, [[0.2], [1.0]])

    @pytest.mark.parametrize(
        ("mean", "one_class", "shifted"), [(0.5, False, True), (0.5, True, False), (4.0, True, True)]
    )
    def test_the_less_mixed_the_larger_a_distance_it_takes(self, mean: float, one_class: bool, shifted: bool) -> None:
        """0.5² = 0.25 > 0.2; 64 of one class of ten are mixed by 2 / (0.9 + 1/64) / 64 = 0.034; 0.2 / 0.034 = 5.9."""
        classes = np.eye(10)[0] * 64 if one_class else np.full(10, 6.4)
        detector = ShiftDetector(0.2, portion=64)
        detector.add(signature(0.0), 64, classes)
        assert detector.add(signature(mean), 64, classes) == shifted

    def test_classes_are_those_of_the_portion(self) -> None:
        detector = ShiftDetector(0.2, portion=4)
        detector.add(signature(0.0), 4, np.array([4.0, 0.0]))
        assert detector.classes is None
        for label in (0, 1, 0):
            assert not detector.add(signature(0.7), 1, np.eye(2)[label])
        assert detector.add(signature(0.7), 1, np.eye(2)[1])  # one by one, but two of each

    def test_what_is_not_finite_leaves_no_trace(self) -> None:
        detector = ShiftDetector(0.2, portion=10)
        for images in (4, 10):
            detector.add(signature(0.0), images, np.array([images / 2, images / 2]))
            before = detector.state("s.")
            assert not detector.add(signature(np.nan), 20, np.array([20.0, 0.0]))
            after = detector.state("s.")
            assert before.keys() == after.keys()
            assert all(np.array_equal(after[name], value) for name, value in before.items())
        assert detector.running is not None

    @pytest.mark.parametrize("images", [0, 3, 10, 13])
    def test_states_go_on_exactly(self, images: int) -> None:
        detector = ShiftDetector(0.2, portion=10)
        for _ in range(images):
            detector.add(signature(0.0), 1, np.array([1.0, 0.0]))
        again = ShiftDetector(0.2, portion=10).restored(detector.state("s."), "s.", 2)
        for mean in (0.1, 3.0):
            found = [each.add(signature(mean), 10, np.array([5.0, 5.0])) for each in (detector, again)]
            assert found[0] == found[1]
        np.testing.assert_array_equal(detector.running, again.running)

    @pytest.mark.parametrize(
        "changes",
        [
            {"running": np.zeros(2)},
            {"running": np.full((2, 1), np.nan)},
            {"running": np.zeros((2, 5))},  # not the channels of what came since
            {"classes": -np.ones(2)},
            {"classes": np.ones((2, 2))},
            {"mixed": 2.0},
            {"recent.count": -1.0},
            {"recent.sums": np.zeros((3, 1))},
        ],
    )
    def test_hostile_states_are_refused(self, changes: dict[str, Any]) -> None:
        detector = ShiftDetector(0.2, portion=4)
        for images in (4, 2):
            detector.add(signature(0.0), images, np.full(2, images / 2))
        state = detector.state("s.")
        detector.restored(state, "s.", 2, 1)
        with pytest.raises(MergettaError, match="does not fit"):
            detector.restored({**state, **{f"s.{name}": value for name, value in changes.items()}}, "s.", 2)
        with pytest.raises(MergettaError, match="does not fit"):
            detector.restored(state, "s.", 2, 7)
