"""race-merge with another bundle in the middle of a stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, Expert, MergettaError, build_bundle
from mergetta.adapters.base import ADAPTING
from mergetta.adapters.forward_only.normaliser import Aligner, Plain
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.adapters.forward_only.source_features import SourceFeatures
from tests.confidence import CAUTION, CLASSES, Confidence, assert_same_state, expert, race_merge


class TestSwap:
    @staticmethod
    def bundle(*values: float, batch_norm: bool = True, **options: Any) -> Bundle:
        experts = [expert(value, batch_norm=batch_norm) for value in values]
        return build_bundle(Confidence(batch_norm).groups, experts, **options)

    def running(self, evenly: np.ndarray, *values: float, batches: int = 3, **options: Any) -> RaceMerge:
        adapter = RaceMerge(
            Confidence(True), self.bundle(*values), **{"eager": False, "finals": 0, "caution": CAUTION, **options}
        )
        for _ in range(batches):
            adapter.predict(evenly[:96])
        return adapter

    @pytest.mark.parametrize("batches", [0, 1, 3, 20])
    def test_the_same_bundle_changes_nothing(self, batches: int, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, 0.5, batches=batches)
        before, bundle = adapter.state_dict(), adapter.bundle
        assert not adapter.swap(self.bundle(2.0, 0.5))
        assert adapter.bundle is bundle
        assert_same_state(adapter.state_dict(), before)

    def test_weights_are_carried_by_name(self, evenly: np.ndarray) -> None:
        """What the one that is gone had goes to all alike; who is new starts with no more than that."""
        adapter = self.running(evenly, 2.0, 0.5, 1.5, batches=5, temperature=0.5)  # all have been tried
        before = dict(zip(("2.0", "0.5", "1.5", "source"), adapter.weights, strict=True))
        assert min(before.values()) > 0.01
        new = self.bundle(1.5, 3.0, 2.0)
        assert adapter.swap(new)
        assert adapter.bundle is new
        share = before["0.5"] / 3
        expected = [before["1.5"] + share, share, before["2.0"] + share, before["source"]]
        np.testing.assert_allclose(adapter.weights, expected)
        np.testing.assert_allclose(adapter.race.candidates[0], expected)
        np.testing.assert_allclose(adapter.weights.sum(), sum(before.values()))

    def test_members_of_one_name_share_what_it_had(self, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, 0.5, temperature=0.5)
        before = adapter.weights
        adapter.swap(self.bundle(2.0, 2.0, 0.5))
        np.testing.assert_allclose(adapter.weights, [before[0] / 2, before[0] / 2, before[1], before[2]])

    def test_before_the_first_image_it_is_a_new_adapter(self, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, batches=0)
        assert adapter.swap(self.bundle(1.5, 0.5))
        fresh = RaceMerge(Confidence(True), self.bundle(1.5, 0.5), eager=False, finals=0, caution=CAUTION)
        np.testing.assert_allclose(adapter.weights, fresh.weights)
        for _ in range(20):
            np.testing.assert_array_equal(adapter.predict(evenly[:96]), fresh.predict(evenly[:96]))
        assert_same_state(adapter.state_dict(), fresh.state_dict())

    @pytest.mark.parametrize("batches", [1, 3, 20])
    def test_what_is_known_of_the_stream_is_kept_and_members_race_anew(self, batches: int, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, 0.5, batches=batches)
        before = adapter.state_dict()
        # with who wins they begin anew, with the 64 images that are held; later on a part of the stream is looked at
        assert before["moments.count"] == {1: 96, 3: 64}.get(batches, 544)
        adapter.swap(self.bundle(2.0, 0.5, 1.5))
        after = adapter.state_dict()
        for name in before:
            if name.startswith(("moments.", "domain.", "signature.")) or name in ("shifts", "fallbacks"):
                np.testing.assert_array_equal(after[name], before[name], err_msg=name)
        assert adapter.status().phase == ADAPTING
        assert adapter.race.trials.count == len(adapter.race.scores) == 0
        assert "trials.held" not in after
        for _ in range(20):
            adapter.predict(evenly[:96])
        assert adapter.settled
        assert adapter.visit.shifts == 0

    def test_what_is_carried_predicts_the_next_batches_and_races(self, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, 0.5, batches=20)
        adapter.swap(self.bundle(0.5, 2.0))
        carried = adapter.weights
        for _ in range(3):
            adapter.predict(evenly[:8])
            np.testing.assert_allclose(adapter.weights, carried)
            np.testing.assert_allclose(adapter.race.candidates[0], carried)

    def test_a_bundle_may_bring_features_or_lack_them(self, evenly: np.ndarray) -> None:
        """What is not the same on both sides begins anew."""
        runtime, source = Confidence(), SourceFeatures(np.zeros(CLASSES), np.ones(CLASSES))
        features = np.stack([np.zeros(CLASSES), np.ones(CLASSES)])
        adapter = race_merge(runtime, [expert(2.0)], source)
        for parts, kind in (({"features": features}, Aligner), ({}, Plain)):
            adapter.predict(evenly)
            new = build_bundle(runtime.groups, [expert(0.5, **parts)], family=runtime.family)
            assert adapter.swap(new)
            assert adapter.bundle is new and isinstance(adapter.normalise, kind)
            assert adapter.normalise.followed == 0
            assert np.isfinite(adapter.predict(evenly)).all()

    @pytest.mark.parametrize("batches", [0, 3])
    def test_a_state_after_it_goes_on_exactly(self, batches: int, evenly: np.ndarray) -> None:
        """What the first candidate is handicapped by goes by the weights that were carried."""
        adapter = self.running(evenly, 2.0, 0.5, batches=batches, temperature=0.5)
        new = self.bundle(2.0, 0.5, 1.5)
        adapter.swap(new)
        again = RaceMerge(Confidence(True), new, temperature=0.5, eager=False, finals=0, caution=CAUTION)
        again.load_state_dict(adapter.state_dict())
        np.testing.assert_array_equal(again.race.candidates, adapter.race.candidates)
        for _ in range(10):
            np.testing.assert_array_equal(adapter.predict(evenly), again.predict(evenly))
        assert_same_state(again.state_dict(), adapter.state_dict())
        race = again.race
        assert len(race.scores) == len(race.candidates) == 7
        far = np.abs(race.candidates[:, :-1] @ [1.0, -0.5, 0.5])
        shares = np.exp((race.scores - CAUTION * far) / 0.5)
        np.testing.assert_allclose(race.weights, shares @ race.candidates / shares.sum())

    @pytest.mark.parametrize("wrong", [np.ones(3), -np.ones(4), np.full(4, np.nan), np.ones((1, 4))])
    def test_hostile_weights_in_a_state_are_refused_and_change_nothing(self, wrong: Any, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, 0.5)
        adapter.swap(self.bundle(2.0, 0.5, 1.5))
        state = adapter.state_dict()
        assert state["carried"].shape == (4,)
        with pytest.raises(MergettaError, match="does not fit"):
            adapter.load_state_dict({**state, "carried": wrong})
        assert_same_state(adapter.state_dict(), state)

    def test_what_is_carried_is_forgotten_with_the_domain(self, evenly: np.ndarray) -> None:
        adapter = self.running(evenly, 2.0, 0.5, batches=20)
        adapter.swap(self.bundle(0.5, 2.0))
        fresh = RaceMerge(Confidence(True), self.bundle(0.5, 2.0), eager=False, caution=CAUTION)
        np.testing.assert_array_equal(adapter.predict(evenly + 5), fresh.predict(evenly + 5))
        assert adapter.visit.shifts == 1
        np.testing.assert_array_equal(adapter.weights, fresh.weights)

    def test_bundles_that_are_refused_change_nothing(self, evenly: np.ndarray) -> None:
        runtime = Confidence(True)
        runtime.family = "ours"
        base = [Expert(expert(value, batch_norm=True).groups, "ours", str(value)) for value in (2.0, 0.5)]
        adapter = race_merge(runtime, base)
        adapter.predict(evenly)
        before, bundle, expected = adapter.state_dict(), adapter.bundle, adapter.look(evenly)
        groups = expert(1.5, batch_norm=True).groups
        for wrong, sentence in (
            (build_bundle(runtime.groups, [groups], family="theirs"), "belongs to the family 'theirs'"),
            (build_bundle(runtime.groups, base, members=0), "no members"),
            (build_bundle(Confidence().groups, [expert(1.5).groups], family="ours"), "The bundle"),
        ):
            with pytest.raises(MergettaError, match=sentence):
                adapter.swap(wrong)
            assert adapter.bundle is bundle
            assert_same_state(adapter.state_dict(), before)
            np.testing.assert_array_equal(adapter.look(evenly), expected)

    def test_signatures_of_another_model_are_refused_and_change_nothing(self, evenly: np.ndarray) -> None:
        adapter = race_merge(Confidence(), [expert(2.0, np.ones((2, 1)))])
        adapter.predict(evenly)
        before, bundle = adapter.state_dict(), adapter.bundle
        with pytest.raises(MergettaError, match="not of this model"):
            adapter.swap(build_bundle(Confidence().groups, [expert(2.0, np.ones((2, 7)))]))
        assert adapter.bundle is bundle
        assert_same_state(adapter.state_dict(), before)
