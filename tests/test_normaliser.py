"""What BatchNorm normalises with, and what features are aligned by: the same for single frames and for batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, MergettaError, OnnxRuntime, TorchRuntime, ZOMerge, build_bundle, load_family
from mergetta.adapters.forward_only.normaliser import LARGE, Aligner, Normaliser, Plain
from mergetta.groups import layer_sizes, learnable, moments_of, with_moments
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Runtime
from mergetta.streams.domain import DomainMoments, MomentSettings
from mergetta.streams.moments import batch_moments
from mergetta.streams.variances import Variances
from tests.confidence import CLASSES, Confidence, assert_same_state, each_in_turn

from .moving import moved


@pytest.fixture(scope="module", params=["torch", "onnx"])
def subject(request: pytest.FixtureRequest) -> Runtime:
    family = load_family("fashion-bn")
    if request.param == "torch":
        return TorchRuntime(family)
    return OnnxRuntime(request.getfixturevalue("exported")("fashion-bn").read_bytes(), threads=1)


def bundle_of(runtime: Runtime) -> Bundle:
    rng = np.random.default_rng(0)
    experts = [moved(runtime.groups, rng, 0.02) for _ in range(3)]
    return build_bundle(runtime.groups, experts, family=runtime.family)


def normaliser_of(runtime: Runtime) -> Normaliser:
    found = Normaliser.of_bundle(runtime, bundle_of(runtime))
    assert isinstance(found, Normaliser)
    return found


class TestNormaliser:
    @pytest.mark.parametrize("learnt", [0, 30])
    def test_with_frozen_moments_nothing_depends_on_the_batch(
        self, learnt: int, subject: Runtime, images: np.ndarray
    ) -> None:
        normalise, groups = normaliser_of(subject), bundle_of(subject).merge()
        if learnt:
            normalise(images[:learnt], groups, learn=True)
        before = normalise.moments.state()
        together = normalise(images, groups).logits
        alone = np.concatenate([normalise(image[None], groups).logits for image in images])
        np.testing.assert_allclose(together, alone, atol=1e-4)
        assert all(np.array_equal(value, normalise.moments.state()[name]) for name, value in before.items())

    def test_before_anything_is_known_it_is_the_merge(self, subject: Runtime, images: np.ndarray) -> None:
        groups = bundle_of(subject).merge()
        found = normaliser_of(subject)(images, groups).logits
        np.testing.assert_allclose(found, subject(images, groups, 1.0).logits, atol=1e-4)

    def test_single_frames_and_batches_end_alike(self, subject: Runtime, images: np.ndarray) -> None:
        """With moments of few images, which hardly move what is known, one by one or in batches is the same."""
        groups, ends = bundle_of(subject).merge(), []
        for size in (1, 6):
            normalise = normaliser_of(subject)
            normalise.moments.settings = MomentSettings(unknown=1e5)
            for start in range(0, 24, size):
                normalise(images[start : start + size], groups, learn=True)
            ends.append(normalise)
        assert ends[0].moments.stream.count == ends[1].moments.stream.count == 24
        np.testing.assert_allclose(ends[0].moments.stream.value(), ends[1].moments.stream.value(), rtol=2e-3, atol=2e-3)

    def test_what_is_learnt_and_used_by_hand(self, subject: Runtime, images: np.ndarray) -> None:
        """Eight images, few beside 64: predicted with what was known, then taken in."""
        normalise, groups = normaliser_of(subject), bundle_of(subject).merge()
        first, names = images[:8], tuple(subject.groups)
        output = normalise(first, groups, learn=True)
        plain = subject(first, groups, 1.0, moments=True)
        np.testing.assert_allclose(output.logits, plain.logits, atol=1e-4)
        assert plain.moments is not None
        np.testing.assert_allclose(normalise.moments.stream.value(), batch_moments(plain.moments), rtol=1e-4, atol=1e-4)
        expected = with_moments(groups, normalise.moments.value(moments_of(groups, names)), names)
        np.testing.assert_allclose(
            normalise(images[8:], groups).logits, subject(images[8:], expected, 1.0).logits, atol=1e-4
        )
        before = moments_of(groups, names)
        assert np.abs(moments_of(expected, names) - before).max() > 1e-3

    def test_the_order_of_groups_does_not_matter(self, subject: Runtime, images: np.ndarray) -> None:
        groups = bundle_of(subject).merge()
        one, other = normaliser_of(subject), normaliser_of(subject)
        one(images[:20], groups, learn=True)
        other(images[:20], dict(reversed(groups.items())), learn=True)
        np.testing.assert_allclose(
            one(images, groups).logits, other(images, dict(reversed(groups.items()))).logits, atol=1e-4
        )

    def test_only_a_large_batch_takes_a_second_pass(self, images: np.ndarray) -> None:
        runtime = Confidence(batch_norm=True)
        normalise = Normaliser(runtime, DomainMoments([CLASSES], CLASSES))
        batch, passes = each_in_turn(), []
        for size in (16, 17, 20, 21, 120, 120):
            runtime.given.clear()
            normalise(batch[:size], runtime.groups, learn=True)
            passes.append(len(runtime.given))
        # 4 × 16 = 64; 68 < 64 + 16; 80 < 64 + 33; 84 < 64 + 53; 480 > 64 + 74; 480 > 64 + 194
        assert LARGE == 4
        assert passes == [1, 1, 1, 1, 1, 1]
        worth, share = 314.0, 120 / 314
        assert runtime.given[0] == pytest.approx(1 - worth * share / (64 + worth), abs=0.01)

    def test_a_large_batch_unlike_those_before_takes_a_second_pass(self, images: np.ndarray) -> None:
        runtime = Confidence(batch_norm=True)
        normalise = Normaliser(runtime, DomainMoments([CLASSES], CLASSES))
        normalise(each_in_turn()[:120], runtime.groups, learn=True)
        first, second = runtime.given
        assert first == 1.0, "nothing is known of the stream yet"
        assert second == pytest.approx(1 - 120 / (64 + 120), abs=0.01)

    def test_moments_without_numbers_leave_no_trace(self) -> None:
        runtime = Confidence(batch_norm=True)
        normalise = Normaliser(runtime, DomainMoments([CLASSES], CLASSES))
        batch = each_in_turn()[:10]
        normalise(batch, runtime.groups, learn=True)
        before = normalise.moments.state()
        with np.errstate(all="ignore"):
            normalise(np.where(np.arange(10)[:, None, None, None] == 3, np.nan, batch), runtime.groups, learn=True)
        assert all(np.array_equal(value, normalise.moments.state()[name]) for name, value in before.items())

    def test_what_a_bundle_says(self, bn_runtime: TorchRuntime) -> None:
        bundle = bundle_of(bn_runtime)
        layers = len(layer_sizes(bn_runtime.groups))
        told = replace(bundle, variances=Variances(np.ones((2, layers)), np.full((2, layers), 0.5)))
        prior = moments_of(bundle.merge(), tuple(bn_runtime.groups))
        for each, images in ((told, 4.0), (bundle, MomentSettings().unknown)):
            normalise = Normaliser.of_bundle(bn_runtime, each)
            assert isinstance(normalise, Normaliser)
            np.testing.assert_allclose(normalise.moments.worth(prior, prior, 0), images)
        assert "merged moments and 0 independent images" in normalise.describe()

    def test_without_batch_norm_there_is_nothing_to_normalise(self) -> None:
        runtime = TorchRuntime(load_family("fashion-vit"))
        found = Normaliser.of_bundle(runtime, bundle_of(runtime))
        assert isinstance(found, Plain)
        assert found.describe() == "no BatchNorm"


class TestBegin:
    """Of a network that has changed: the moments of before are another's."""

    def test_moments_begin_with_images_that_stand_for_the_domain(self, evenly: np.ndarray) -> None:
        runtime = Confidence(batch_norm=True)
        normalise = Normaliser(runtime, DomainMoments([CLASSES], CLASSES))
        normalise.follow(evenly[:8] + 9, runtime.groups)
        assert normalise.followed == 8
        runtime.given.clear()
        normalise.begin(evenly, runtime.groups)
        assert runtime.given == [0.0]  # by their own statistics, in one pass: of the network as it is
        assert normalise.followed == 0
        other = DomainMoments([CLASSES], CLASSES)
        seen = runtime(evenly, moments=True)
        other.learn(seen.moments, softmax(seen.logits))
        other.trust()
        assert_same_state(normalise.moments.state(), other.state())

    def test_features_begin_anew_too(self, evenly: np.ndarray) -> None:
        source, prior = np.array([[1.0] * CLASSES, [4.0] * CLASSES]), np.array([[0.5] * CLASSES, [0.2] * CLASSES])
        aligners = [Aligner(Confidence(), DomainMoments([CLASSES], CLASSES), source) for _ in range(2)]
        aligners[0].follow(evenly + 9, Confidence().groups, prior)
        aligners[0].begin(evenly[:8], Confidence().groups, prior)
        aligners[1].follow(evenly[:8], Confidence().groups, prior)
        assert_same_state(aligners[0].moments.state(), aligners[1].moments.state())
        assert (aligners[0].followed, aligners[1].followed) == (0, 8)

    def test_without_moments_there_is_nothing_to_begin(self, evenly: np.ndarray) -> None:
        runtime = Confidence(batch_norm=True)
        Plain(runtime).begin(evenly, runtime.groups)
        assert runtime.forwarded == 0

    def test_all_images_are_looked_at_again(self, evenly: np.ndarray) -> None:
        normalise = Normaliser(Confidence(batch_norm=True), DomainMoments([CLASSES], CLASSES))
        for _ in range(4):
            normalise.follow(evenly[:100], normalise.runtime.groups)
        before = normalise.moments.stream.count
        normalise.look_again()
        normalise.follow(evenly[:100], normalise.runtime.groups)
        assert normalise.moments.stream.count == before + 100

    @pytest.mark.parametrize("wrong", [-1, 0.5, np.nan, "3"])
    def test_hostile_states_are_refused_and_change_nothing(self, wrong: Any, evenly: np.ndarray) -> None:
        normalise = Normaliser(Confidence(batch_norm=True), DomainMoments([CLASSES], CLASSES))
        normalise.follow(evenly[:8], normalise.runtime.groups)
        before = normalise.state()
        with pytest.raises(MergettaError, match="followed"):
            normalise.restore({**before, "followed": wrong})
        assert_same_state(normalise.state(), before)


class TestAligner:
    def test_one_frame_by_hand(self) -> None:
        """Of a class of four, and worth 1 / (1 − 1/4 − 0.005 + 1) images, beside 16 of the prior."""
        source, prior = np.array([[1.0] * CLASSES, [4.0] * CLASSES]), np.array([[0.5] * CLASSES, [0.2] * CLASSES])
        runtime = Confidence()
        align = Aligner(runtime, DomainMoments([CLASSES], CLASSES, settings=MomentSettings(unknown=16.0)), source)
        frame = each_in_turn()[1:2]
        x = frame[:, 0, 0, :CLASSES].astype(np.float64)
        before = (x - 0.5) * np.sqrt((4 + 1e-6) / (0.2 + 1e-6)) + 1
        np.testing.assert_allclose(align(frame, runtime.groups, prior).logits, before, rtol=1e-5)
        share = (1 / 1.745) / (1 / 1.745 + 16)
        mean = share * x + (1 - share) * 0.5
        variance = share * x**2 + (1 - share) * (0.2 + 0.5**2) - mean**2
        after = (x - mean) * np.sqrt((4 + 1e-6) / (variance + 1e-6)) + 1
        np.testing.assert_allclose(align(frame, runtime.groups, prior, learn=True).logits, after, rtol=1e-5)
        np.testing.assert_allclose(align(frame, runtime.groups, prior).logits, after, rtol=1e-5)
        assert "1 independent images" in align.describe()

    def test_a_long_mixed_stream_gets_the_moments_of_the_source(self) -> None:
        source, prior = np.array([[1.0] * CLASSES, [4.0] * CLASSES]), np.array([[9.0] * CLASSES, [9.0] * CLASSES])
        runtime, images = Confidence(), each_in_turn()
        align = Aligner(runtime, DomainMoments([CLASSES], CLASSES, settings=MomentSettings(unknown=1e-6)), source)
        logits = align(images, runtime.groups, prior, learn=True).logits
        np.testing.assert_allclose(logits.mean(axis=0), 1.0, atol=1e-3)
        np.testing.assert_allclose(logits.var(axis=0), 4.0, atol=1e-2)

    def test_frames_without_numbers_leave_no_trace(self) -> None:
        runtime, prior = Confidence(), np.ones((2, CLASSES))
        align = Aligner(runtime, DomainMoments([CLASSES], CLASSES), prior)
        align(each_in_turn(), runtime.groups, prior, learn=True)
        before = align.moments.state()
        with np.errstate(all="ignore"):
            align(np.full_like(each_in_turn()[:1], np.nan), runtime.groups, prior, learn=True)
        assert all(np.array_equal(value, align.moments.state()[name]) for name, value in before.items())


class TestZOMerge:
    def make(self, runtime: Runtime, normalised: bool = True, lr: float = 5e-3) -> ZOMerge:
        bundle = bundle_of(runtime)
        normalise = Normaliser.of_bundle(runtime, bundle) if normalised else None
        return ZOMerge(runtime, bundle, loss="entropy", lr=lr, delta=0.1, normalise=normalise)

    def test_the_papers_by_default(self, subject: Runtime, images: np.ndarray) -> None:
        adapter = self.make(subject, normalised=False)
        assert isinstance(adapter.normalise, Plain)
        assert adapter.normalise.describe() == "the batch's own statistics"
        expected = subject(images, bundle_of(subject).merge(), 0.0).logits
        np.testing.assert_allclose(adapter.predict(images), expected, atol=1e-4)
        assert not any(name.startswith("moments") for name in adapter.state_dict())

    def test_the_papers_takes_no_account_of_moments(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """Those of the bundle may be any."""
        bundle = bundle_of(bn_runtime)
        weights = learnable(bundle.base)
        coefficients = {n: w if n in weights else 0 * w for n, w in bundle.coefficients.items()}
        other = Bundle(bundle.base, bundle.basis, coefficients, (), bundle.family, None, bundle.settings)
        first, second = (ZOMerge(bn_runtime, each, loss="entropy", delta=0.1) for each in (bundle, other))
        for _ in range(2):
            np.testing.assert_allclose(first.predict(images), second.predict(images), atol=1e-4)

    def test_a_single_frame_is_predicted_as_in_a_batch(self, subject: Runtime, images: np.ndarray) -> None:
        adapter = self.make(subject)
        for start in range(0, 24, 8):
            adapter.predict(images[start : start + 8])
        together = adapter.predict(images, adapt=False)
        alone = np.concatenate([adapter.predict(image[None], adapt=False) for image in images])
        np.testing.assert_allclose(together, alone, atol=1e-4)

    def test_single_clean_frames_are_recognised(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """Which their own statistics would not allow."""
        source = bn_runtime(images, given=1.0).logits.argmax(axis=1)
        agreed = []
        for normalised in (True, False):
            adapter = self.make(bn_runtime, normalised, lr=0.0)
            found = np.concatenate([adapter.predict(image[None]) for image in images]).argmax(axis=1)
            agreed.append(np.mean(found == source))
        assert agreed[0] > 0.85
        assert agreed[1] < 0.7

    def test_a_state_goes_on_exactly(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter, again = self.make(bn_runtime), self.make(bn_runtime)
        for start in (0, 10):
            adapter.predict(images[start : start + 10])
        state = adapter.state_dict()
        assert state["moments.count"] == 20
        again.load_state_dict(state)
        np.testing.assert_array_equal(adapter.predict(images[20:30]), again.predict(images[20:30]))
        np.testing.assert_array_equal(adapter.point, again.point)
        adapter.reset()
        assert adapter.normalise.moments is not None
        assert adapter.normalise.moments.count == 0

    def test_hostile_states_change_nothing(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = self.make(bn_runtime)
        adapter.predict(images[:10])
        before = adapter.state_dict()
        for wrong in (
            {"moments.classes": np.zeros(3)},
            {"moments.sums": np.full_like(before["moments.sums"], np.nan)},
            {"moments.count": -1.0},
        ):
            with pytest.raises(MergettaError, match="does not fit"):
                adapter.load_state_dict({**before, "steps": 99, **wrong})
        without = {name: value for name, value in before.items() if not name.startswith("moments.")}
        with pytest.raises(MergettaError, match=r"it has no 'moments\.count'"):
            adapter.load_state_dict({**without, "steps": 99})
        after = adapter.state_dict()
        assert all(np.array_equal(after[name], value) for name, value in before.items())

    def test_the_loss_is_that_of_the_same_moments(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """Both sides of a step normalise as the prediction did."""
        adapter = self.make(bn_runtime)
        adapter.predict(images[:10])
        p = softmax(adapter.predict(images[:10], adapt=False))
        here = -(p * np.log(p)).sum(axis=1).mean()
        assert adapter.loss_at(adapter.point, images[:10]) == pytest.approx(here, rel=1e-4)
