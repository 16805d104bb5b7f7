"""Moments of a domain with a prior: how far the stream is believed, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta.errors import MergettaError
from mergetta.streams.domain import DomainMoments, MomentSettings
from mergetta.streams.moments import batch_moments
from mergetta.streams.variances import Variances, between_domains


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
