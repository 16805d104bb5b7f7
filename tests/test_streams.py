"""What a device learns of its stream: moments that do not depend on how it came, and states that are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergetta.errors import MergettaError
from mergetta.streams.classes import independent_images, mixed
from mergetta.streams.domain import DomainMoments, MomentSettings, Variances, between_domains
from mergetta.streams.moments import StreamMoments, batch_moments
from mergetta.streams.shift import ShiftDetector, distance
from mergetta.streams.state import Field, checked


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


class TestFields:
    def test_types(self) -> None:
        fields = {"count": Field(low=0, whole=True), "values": Field((None, 2), -1, 1)}
        found = checked({"count": np.int32(3), "values": np.zeros((5, 2), np.float32)}, fields)
        assert found["count"].dtype == np.int64
        assert found["values"].dtype == np.float64
        assert found["values"].shape == (5, 2)
        assert checked({}, {}) == {}

    @pytest.mark.parametrize(
        ("value", "field"),
        [
            (1.5, Field(whole=True)),
            (2**63, Field(low=0, whole=True)),  # unsigned, and negative as int64
            (3.0, Field(whole=True)),
            (-1, Field(low=0)),
            (2, Field(high=1)),
            (np.nan, Field()),
            (np.zeros(2), Field()),
            (0.0, Field((None,))),
            (np.zeros((2, 3)), Field((None, 2))),
            ("1", Field()),
            (None, Field()),
            ({}, Field()),
            (1j, Field()),
        ],
    )
    def test_what_does_not_fit(self, value: object, field: Field) -> None:
        with pytest.raises(MergettaError, match=r"does not fit the adapter: 'a\.x'"):
            checked({"a.x": value}, {"x": field}, "a.")

    @settings(max_examples=200, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
            max_leaves=6,
        ),
        st.sampled_from([Field(), Field(whole=True), Field((None,)), Field((2,), 0, 1), Field((2, None), whole=True)]),
    )
    def test_anything_is_taken_or_refused_in_one_sentence(self, value: object, field: Field) -> None:
        try:
            array = checked({"x": value}, {"x": field})["x"]
        except MergettaError:
            return
        assert array.ndim == len(field.shape)
        assert np.isfinite(array).all()
        assert ((array >= field.low) & (array <= field.high)).all()


class TestClasses:
    def test_by_hand(self) -> None:
        """1 / (Σ π² − 1/K + 1/n)."""
        assert independent_images(np.array([50.0, 0.0])) == pytest.approx(1 / (1 - 1 / 2 + 1 / 50))
        assert independent_images(np.array([1.0, 0, 0, 0])) == pytest.approx(1 / (1 - 1 / 4 + 1))
        assert independent_images(np.full(10, 20.0)) == pytest.approx(200)
        assert independent_images(np.array([30.0, 10, 0, 0])) == pytest.approx(1 / (9 / 16 + 1 / 16 - 1 / 4 + 1 / 40))
        assert independent_images(np.zeros(10)) == mixed(np.zeros(10)) == 0

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


class TestDomainMoments:
    def make(self, memory: float = 2000.0, doubt: float = np.inf) -> DomainMoments:
        """Two layers of a channel, in which the prior counts for 2 and 8 images."""
        variances = Variances(np.ones((2, 2)), np.array([[1.0, 0.25], [1.0, 0.25]]))
        return DomainMoments([1, 1], 2, variances, MomentSettings(memory=memory, doubt=doubt))

    def frames(self, values: list[float]) -> np.ndarray:
        """Of two channels, without any variance of their own."""
        means = np.repeat(np.array(values)[:, None], 2, axis=1)
        return np.stack([means, np.zeros_like(means)], axis=1)

    def test_worth_by_hand(self) -> None:
        """s²/τ² of means and of second moments, by their geometric mean, times the caution, within bounds."""
        between, spread = np.array([[1.0, 4.0, 1.0], [1.0, 1.0, 1.0]]), np.array([[9.0, 1.0, 1e6], [16.0, 1e-9, 1e6]])
        chosen, nothing = MomentSettings(caution=2.0, least=3.0, most=100.0), np.zeros((2, 4))

        def worth(variances: Variances | None) -> list[float]:
            return DomainMoments([1, 2, 1], 2, variances, chosen).worth(nothing, nothing, 0).tolist()

        assert worth(Variances(spread, between)) == pytest.approx([24.0, 3.0, 3.0, 100.0], rel=1e-5)
        assert worth(None) == [MomentSettings().unknown] * 4
        assert worth(Variances(spread, 0 * between)) == [100.0] * 4  # domains are alike

    def test_a_prior_that_is_far_off_is_doubted(self) -> None:
        """Deviations of 9 s² and 16 s², of both moments alike; four images, so that 8/4 s² are no surprise."""
        moments, prior = self.make(doubt=8.0), np.zeros((2, 2))
        sums = np.array([[3.0, 4.0], [3.0, 4.0]])
        np.testing.assert_allclose(moments.worth(prior, sums, 4), [2.0, 2.0])  # at least
        moments.settings = MomentSettings(least=0.01)
        np.testing.assert_allclose(moments.worth(prior, sums, 4), [2 / 7, 2 / 14])
        np.testing.assert_allclose(moments.worth(prior, sums, 1), [2 / 1, 2 / 8])
        np.testing.assert_allclose(moments.worth(prior, 0.3 * sums, 8), [2.0, 2 / 0.44])  # 0.81 < 1; 1.44 − 1
        np.testing.assert_allclose(moments.worth(prior, 0 * sums, 1000), [2.0, 8.0])

    def test_one_class_that_is_far_off_is_believed_at_once(self) -> None:
        """As of a domain that no expert knows, in which all predictions are of one class."""
        near, far = self.make(doubt=8.0), self.make(doubt=8.0)
        prior = np.array([[0.0, 0.0], [1.0, 1.0]])
        for each, mean in ((near, 1.0), (far, 30.0)):
            each.learn(self.frames([mean] * 50), np.eye(2)[[0] * 50])
        assert near.value(prior)[0, 1] < 0.25
        assert far.value(prior)[0, 1] / 30 == pytest.approx(far.count / (far.count + 2))

    def test_between_domains_by_hand(self) -> None:
        """Two domains; layers of two channels and of one. Second moments: 1 and 5; 4 and 4; 2 and 2."""
        domains = np.array([[[0.0, 2.0, 1.0], [1.0, 0.0, 1.0]], [[2.0, 0.0, 1.0], [1.0, 4.0, 1.0]]])
        np.testing.assert_allclose(between_domains(domains, [2, 1]), [[1.0, 0.0], [2.0, 0.0]])

    def test_value_by_hand(self) -> None:
        """Four images of mean 3, two of each class: worth 4, beside 2 and 8 of the prior."""
        moments, prior = self.make(), np.array([[0.0, 0.0], [1.0, 1.0]])
        np.testing.assert_array_equal(moments.value(prior), prior)
        moments.learn(self.frames([3.0] * 4), np.eye(2)[[0, 1, 0, 1]])
        assert moments.count == 4
        shares = np.array([4 / 6, 4 / 12])
        mean = 3 * shares
        np.testing.assert_allclose(moments.value(prior), [mean, 9 * shares + (1 - shares) - mean**2])

    @pytest.mark.parametrize("labels", [[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    def test_a_share_is_what_learning_then_gives(self, labels: list[int]) -> None:
        """With a batch mixed in by its share, the moments are those after it has been learnt."""
        prior, p = np.array([[0.0, 1.0], [1.0, 2.0]]), np.eye(2)[labels]
        for before in ([], [2.0, 5.0, 2.0]):
            moments = self.make()
            if before:
                moments.learn(self.frames(before), np.eye(2)[[0, 1, 1]])
            batch = self.frames([4.0, 1.0, 0.0, 2.0, 3.0])
            share, known = moments.share(prior, batch, p), moments.value(prior)
            moments.learn(batch, p)
            after = moments.value(prior)
            own = batch_moments(batch)
            if not before:  # beside the prior alone
                np.testing.assert_allclose(share * own[0] + (1 - share) * known[0], after[0])
            assert ((share > 0) & (share < 1)).all()
            expected = moments.count * 5 / (5 + len(before)) / (np.array([2.0, 8.0]) + moments.count)
            np.testing.assert_allclose(share, expected)

    def test_memory_fades_classes_together_with_sums(self) -> None:
        moments = self.make(memory=10)
        for _ in range(20):
            moments.learn(self.frames([1.0]), np.eye(2)[[0]])
        assert moments.stream.count == pytest.approx(moments.classes.sum()) == pytest.approx(10)
        moments.learn(self.frames([1.0] * 5), np.eye(2)[[1] * 5])
        np.testing.assert_allclose(moments.classes, [5, 5])
        assert moments.stream.count == pytest.approx(10)
        assert moments.count == pytest.approx(10)
        moments.learn(self.frames([1.0] * 30), np.eye(2)[[1] * 30])  # more than is remembered
        np.testing.assert_allclose(moments.classes, [0, 30], atol=1e-9)
        assert moments.stream.count == pytest.approx(30)

    def test_one_class_is_hardly_believed(self) -> None:
        moments, prior = self.make(), np.array([[0.0, 0.0], [1.0, 1.0]])
        moments.learn(self.frames([3.0] * 500), np.eye(2)[[0] * 500])
        np.testing.assert_allclose(moments.value(prior)[0], 3 * moments.count / (moments.count + np.array([2.0, 8.0])))
        assert moments.count == 0.02 * 500  # predictions of one class may also be wrong ones

    def test_what_is_not_finite_leaves_no_trace(self) -> None:
        moments = self.make()
        moments.learn(self.frames([1.0, 2.0]), np.eye(2))
        before = moments.state()
        for wrong in (np.nan, np.inf):
            with np.errstate(all="ignore"):
                moments.learn(self.frames([1.0, wrong]), np.eye(2))
        moments.learn(self.frames([1.0, 2.0]), np.full((2, 2), np.nan))  # nobody knows of which class
        assert all(np.array_equal(value, moments.state()[name]) for name, value in before.items())

    def test_states_and_clearing(self) -> None:
        moments, again = self.make(), self.make()
        moments.learn(self.frames([1.0, 2.0, 5.0]), np.eye(2)[[0, 1, 1]])
        again.restore(moments.state())
        for each in (moments, again):
            each.learn(self.frames([1.0]), np.eye(2)[[0]])
        assert all(np.array_equal(value, again.state()[name]) for name, value in moments.state().items())
        moments.clear()
        assert moments.count == moments.stream.count == 0

    @pytest.mark.parametrize(
        "changes",
        [
            {"moments.classes": np.zeros(3)},
            {"moments.classes": np.array([1.0, np.nan])},
            {"moments.classes": np.array([1.0, -1.0])},
            {"moments.classes": "12"},
            {"moments.count": -1.0},
            {"moments.sums": np.zeros((2, 3))},
        ],
    )
    def test_hostile_states_are_refused_and_change_nothing(self, changes: dict[str, Any]) -> None:
        moments, other = self.make(), self.make()
        moments.learn(self.frames([1.0, 2.0]), np.eye(2))
        before = moments.state()
        with pytest.raises(MergettaError, match="does not fit"):
            moments.restore({**other.state(), **changes})
        assert all(np.array_equal(value, moments.state()[name]) for name, value in before.items())

    def test_variances_of_other_layers_are_refused(self) -> None:
        with pytest.raises(MergettaError, match="another model's layers"):
            DomainMoments([1, 1, 1], 2, self.make().variances)
