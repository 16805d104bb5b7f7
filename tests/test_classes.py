"""How mixed the classes of a stream look, by hand and in general."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergetta.streams.classes import independent_images, mixed


class TestClasses:
    def test_by_hand(self) -> None:
        """1 / (Σ π² − 1/K + 1/n)."""
        assert independent_images(np.array([50.0, 0.0])) == pytest.approx(1 / (1 - 1 / 2 + 1 / 50))
        assert independent_images(np.array([1.0, 0, 0, 0])) == pytest.approx(1 / (1 - 1 / 4 + 1))
        assert independent_images(np.full(10, 20.0)) == pytest.approx(200)
        assert independent_images(np.array([30.0, 10, 0, 0])) == pytest.approx(1 / (9 / 16 + 1 / 16 - 1 / 4 + 1 / 40))
        assert independent_images(np.zeros(10)) == mixed(np.zeros(10)) == 0

    def test_a_model_may_prefer_some(self) -> None:
        biased = np.array([28.0, 24, 24, 24])  # Σ π² is 0.2512
        assert independent_images(biased) == pytest.approx(1 / (0.0012 + 0.01))
        assert independent_images(biased, 0.005) == pytest.approx(100)
        assert independent_images(np.eye(4)[0] * 50, 0.005) == pytest.approx(1 / (1 - 1 / 4 - 0.005 + 1 / 50))

    def test_a_thousand_classes(self) -> None:
        """64 images, each of its own class, are as mixed as can be; of one class they are worth one."""
        each, one = np.repeat([1.0, 0.0], [64, 936]), np.eye(1000)[3] * 64
        assert independent_images(each) == pytest.approx(1 / (2 / 64 - 1 / 1000))
        assert mixed(each) == 1
        assert independent_images(one) == pytest.approx(1 / (1 - 1 / 1000 + 1 / 64))
        assert mixed(one) < 0.04

    def test_one_class_for_an_hour_is_worth_no_more_than_for_a_minute(self) -> None:
        minute, hour = (independent_images(np.eye(10)[0] * n) for n in (60, 3600))
        assert minute < hour < 1.12

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
    def test_never_more_than_there_are(self, counts: list[int]) -> None:
        found = np.array(counts, dtype=float)
        assert 0 <= independent_images(found) <= sum(counts) + 1e-9
        assert 0 <= mixed(found) <= 1
        order = np.random.default_rng(0).permutation(len(counts))
        assert independent_images(found[order]) == pytest.approx(independent_images(found))

    def test_classes_that_come_at_random_look_mixed(self) -> None:
        rng = np.random.default_rng(0)
        draws = [np.bincount(rng.integers(0, 10, 64), minlength=10) for _ in range(200)]
        assert np.mean([mixed(draw) for draw in draws]) > 0.9
        assert min(mixed(draw) for draw in draws) > 0.5
