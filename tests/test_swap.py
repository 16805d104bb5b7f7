"""Another bundle in the middle of a stream: its merge, moved by what the stream has taught so far."""

from __future__ import annotations

import numpy as np
import pytest

from mergetta import Bundle, MergettaError, ZOMerge, build_bundle
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.wrappers.governed import Governed

from .numpy_runtime import NumpyRuntime
from .stub_hub import make_bundle
from .test_governed import domain


def tiny(basis: list[list[float]], coefficients: list[float], frozen: tuple[str, ...] = ()) -> Bundle:
    """One group in the plane that tells, one that does not."""
    rest = {"b": np.zeros(1)}
    return Bundle(
        {"a": np.array([1.0, 2.0]), **rest},
        {"a": np.array(basis).reshape(-1, 2), "b": np.ones((1, 1))},
        {"a": np.array(coefficients), "b": np.array([0.5])},
        frozen,
    )


class PlaneRuntime(NumpyRuntime):
    family = ""

    def __init__(self) -> None:
        super().__init__()
        self.groups = {"a": np.array([1.0, 2.0], np.float32), "b": np.zeros(1, np.float32)}


def moved(bundle: Bundle, **coefficients: list[float]) -> ZOMerge:
    adapter = ZOMerge(PlaneRuntime(), bundle, loss="entropy")
    adapter.coefficients = {**adapter.coefficients, **{n: np.array(w) for n, w in coefficients.items()}}
    adapter.steps = 5
    return adapter


class TestSwap:
    def test_by_hand(self) -> None:
        """The movement (0.3, 0.1) along x and y, seen from the one direction (0.6, 0.8), is 0.18 + 0.08."""
        adapter = moved(tiny([[1, 0], [0, 1]], [0.5, -0.5]), a=[0.8, -0.4], b=[0.75])
        assert adapter.swap(tiny([[0.6, 0.8]], [2.0]))
        np.testing.assert_allclose(adapter.coefficients["a"], [2.26], rtol=1e-6)
        np.testing.assert_allclose(adapter.coefficients["b"], [0.75])
        assert adapter.steps == 5

    def test_a_rotated_basis_gives_the_same_merge(self) -> None:
        c, s = np.cos(0.7), np.sin(0.7)
        old = tiny([[1, 0], [0, 1]], [0.5, -0.5])
        new = tiny([[c, s], [-s, c]], [0.5 * c - 0.5 * s, -0.5 * s - 0.5 * c])
        adapter = moved(old, a=[0.8, -0.4])
        before = adapter.bundle.merge(adapter.coefficients)
        adapter.swap(new)
        after = adapter.bundle.merge(adapter.coefficients)
        np.testing.assert_allclose(after["a"], before["a"], atol=1e-6)

    def test_what_the_new_basis_cannot_express_is_lost(self) -> None:
        adapter = moved(tiny([[1, 0]], [0.5]), a=[0.9])
        adapter.swap(tiny([[0, 1]], [0.25]))
        np.testing.assert_allclose(adapter.coefficients["a"], [0.25], atol=1e-12)

    def test_a_basis_that_is_not_orthonormal(self) -> None:
        adapter = moved(tiny([[1, 0], [0, 1]], [0, 0]), a=[0.4, 0.2])
        adapter.swap(tiny([[2, 0], [2, 2]], [0, 0]))
        merged = adapter.bundle.merge(adapter.coefficients)
        np.testing.assert_allclose(merged["a"], [1.4, 2.2], rtol=1e-6)

    def test_groups_that_begin_or_cease_to_move(self) -> None:
        adapter = moved(tiny([[1, 0]], [0.5]), a=[0.9], b=[0.7])
        adapter.swap(tiny([[1, 0]], [0.5], frozen=("a",)))
        assert list(adapter.coefficients) == ["b"]
        adapter.swap(tiny([[1, 0]], [0.6]))
        np.testing.assert_allclose(adapter.coefficients["a"], [0.6], rtol=1e-6)
        np.testing.assert_allclose(adapter.coefficients["b"], [0.7])
        adapter.swap(tiny([], []))
        assert list(adapter.coefficients) == ["b"]

    def test_the_same_bundle_changes_nothing(self) -> None:
        one, other = (self.adapted() for _ in range(2))
        one.swap(Bundle.from_bytes(make_bundle().to_bytes()))
        assert one.status().phase == other.status().phase == SETTLED
        assert one.adapter.history == other.adapter.history
        images = domain(1, 6)
        for batch in images:
            np.testing.assert_array_equal(one.predict(batch), other.predict(batch))
        for name, value in other.state_dict().items():
            np.testing.assert_array_equal(one.state_dict()[name], value)

    def test_another_bundle(self) -> None:
        governed = self.adapted()
        steps, prior = governed.adapter.steps, governed.adapter.loss.mean_prediction
        before = governed.adapter.merged()
        governed.swap(make_bundle(1))
        assert governed.status().phase == ADAPTING
        assert governed.shifts == 0
        assert not governed.adapter.history
        np.testing.assert_array_equal(governed.adapter.loss.mean_prediction, prior)
        governed.predict(domain(0, 1)[0])
        assert governed.adapter.steps == steps + 1
        assert any((governed.adapter.merged()[n] != before[n]).any() for n in before)

    def test_one_that_does_not_fit_changes_nothing(self) -> None:
        governed = self.adapted()
        before = governed.state_dict()
        small = {"a.weight": np.ones(3, np.float32)}
        huge = make_bundle(1)
        huge = Bundle(huge.base, huge.basis, {n: w + 3e38 for n, w in huge.coefficients.items()})
        with np.errstate(over="ignore", invalid="ignore"):
            for wrong in (make_bundle(family="other"), build_bundle(small, [small]), huge):
                with pytest.raises(MergettaError):
                    governed.swap(wrong)
        for name, value in before.items():
            np.testing.assert_array_equal(governed.state_dict()[name], value)

    def adapted(self) -> Governed:
        governed = Governed(ZOMerge(NumpyRuntime(), make_bundle(), "roid", delta=0.1), max_steps=4)
        for batch in domain(0, 5):
            governed.predict(batch)
        return governed
