"""What every runtime and every adapter must do; each implementation runs through these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.adapters.base import Adapter
from mergetta.groups import has_batch_norm, kind_of, moments_of, with_moments
from mergetta.runtimes.base import Runtime
from mergetta.streams.moments import batch_moments


class RuntimeContract:
    """Subclasses give the fixtures `subject` (a runtime) and `images` that it takes."""

    def test_is_a_runtime(self, subject: Runtime) -> None:
        assert isinstance(subject, Runtime)

    def test_shapes(self, subject: Runtime, images: np.ndarray) -> None:
        logits, features, signature, moments = subject(images)
        classes, width = subject.classifier.weight.shape
        assert logits.shape == (len(images), classes)
        assert features.shape == (len(images), width)
        assert signature.ndim == 2
        assert len(signature) == 2
        assert (signature[1] >= 0).all()
        assert moments is None

    def test_structure_matches_groups(self, subject: Runtime) -> None:
        assert [group.name for group in subject.structure] == list(subject.groups)
        assert all(subject.groups[group.name].shape == (group.size,) for group in subject.structure)
        assert all(group.kind in (kind_of(group.name), "prompts") for group in subject.structure)
        blocks = [group.block for group in subject.structure]
        assert blocks == sorted(blocks)

    def test_features_and_classifier_make_the_logits(self, subject: Runtime, images: np.ndarray) -> None:
        logits, features, *_ = subject(images)
        weight, bias = subject.classifier
        np.testing.assert_allclose(features @ weight.T + bias, logits, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("given", [0.0, 0.3, 1.0])
    def test_it_is_pure(self, subject: Runtime, images: np.ndarray, given: float) -> None:
        before = subject(images, given=given)
        source = {name: value.copy() for name, value in subject.groups.items()}
        changed = {name: value * 1.1 + 0.1 for name, value in subject.groups.items()}
        kept = {name: value.copy() for name, value in changed.items()}
        other = subject(images, changed, given)
        assert np.abs(other.logits - before.logits).max() > 1e-3
        subject(images, changed, 1 - given, moments=True)
        assert all(np.array_equal(source[name], subject.groups[name]) for name in source)
        assert all(np.array_equal(kept[name], changed[name]) for name in kept)
        for groups, expected in ((None, before), (changed, other), (subject.groups, before)):
            again = subject(images, groups, given)
            for one, two in zip(again[:3], expected[:3], strict=True):
                np.testing.assert_array_equal(one, two)

    def test_the_same_mapping_with_other_values_counts_as_other_groups(
        self, subject: Runtime, images: np.ndarray
    ) -> None:
        groups = dict(subject.groups)
        before = subject(images, groups).logits
        for name in groups:
            groups[name] = groups[name] * 1.1 + 0.1
        fresh = subject(images, dict(groups)).logits
        subject(images)
        groups |= subject.groups
        np.testing.assert_array_equal(subject(images, groups).logits, before)
        groups |= {name: value * 1.1 + 0.1 for name, value in subject.groups.items()}
        np.testing.assert_array_equal(subject(images, groups).logits, fresh)

    def test_with_all_given_an_image_does_not_depend_on_its_batch(self, subject: Runtime, images: np.ndarray) -> None:
        whole = subject(images, given=1.0).logits
        for part in (slice(0, 1), slice(1, 4), slice(None, None, -1)):
            np.testing.assert_allclose(subject(images[part], given=1.0).logits, whole[part], atol=1e-4)
        if has_batch_norm(subject.structure):
            assert np.abs(subject(images[:1]).logits - subject(images).logits[:1]).max() > 1e-2

    @pytest.mark.parametrize("given", [0.0, 0.3, 1.0])
    def test_moments_only_when_asked(self, subject: Runtime, images: np.ndarray, given: float) -> None:
        plain, observed = subject(images, given=given), subject(images, given=given, moments=True)
        assert plain.moments is None
        assert observed.moments.shape == (len(images), *moments_of(subject.groups).shape)
        assert np.isfinite(observed.moments).all()
        assert (observed.moments[:, 1] >= 0).all()
        for one, two in zip(plain[:3], observed[:3], strict=True):
            np.testing.assert_allclose(one, two, atol=1e-3, rtol=1e-4)

    def test_what_a_batch_is_normalised_with_is_what_it_shows(self, subject: Runtime, images: np.ndarray) -> None:
        """Its own moments, given back as groups, give the pass with batch statistics again, of the same moments."""
        own = subject(images, moments=True)
        again = subject(images, with_moments(subject.groups, batch_moments(own.moments)), 1.0, moments=True)
        np.testing.assert_allclose(again.logits, own.logits, atol=1e-3)
        np.testing.assert_allclose(again.moments, own.moments, atol=1e-3, rtol=1e-3)

    def test_moments_are_of_each_image(self, subject: Runtime, images: np.ndarray) -> None:
        """With all given, what an image shows does not depend on its batch either."""
        whole = subject(images, given=1.0, moments=True).moments
        alone = [subject(images[i : i + 1], given=1.0, moments=True).moments[0] for i in range(4)]
        np.testing.assert_allclose(whole[:4], alone, atol=1e-4, rtol=1e-4)

    def test_shares_may_differ_from_channel_to_channel(self, subject: Runtime, images: np.ndarray) -> None:
        channels = moments_of(subject.groups).shape[1]
        changed = {name: value * 1.1 + 0.1 for name, value in subject.groups.items()}
        for share in (0.0, 0.3, 1.0):
            one, all_the_same = (subject(images, changed, given) for given in (share, np.full(channels, share)))
            np.testing.assert_array_equal(one.logits, all_the_same.logits)
        mixed = np.linspace(0, 1, channels, dtype=np.float32)
        # a blend per channel is the blend that one gets by giving what it comes to
        seen = subject(images, changed, mixed, moments=True)
        blended = mixed * moments_of(changed) + (1 - mixed) * batch_moments(seen.moments)
        np.testing.assert_allclose(
            seen.logits, subject(images, with_moments(changed, blended), 1.0).logits, atol=1e-3, rtol=1e-3
        )
        with pytest.raises(MergettaError, match="one per channel"):
            subject(images, given=np.ones(channels + 1))
        for bad in (-0.1, 1.1, np.nan) if channels else ():
            with pytest.raises(MergettaError, match="between 0 and 1"):
                subject(images, given=np.append(np.ones(channels - 1), bad))

    def test_bad_groups_are_refused_and_change_nothing(self, subject: Runtime, images: np.ndarray) -> None:
        before = subject(images).logits
        name = next(iter(subject.groups))
        negative = {n: v - 2 * v.max() for n, v in subject.groups.items() if kind_of(n) == "variance"}
        for bad in (
            {k: v for k, v in subject.groups.items() if k != name},
            {**subject.groups, name: np.full_like(subject.groups[name], np.nan)},
            {**subject.groups, name: np.zeros(subject.groups[name].size + 1, np.float32)},
            {**subject.groups, "other": np.zeros(2, np.float32)},
            *({**subject.groups, name: value} for name, value in negative.items()),
        ):
            with pytest.raises(MergettaError):
                subject(images, bad)
        np.testing.assert_array_equal(subject(images).logits, before)

    @pytest.mark.parametrize("given", [-0.1, 1.1, np.nan])
    def test_a_share_out_of_range_is_refused(self, subject: Runtime, images: np.ndarray, given: float) -> None:
        with pytest.raises(MergettaError, match="between 0 and 1"):
            subject(images, given=given)

    def test_folded_is_the_same_with_all_given(self, subject: Runtime, images: np.ndarray) -> None:
        groups = {name: value * 1.1 + 0.1 for name, value in subject.groups.items()}
        for wanted in (subject.groups, groups):
            folded = subject.folded(wanted)
            for batch in (images, images[:1]):
                before = subject.forwarded
                output = folded(batch)
                assert subject.forwarded == before + len(batch)
                assert output.moments is None
                for one, two in zip(output[:3], subject(batch, wanted, 1.0)[:3], strict=True):
                    np.testing.assert_allclose(one, two, atol=1e-4, rtol=1e-4)

    def test_folded_keeps_its_groups(self, subject: Runtime, images: np.ndarray) -> None:
        """Whatever happens to the arrays that it was made of, and to others that are made after it."""
        groups = {name: value.copy() for name, value in subject.groups.items()}
        folded = subject.folded(groups)
        before = folded(images).logits
        for value in groups.values():
            value[:] = 7.0
        other = subject.folded(groups)
        assert np.abs(other(images).logits - before).max() > 1e-3
        np.testing.assert_array_equal(folded(images).logits, before)

    def test_folded_checks_like_any_pass(self, subject: Runtime, images: np.ndarray) -> None:
        name = next(iter(subject.groups))
        for bad in ({**subject.groups, name: np.zeros(1, np.float32)}, {**subject.groups, "x": np.zeros(2)}, {}):
            with pytest.raises(MergettaError):
                subject.folded(bad)
        folded = subject.folded(subject.groups)
        for wrong in (images[0], images * 255, images[:0]):
            with pytest.raises(MergettaError):
                folded(wrong)

    def test_counts_images(self, subject: Runtime, images: np.ndarray) -> None:
        before = subject.forwarded
        subject(images)
        assert subject.forwarded == before + len(images)

    def test_a_batch_of_one(self, subject: Runtime, images: np.ndarray) -> None:
        assert np.isfinite(subject(images[:1]).logits).all()


class AdapterContract:
    """Subclasses give the fixtures `subject` (an adapter) and `images`."""

    def test_predicts_logits(self, subject: Adapter, images: np.ndarray) -> None:
        logits = subject.predict(images)
        assert isinstance(logits, np.ndarray)
        assert logits.shape == (len(images), len(subject.runtime.classifier.bias))
        assert np.isfinite(logits).all()

    def test_reset_forgets_everything(self, subject: Adapter, images: np.ndarray) -> None:
        first = [subject.predict(images) for _ in range(3)]
        subject.reset()
        again = [subject.predict(images) for _ in range(3)]
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_state_continues_exactly(self, subject: Adapter, images: np.ndarray) -> None:
        for _ in range(2):
            subject.predict(images)
        state = subject.state_dict()
        assert_plain(state)
        expected = [subject.predict(images[::-1]) for _ in range(2)]
        subject.reset()
        subject.load_state_dict(state)
        for value in expected:
            np.testing.assert_array_equal(subject.predict(images[::-1]), value)

    def test_a_state_that_does_not_fit_is_refused(self, subject: Adapter, images: np.ndarray) -> None:
        if not subject.state_dict():
            return
        expected = [subject.predict(images) for _ in range(2)]
        state = subject.state_dict()
        subject.reset()
        subject.predict(images)
        misshapen = {n: np.zeros((3, 3, 3)) for n, v in state.items() if isinstance(v, np.ndarray) and v.ndim}
        foreign = [{**state, f"optimizer/{index}/exp_avg": np.zeros(3)} for index in ("999", "x")]
        foreign = foreign if hasattr(subject, "optimizer") else []
        for bad in ({}, *foreign, *({**state, name: value} for name, value in misshapen.items())):
            with pytest.raises(MergettaError):
                subject.load_state_dict(bad)
        np.testing.assert_array_equal(subject.predict(images), expected[1])

    def test_batches_of_any_size(self, subject: Adapter, images: np.ndarray) -> None:
        for size in (1, 2, 7):
            assert np.isfinite(subject.predict(images[:size])).all()

    def test_images_that_cannot_be_used_change_nothing(self, subject: Adapter, images: np.ndarray) -> None:
        expected = [subject.predict(images) for _ in range(3)]
        subject.reset()
        for logits in expected:
            for bad in (images[:0], np.full_like(images, np.nan), images[:, :, 0]):
                with pytest.raises(MergettaError):
                    subject.predict(bad)
            np.testing.assert_array_equal(subject.predict(images), logits)

    def test_source_weights_of_the_runtime_stay(self, subject: Adapter, images: np.ndarray) -> None:
        before = {name: value.copy() for name, value in subject.runtime.groups.items()}
        subject.predict(images)
        assert all(np.array_equal(before[name], value) for name, value in subject.runtime.groups.items())


def assert_plain(state: dict[str, Any]) -> None:
    """Numbers and arrays only, so that any format can keep it."""
    assert all(isinstance(value, int | float | np.ndarray) for value in state.values())


class SmallImagesContract(AdapterContract):
    """For adapters of a `NumpyRuntime`."""

    @pytest.fixture
    def images(self) -> np.ndarray:
        return np.random.default_rng(0).random((12, 1, 6, 6)).astype(np.float32)
