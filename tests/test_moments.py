"""Streaming moments: they do not depend on how the stream came, and their states are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergetta.errors import MergettaError
from mergetta.streams.moments import StreamMoments, batch_moments


def moments(frames: np.ndarray) -> np.ndarray:
    """(N, C) → (2, C)."""
    return np.stack([frames.mean(axis=0), frames.var(axis=0)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 2**32))
def test_in_any_portions_it_is_the_same(portions: list[int], channels: int, seed: int) -> None:
    frames = np.random.default_rng(seed).normal(3, 2, (sum(portions), channels))
    in_portions, one_by_one, at_once = (StreamMoments(channels) for _ in range(3))
    for part in np.split(frames, np.cumsum(portions)[:-1]):
        in_portions.add(moments(part), len(part))
    for frame in frames:
        one_by_one.add(moments(frame[None]))
    at_once.add(moments(frames), len(frames))
    for stream in (in_portions, one_by_one, at_once):
        assert stream.count == len(frames)
        np.testing.assert_allclose(stream.value(), moments(frames), rtol=1e-9, atol=1e-9)


def test_moments_of_images_make_those_of_the_batch() -> None:
    pixels = np.random.default_rng(0).normal(1, 2, (5, 3, 4))  # images, channels, pixels of each
    each = np.stack([pixels.mean(axis=2), pixels.var(axis=2)], axis=1)
    whole = np.stack([pixels.mean(axis=(0, 2)), pixels.var(axis=(0, 2))])
    np.testing.assert_allclose(batch_moments(each), whole)
    stream = StreamMoments(3)
    for image in each:
        stream.add(image)
    np.testing.assert_allclose(stream.value(), whole)
    assert batch_moments(each.astype(np.float32)).dtype == np.float64
    assert batch_moments(np.zeros((4, 2, 0))).shape == (2, 0)


def test_a_prior_counts_as_images_by_hand() -> None:
    """Six images of mean 1 and variance 2 beside a prior of mean 4 and variance 1 that counts as three."""
    stream = StreamMoments(1)
    stream.add(np.array([[1.0], [2.0]]), 6)
    prior = np.array([[4.0], [1.0]])
    mean = (6 * 1 + 3 * 4) / 9
    variance = (6 * (2 + 1) + 3 * (1 + 16)) / 9 - mean**2
    np.testing.assert_allclose(stream.value(prior, 3), [[mean], [variance]])
    np.testing.assert_allclose(stream.value(), [[1.0], [2.0]])  # the prior is not taken in
    np.testing.assert_allclose(stream.value(prior, 0), [[1.0], [2.0]])
    np.testing.assert_allclose(StreamMoments(1).value(prior, 3), prior)


def test_memory_fades() -> None:
    stream = StreamMoments(1, memory=8)
    for _ in range(100):
        stream.add(np.array([[0.0], [0.0]]))
    assert stream.count == pytest.approx(8)
    stream.add(np.array([[8.0], [0.0]]))
    assert stream.count == pytest.approx(8)
    np.testing.assert_allclose(stream.value(), [[1.0], [7.0]])  # one eighth of 8; 64 / 8 − 1
    for _ in range(100):
        stream.add(np.array([[8.0], [0.0]]))
    assert stream.value()[0, 0] > 7.99


@pytest.mark.parametrize("first", [0, 3])
def test_a_batch_larger_than_the_memory_is_all_that_is_remembered(first: int) -> None:
    stream = StreamMoments(1, memory=4)
    if first:
        stream.add(np.array([[100.0], [1.0]]), first)
    stream.add(np.array([[1.0], [2.0]]), 10)
    np.testing.assert_allclose(stream.value(), [[1.0], [2.0]])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200])
def test_what_is_not_finite_leaves_no_trace(value: float) -> None:
    stream = StreamMoments(2)
    stream.add(np.array([[1.0, 2.0], [3.0, 4.0]]), 5)
    before = stream.state("")
    for row in (0, 1):
        bad = np.array([[1.0, 2.0], [3.0, 4.0]])
        bad[row, 1] = value
        if np.isfinite(value) and row == 1:
            continue  # a variance of 1e200 is finite, and so is what comes of it
        with np.errstate(over="ignore", invalid="ignore"):
            stream.add(bad)
    stream.add(np.ones((2, 2)), 0)
    stream.add(np.ones((2, 2)), -1)
    after = stream.state("")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_variance_is_never_negative() -> None:
    stream = StreamMoments(1)
    for _ in range(1000):
        stream.add(np.array([[1e4 + 0.1], [0.0]]))
    assert stream.value()[1, 0] >= 0


def test_nothing_seen() -> None:
    np.testing.assert_array_equal(StreamMoments(3).value(), np.zeros((2, 3)))


def test_states_go_on_exactly() -> None:
    rng = np.random.default_rng(0)
    one, other = StreamMoments(3, memory=20), StreamMoments(3, memory=20)
    for _ in range(5):
        one.add(moments(rng.normal(size=(7, 3))), 7)
    state = one.state("stream.")
    assert set(state) == {"stream.count", "stream.sums"}
    other.restore({**state, "another": 3}, "stream.")
    batch = moments(rng.normal(size=(7, 3)))
    for stream in (one, other):
        stream.add(batch, 7)
    np.testing.assert_array_equal(one.value(), other.value())
    assert one.count == other.count
    other.clear()
    assert other.count == 0
    np.testing.assert_array_equal(other.value(), np.zeros((2, 3)))
    np.testing.assert_array_equal(state["stream.sums"], one.state("")["sums"] * 0 + state["stream.sums"])


def test_a_state_shares_no_memory() -> None:
    stream = StreamMoments(1)
    stream.add(np.ones((2, 1)))
    state = stream.state("")
    other = StreamMoments(1)
    other.restore(state, "")
    state["sums"][:] = 100
    np.testing.assert_array_equal(stream.value(), np.ones((2, 1)))
    np.testing.assert_array_equal(other.value(), np.ones((2, 1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"s.count": -1.0},
        {"s.count": np.nan},
        {"s.count": np.inf},
        {"s.count": "many"},
        {"s.count": None},
        {"s.count": [1.0, 2.0]},
        {"s.sums": np.zeros((2, 4))},
        {"s.sums": np.zeros(6)},
        {"s.sums": np.full((2, 3), np.nan)},
        {"s.sums": np.zeros((2, 3), complex)},
        {"s.sums": [[1.0], [1.0, 2.0]]},
        {"s.sums": object()},
    ],
)
def test_hostile_states_are_refused_and_change_nothing(changes: dict[str, Any]) -> None:
    stream = StreamMoments(3)
    stream.add(np.ones((2, 3)), 2)
    good = StreamMoments(3).state("s.")
    with pytest.raises(MergettaError, match="does not fit the adapter"):
        stream.restore({**good, **changes}, "s.")
    for missing in good:
        with pytest.raises(MergettaError, match=f"has no '{missing}'"):
            stream.restore({name: value for name, value in good.items() if name != missing}, "s.")
    assert stream.count == 2
    np.testing.assert_array_equal(stream.value(), np.ones((2, 3)))


def test_negative_second_moments_cannot_come_from_any_stream() -> None:
    stream = StreamMoments(1)
    stream.restore({"count": 2.0, "sums": np.array([[1.0], [-5.0]])}, "")
    assert stream.value()[1, 0] == 0
