"""race-merge where there is nothing to do: at rest, and at home."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mergetta import build_bundle
from mergetta.adapters.base import SETTLED
from mergetta.adapters.forward_only.candidates import SOURCE
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.streams.shift import distance
from tests.confidence import Confidence, assert_same_state, expert, race_merge


class TestRest:
    def at_rest(self, evenly: np.ndarray, **options: Any) -> RaceMerge:
        adapter = race_merge(Confidence(True), [expert(2.0, batch_norm=True), expert(0.5, batch_norm=True)], **options)
        while not adapter.resting:
            adapter.predict(evenly)
        return adapter

    def test_moments_stay_as_they_are_and_predictions_are_those_of_the_adjustable_model(
        self, evenly: np.ndarray
    ) -> None:
        adapter = self.at_rest(evenly, rest=300)
        assert adapter.visit.count >= 300
        before, expected = adapter.state_dict(), adapter.look(evenly)
        np.testing.assert_allclose(adapter.predict(evenly), expected, rtol=1e-5)
        after = adapter.state_dict()
        for name, value in before.items():
            if name != "images" and not name.startswith("signature."):
                np.testing.assert_array_equal(after[name], value, err_msg=name)

    def test_from_rest_to_steps_and_back(self, evenly: np.ndarray) -> None:
        """Steps begin after `patience` images, the device does not rest meanwhile, and then folds where they led."""
        adapter = self.at_rest(evenly, rest=300, patience=2000)
        while not adapter.refining:
            assert adapter.resting and adapter.visit.images <= 2000 and adapter.refinement.steps == 0
            adapter.predict(evenly)
        adapter.refinement.settings = replace(adapter.refinement.settings, warm=1, block=4, duel=1, blocks=1)
        while not adapter.refinement.over:
            assert not adapter.resting
            again = RaceMerge(Confidence(True), adapter.bundle, eager=False, finals=0, rest=300, patience=2000)
            again.refinement.settings = adapter.refinement.settings
            again.load_state_dict(adapter.state_dict())
            assert_same_state(again.state_dict(), adapter.state_dict())
            adapter.predict(evenly)
        adapter.refinement.point = np.ones_like(adapter.refinement.point)  # as if the duel had been won
        assert not adapter.resting
        while not adapter.resting:
            adapter.predict(evenly)
        before, expected = adapter.runtime.forwarded, adapter.look(evenly)
        np.testing.assert_allclose(adapter.predict(evenly), expected, rtol=1e-5)
        assert adapter.runtime.forwarded - before == 2 * len(evenly)

    def test_one_pass_of_what_was_folded_once(self, evenly: np.ndarray) -> None:
        adapter = self.at_rest(evenly)
        folded: list[int] = []
        original = adapter.runtime.folded
        adapter.runtime.folded = lambda groups: folded.append(1) or original(groups)  # type: ignore[method-assign,func-returns-value]
        before = adapter.runtime.forwarded
        for _ in range(5):
            adapter.predict(evenly)
        assert adapter.runtime.forwarded - before == 5 * len(evenly)
        assert len(folded) == 1

    def test_a_state_at_rest_goes_on_exactly(self, evenly: np.ndarray) -> None:
        adapter = self.at_rest(evenly)
        adapter.predict(evenly)
        again = RaceMerge(Confidence(True), adapter.bundle, settings=adapter.settings)
        again.load_state_dict(adapter.state_dict())
        for images in (evenly, evenly[:7], evenly + 5, evenly + 5):
            np.testing.assert_array_equal(adapter.predict(images), again.predict(images))
        assert adapter.visit.shifts == again.visit.shifts > 0

    def test_a_shift_ends_it(self, evenly: np.ndarray) -> None:
        adapter = self.at_rest(evenly)
        adapter.predict(evenly + 5)
        assert (adapter.visit.shifts, adapter.resting, adapter.visit.count) == (1, False, len(evenly))

    def test_a_small_drift_ends_it_without_a_shift(self, evenly: np.ndarray) -> None:
        adapter = self.at_rest(evenly)
        drift = 0.0
        while adapter.resting:
            drift += 0.01
            adapter.predict(evenly + drift)
        assert drift < 0.3 and not adapter.visit.shifts
        before = adapter.state_dict()["moments.sums"]
        adapter.predict(evenly + drift)  # moments follow again
        assert not np.array_equal(adapter.state_dict()["moments.sums"], before)

    def test_another_bundle_ends_it(self, evenly: np.ndarray) -> None:
        adapter = self.at_rest(evenly)
        adapter.predict(evenly)
        adapter.swap(build_bundle(Confidence(True).groups, [expert(3.0, batch_norm=True)]))
        assert not adapter.resting


class TestHome:
    """The stream is what the source model was made for."""

    @staticmethod
    def at_home(evenly: np.ndarray, **options: float) -> RaceMerge:
        runtime = Confidence(batch_norm=True)
        runtime.signature = runtime(evenly).signature
        far = runtime.signature + 1
        return race_merge(runtime, [expert(2.0, far, batch_norm=True), expert(3.0, far, batch_norm=True)], **options)

    def test_the_source_model_predicts_as_it_is(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=len(evenly))
        for _ in range(3):
            np.testing.assert_array_equal(adapter.predict(evenly), adapter.runtime(evenly, given=1.0).logits)
        status = adapter.status()
        assert (status.phase, status.steps, status.weights[SOURCE]) == (SETTLED, 0, 1.0)
        assert status.normalises == "what the source model was trained with"

    def test_not_before_enough_images_have_been_seen(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=2 * len(evenly))
        adapter.predict(evenly)
        assert not adapter.home
        adapter.predict(evenly)
        assert adapter.home

    def test_what_was_held_before_is_forgotten(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=len(evenly))
        for start in range(0, len(evenly), 8):
            adapter.predict(evenly[start : start + 8])
        assert adapter.home and adapter.race.trials.held is None and not adapter.race.trials.begun

    def test_another_bundle_at_home_is_no_reason_to_start_with_the_source_model_elsewhere(
        self, evenly: np.ndarray
    ) -> None:
        adapter = self.at_home(evenly, held=len(evenly))
        adapter.predict(evenly)
        assert adapter.swap(build_bundle(adapter.runtime.groups, [expert(4.0, batch_norm=True)]))
        assert adapter.carried is None and adapter.home

    def test_elsewhere_members_race(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=len(evenly))
        adapter.predict(evenly + 0.5)
        assert not adapter.home and adapter.status().steps > 0

    def test_at_rest_it_is_the_source_model_too(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=len(evenly), rest=2 * len(evenly))
        for _ in range(4):
            logits = adapter.predict(evenly)
        assert adapter.resting
        np.testing.assert_array_equal(logits, adapter.runtime(evenly, given=1.0).logits)

    def test_a_little_drift_does_not_wake_it(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=len(evenly), rest=2 * len(evenly), home=0.05, wake=1e-9)
        for _ in range(4):
            adapter.predict(evenly)
        adapter.predict(1.001 * evenly)
        adapter.predict(1.001 * evenly)
        assert adapter.resting and adapter.home

    def test_it_does_not_go_in_and_out_at_the_threshold(self, evenly: np.ndarray) -> None:
        adapter = self.at_home(evenly, held=len(evenly), memory=len(evenly), shift=10.0)
        adapter.predict(evenly)
        assert adapter.home
        for factor, home in ((1.1, True), (1.5, False)):  # of pixels: between once and twice the distance, and beyond
            signature = np.asarray(adapter.runtime(factor * evenly).signature)
            far = distance(signature, adapter.runtime.signature)
            adapter.settings = replace(adapter.settings, home=far / 1.5 if home else far / 3)
            adapter.predict(factor * evenly)
            assert adapter.home == home

    def test_at_rest_it_still_learns_where_the_stream_is(self, evenly: np.ndarray) -> None:
        """A domain that is too near to be a shift is no home for all that."""
        adapter = self.at_home(evenly, held=len(evenly), rest=2 * len(evenly), home=1e-4, wake=10.0, shift=10.0)
        for _ in range(4):
            adapter.predict(evenly)
        assert adapter.home
        for _ in range(4):
            adapter.predict(evenly + 0.2)
        assert not adapter.home and adapter.visit.shifts == 0
        assert adapter.status().steps > 0

    def test_a_state_knows_it(self, evenly: np.ndarray) -> None:
        adapter, again = (self.at_home(evenly, held=len(evenly)) for _ in range(2))
        adapter.predict(evenly)
        again.load_state_dict(adapter.state_dict())
        assert again.home
        assert_same_state(again.state_dict(), adapter.state_dict())


def test_a_stream_that_never_looks_mixed_opens_few_graphs(evenly: np.ndarray) -> None:
    """Every other first mixture is another graph to fold: it is made anew when twice as many images are known."""
    near = np.stack([np.zeros(1), np.ones(1)])
    adapter = race_merge(Confidence(), [expert(2.0, near), expert(0.5, near + 1)])
    seen = []
    for frame in np.repeat(evenly[:1], 300, axis=0):
        adapter.predict(frame[None])
        seen.append(adapter.race)
    assert not adapter.race.begun
    assert len({id(race) for race in seen}) == 9  # 1, 2, 4, …, 256
