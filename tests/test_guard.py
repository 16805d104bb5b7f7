"""The guard of zo-merge-plus: each of its signs by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.adapters.forward_only.guard import (
    PAST,
    WINDOW,
    Guard,
    by_chance,
    difference,
    entropy,
    is_few,
    looks_of,
    moments,
    unevenness,
)

CLASSES = 4
NOTHING = looks_of(np.zeros((1, 1, 4, 4)))
"""Of images that are all alike."""


@pytest.mark.parametrize(
    ("classes", "few"), [([0], True), ([0, 1], True), (range(5), True), (range(7), False), (range(10), False)]
)
@pytest.mark.parametrize("images", [64, 200, 5000])
def test_how_many_classes_are_a_few(classes: Sequence[int], few: bool, images: int) -> None:
    """log 5 = 0.7 log 10, log 7 = 0.85 log 10; of 64 images, classes have log 10 − 9 / 128 by chance."""
    assert is_few(np.eye(10)[list(classes)].mean(axis=0), images) == few


@pytest.mark.parametrize("images", [1, 2, 8, 16])
def test_small_batches_of_all_classes_are_not_of_a_few(images: int) -> None:
    rng = np.random.default_rng(0)
    found = [is_few(np.eye(10)[rng.integers(10, size=images)].mean(axis=0), images) for _ in range(300)]
    assert np.mean(found) < 0.2
    assert is_few(np.eye(10)[0], images) == (images > 1)


def test_unevenness_by_hand() -> None:
    assert unevenness(np.full(10, 0.1), 200) == pytest.approx(0, abs=1e-9)
    assert unevenness(np.eye(10)[0], 200) == pytest.approx(400 * np.log(10))
    assert by_chance(1, 10) == pytest.approx((2 * np.log(10), 0), abs=1e-9)  # of one image nothing can be said
    mean, std = by_chance(5000, 10)  # chi-squared with 9 degrees of freedom
    assert mean == pytest.approx(9, rel=0.1)
    assert std == pytest.approx(np.sqrt(18), rel=0.15)


def window(predictions: np.ndarray) -> np.ndarray:
    return np.concatenate([[len(predictions), 0, 0], predictions.sum(axis=0)])


@pytest.mark.parametrize(("images", "classes"), [(8, 10), (200, 10), (64, 1000)])
def test_a_few_classes_are_told_from_chance(images: int, classes: int) -> None:
    guard, rng = Guard.new(classes), np.random.default_rng(0)
    chance = [guard.is_uneven(window(np.eye(classes)[rng.integers(classes, size=images)])) for _ in range(300)]
    assert np.mean(chance) < 0.02
    assert guard.is_uneven(window(np.eye(classes)[np.arange(images) % 2]))


def test_older_predictions_fade_from_the_window() -> None:
    first, second = with_entropy(0.3, np.zeros(50, int)), with_entropy(0.6, np.ones(50, int))
    guard = Guard.new(CLASSES).after(NOTHING, first, second, odd=False)
    found = guard.after(NOTHING, second, None, odd=False).window
    keep = 1 - 50 / WINDOW
    assert found[0] == pytest.approx(50 * (1 + keep))
    assert found[1] == pytest.approx(keep * entropy(first).sum())
    assert found[2] == pytest.approx(keep * entropy(second).sum())
    np.testing.assert_allclose(found[3:], keep * first.sum(axis=0) + second.sum(axis=0))
    blended = Guard.new(CLASSES).after(NOTHING, first, second, odd=False, stored_share=0.25).window
    np.testing.assert_allclose(blended[1:3], [entropy(first).sum() / 1.25, entropy(second).sum()])
    alone = guard.after(NOTHING, np.tile(first, (4, 1)), None, odd=False).window  # as many as the window has
    np.testing.assert_allclose(alone, window(np.tile(first, (4, 1))))


def with_entropy(value: float, classes: np.ndarray) -> np.ndarray:
    """Predictions of these classes with about that entropy."""
    shares = np.linspace(0.01, 0.6, 200)
    found = min(shares, key=lambda share: abs(-(1 - share) * np.log(1 - share) - share * np.log(share / 3) - value))
    return np.where(np.eye(CLASSES)[classes] == 1, 1 - found, found / 3)


@pytest.mark.parametrize(
    ("mixture", "source", "uneven", "odd"),
    [(0.3, 0.6, True, False), (0.6, 0.6, True, True), (0.6, 0.6, False, False), (0.9, 0.6, False, True)],
)
def test_a_domain_that_makes_predictions_uneven_is_told_from_few_classes(
    mixture: float, source: float, uneven: bool, odd: bool
) -> None:
    """By how sure they are: batch statistics of a few classes leave the model no surer than the source model."""
    guard, classes = Guard.new(CLASSES), np.arange(200) % CLASSES
    few = np.where(np.arange(200) < 120, 0, classes) if uneven else classes
    assert guard.finds_odd(NOTHING, with_entropy(mixture, few), with_entropy(source, classes), 0) == odd


def test_the_more_stored_statistics_count_the_less_certain_predictions_may_be() -> None:
    guard, classes = Guard.new(CLASSES), np.arange(200) % CLASSES
    few, source = np.where(np.arange(200) < 120, 0, classes), with_entropy(0.6, classes)
    mixture = with_entropy(0.6, few)  # a ratio of 1, of 2/3 with half of the statistics stored
    assert guard.finds_odd(NOTHING, mixture, source, 0)
    assert not guard.finds_odd(NOTHING, mixture, source, 0.5)


def test_odd_batches_are_left_behind_only_when_predictions_are_much_surer() -> None:
    guard, classes = Guard.new(CLASSES), np.arange(200) % CLASSES
    few, source = np.where(np.arange(200) < 120, 0, classes), with_entropy(0.6, classes)
    surer, hardly = (with_entropy(share * 0.6, few) for share in (0.5, 0.7))
    assert not guard.finds_odd(NOTHING, hardly, source, 0)
    guard = replace(guard, doubt=True)
    assert guard.finds_odd(NOTHING, hardly, source, 0)
    assert not guard.finds_odd(NOTHING, surer, source, 0)


def test_looks_by_hand() -> None:
    """Sixteen fields of 2 × 2 pixels; of 9 × 10 pixels, the last ones are left out; of 3 × 2, each pixel is a field."""
    images = np.zeros((2, 1, 8, 8), np.float32)
    images[0, 0, :2, 2:4] = [[0.1, 0.2], [0.3, 0.4]]
    images[1, 0, :2, 2:4] = 0.75
    for given in (images, np.pad(images, ((0, 0), (0, 0), (0, 1), (0, 2)), constant_values=9)):
        found = looks_of(given)
        assert found.shape == (3, 16)
        np.testing.assert_allclose(found[:, 1], [2, 0.25 + 0.75, 0.25**2 + 0.75**2], rtol=1e-6)
        np.testing.assert_array_equal(found[1:, [0, *range(2, 16)]], 0)
    mean, variance = (values[1] for values in moments(looks_of(images))[1:])
    assert (mean, variance) == (pytest.approx(0.5), pytest.approx(0.0625))
    assert looks_of(np.zeros((5, 3, 3, 2))).shape == (3, 18)


def plain(values: Sequence[float]) -> np.ndarray:
    """The looks of images of one grey each."""
    return looks_of(np.tile(np.reshape(values, (-1, 1, 1, 1)), (1, 1, 4, 4)))


@pytest.mark.parametrize(("images", "shift", "unlike"), [(50, 0.2, True), (20, 0.2, False), (50, 0.1, False)])
def test_images_unlike_those_before_by_hand(images: int, shift: float, unlike: bool) -> None:
    """100 images of variance 0.25 before: 0.2² / 0.25 / (1/100 + 1/50) = 5.3; with 1/20 it is 2.7; with 0.1² 1.3."""
    guard = replace(Guard.new(CLASSES), looks=plain([0, 1] * 50))
    assert guard.is_unlike(plain([shift, 1 + shift] * (images // 2))) == unlike


def test_nothing_is_unlike_nothing() -> None:
    assert not Guard.new(CLASSES).is_unlike(plain([0, 1]))
    one = replace(Guard.new(CLASSES), looks=plain([0.5]))
    assert not one.is_unlike(looks_of(np.zeros((2, 3, 4, 4))))  # colours after grey


@pytest.mark.parametrize("images", [8, 64, 200])
def test_images_that_come_at_random_are_rarely_unlike(images: int) -> None:
    rng, found = np.random.default_rng(0), []
    for _ in range(100):
        scenes = rng.uniform(size=(400 + images, 1, 4, 4)) * rng.uniform(size=(400 + images, 1, 1, 1))
        guard = replace(Guard.new(CLASSES), looks=looks_of(scenes[:400]))
        found.append(guard.is_unlike(looks_of(scenes[400:])))
    assert np.mean(found) < 0.05


def test_difference_by_hand() -> None:
    first, second = np.eye(CLASSES)[:2]
    assert difference(first, 100, first, 300) == pytest.approx(0, abs=1e-9)
    assert difference(first, 100, second, 100) == pytest.approx(400 * np.log(2))


@pytest.mark.parametrize(
    ("before", "now", "others"),
    [
        ([0], [1], True),  # one class after the other
        ([0, 1, 2, 3], [1], True),
        ([1], [1], False),  # a domain in which the source model sees one class
        ([0], [0, 1, 2, 3], False),  # classes are mixed again
        ([], [1], False),  # the first batch
    ],
)
def test_the_source_model_sees_other_classes_than_before(before: list[int], now: list[int], others: bool) -> None:
    guard, hundred = Guard.new(CLASSES), np.arange(100)
    if before:
        predictions = with_entropy(0.3, np.array(before)[hundred % len(before)])
        guard = guard.after(NOTHING, predictions, predictions, odd=False)
    assert guard.sees_others(with_entropy(0.3, np.array(now)[hundred % len(now)])) == others


@pytest.mark.parametrize(
    ("shift", "now", "mixture", "odd"),
    [
        (0.5, 1, 0.27, True),
        (0.0, 1, 0.27, False),  # images are like those before
        (0.5, 0, 0.27, False),  # the source model sees the same classes
        (0.5, 1, 0.2, False),  # surer than the source model: the domain changes, classes are mixed
    ],
)
def test_even_predictions_are_odd_if_images_and_classes_turn(shift: float, now: int, mixture: float, odd: bool) -> None:
    """Which batch statistics of one class may make them."""
    even = with_entropy(mixture, np.arange(100) % CLASSES)
    source = [with_entropy(0.3, np.full(100, label)) for label in (0, now)]
    guard = Guard.new(CLASSES).after(plain([0, 1] * 50), even, source[0], odd=False)
    looks = plain([shift, 1 + shift] * 50)
    assert guard.suspects(looks, even) == (shift > 0)
    assert guard.finds_odd(looks, even, source[1], 0) == odd


def test_the_past_fades_and_ends_with_a_jump() -> None:
    even = with_entropy(0.2, np.arange(500) % CLASSES)
    guard = Guard.new(CLASSES).after(plain([0.5] * 500), even, even, odd=True)
    later = guard.after(plain([1.0] * 500), even, None, odd=False)
    keep = 1 - 500 / PAST
    assert (guard.doubt, guard.count, later.doubt, later.count) == (True, 1, False, 1)
    np.testing.assert_allclose(later.looks[:, 0], [500 * (1 + keep), 500 * (1 + keep / 2), 500 * (1 + keep / 4)])
    np.testing.assert_array_equal(later.told, guard.told)  # it has not been asked
    jumped = guard.after_jump()
    assert not jumped.looks.size
    assert not jumped.told.any()
    np.testing.assert_array_equal(jumped.window, guard.window)
    assert (jumped.doubt, jumped.count) == (True, 1)


def test_a_state_continues_exactly() -> None:
    even = with_entropy(0.2, np.arange(100) % CLASSES)
    guard = Guard.new(CLASSES).after(plain([0, 1] * 50), even, even, odd=True)
    again = Guard.new(CLASSES).restored(guard.state())
    assert all(np.array_equal(again.state()[name], value) for name, value in guard.state().items())


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": np.zeros(3)},
        {"window": np.full(3 + CLASSES, 1e300)},
        {"window": np.arange(3.0 + CLASSES)},  # more predictions than images
        {"window": np.zeros(3 + CLASSES, complex)},
        {"told": np.full(1 + CLASSES, np.nan)},
        {"told": -np.ones(1 + CLASSES)},
        {"looks": np.zeros((2, 16))},
        {"looks": np.zeros((3, 16))},
        {"looks": np.float64(3)},
        {"looks": ["a"]},
        {"doubt": -1},
        {"count": 0.5},
    ],
)
def test_states_that_do_not_fit(wrong: dict[str, Any]) -> None:
    guard = Guard.new(CLASSES)
    with pytest.raises(MergettaError, match="does not fit"):
        guard.restored({**guard.state(), **{f"guard.{name}": value for name, value in wrong.items()}})


def test_a_state_of_before_says_what_it_lacks() -> None:
    with pytest.raises(MergettaError, match=r"it has no 'guard\.window'"):
        Guard.new(CLASSES).restored({"window": np.zeros(3 + CLASSES)})
