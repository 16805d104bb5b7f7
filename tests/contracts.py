"""What every runtime and every adapter must do; each implementation runs through these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.adapters.base import Adapter
from mergetta.runtimes.base import Runtime


class RuntimeContract:
    """Subclasses give the fixtures `subject` (a runtime) and `images` that it takes."""

    def test_is_a_runtime(self, subject: Runtime) -> None:
        assert isinstance(subject, Runtime)

    def test_shapes(self, subject: Runtime, images: np.ndarray) -> None:
        logits, features, statistics = subject(images)
        classes, width = subject.classifier.weight.shape
        assert logits.shape == (len(images), classes)
        assert features.shape == (len(images), width)
        assert statistics.ndim == 2
        assert len(statistics) == 2
        assert (statistics[1] >= 0).all()

    def test_structure_matches_groups(self, subject: Runtime) -> None:
        assert [group.name for group in subject.structure] == list(subject.groups)
        assert all(subject.groups[group.name].shape == (group.size,) for group in subject.structure)
        blocks = [group.block for group in subject.structure]
        assert blocks == sorted(blocks)

    def test_features_and_classifier_make_the_logits(self, subject: Runtime, images: np.ndarray) -> None:
        logits, features, _ = subject(images)
        weight, bias = subject.classifier
        np.testing.assert_allclose(features @ weight.T + bias, logits, rtol=1e-3, atol=1e-3)

    def test_load_changes_the_output_and_source_values_bring_it_back(
        self, subject: Runtime, images: np.ndarray
    ) -> None:
        before = subject(images).logits
        source = {name: value.copy() for name, value in subject.groups.items()}
        subject.load({name: value * 1.1 + 0.1 for name, value in subject.groups.items()})
        assert np.abs(subject(images).logits - before).max() > 1e-3
        assert all(np.array_equal(source[name], subject.groups[name]) for name in source)
        subject.load(subject.groups)
        np.testing.assert_allclose(subject(images).logits, before, atol=1e-5)

    def test_a_bad_load_is_refused_and_changes_nothing(self, subject: Runtime, images: np.ndarray) -> None:
        before = subject(images).logits
        name = next(iter(subject.groups))
        for bad in (
            {k: v for k, v in subject.groups.items() if k != name},
            {**subject.groups, name: np.full_like(subject.groups[name], np.nan)},
            {**subject.groups, name: np.zeros(subject.groups[name].size + 1, np.float32)},
        ):
            with pytest.raises(MergettaError):
                subject.load(bad)
        np.testing.assert_array_equal(subject(images).logits, before)

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
