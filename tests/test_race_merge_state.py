"""The state of race-merge: one that fits goes on exactly, one that does not changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from tests.confidence import CLASSES, Confidence, assert_same_state, expert, race_merge


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 5, 30])
def test_a_state_goes_on_exactly(batch_norm: bool, batches: int, evenly: np.ndarray) -> None:
    adapter, again = (
        race_merge(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm), expert(1.5, batch_norm=batch_norm)])
        for _ in range(2)
    )
    for _ in range(batches):
        adapter.predict(evenly[:48])
    state = adapter.state_dict()
    again.load_state_dict(state)
    assert_same_state(again.state_dict(), state)
    for images in (evenly[:48], evenly[48:], evenly + 5):
        np.testing.assert_array_equal(adapter.predict(images), again.predict(images))
    assert_same_state(again.state_dict(), adapter.state_dict())


def hostile(name: str, value: Any) -> Any:
    shape = np.shape(value) if not isinstance(value, list) else "ragged"
    return pytest.param({name: value}, id=f"{name}-{shape}")


@pytest.mark.parametrize(
    "wrong",
    [
        hostile("shifts", -1),
        hostile("fallbacks", -1),
        hostile("fallbacks", 0.5),
        hostile("fallbacks", np.zeros(2, int)),
        hostile("trials.owed", 65),
        hostile("trials.count", 0.5),
        hostile("trials.count", 2**70),
        hostile("trials.labels", np.zeros(CLASSES + 1)),
        hostile("trials.labels", -np.ones(CLASSES)),
        hostile("trials.count", 0),
        hostile("trials.count", 2),
        hostile("scores", np.full(1, np.nan)),
        hostile("scores", np.zeros(0)),
        hostile("scores", np.zeros(2)),
        hostile("scores", np.zeros(6)),
        hostile("scores", np.zeros((1, 2))),
        hostile("scores", np.array(["1"])),
        hostile("scores", [[1], [1, 2]]),
        pytest.param({"scores": np.zeros(6), "trials.count": 6}, id="more-scores-than-candidates"),
        hostile("candidates", np.ones((1, 9))),
        hostile("candidates", np.ones((0, 2))),
        hostile("candidates", -np.ones((5, 2))),
        hostile("candidates", np.full((5, 2), "1")),
        pytest.param(
            {"candidates": np.ones((2, 2)), "scores": np.zeros(3), "trials.count": 3}, id="fewer-candidates-than-scores"
        ),
        hostile("trials.held", np.zeros((2, 4, 4))),
        hostile("trials.held", np.zeros((65, 1, 4, 8), np.uint8)),
        hostile("trials.held", np.zeros((64, 1, 4, 0))),
        hostile("trials.held", np.full((2, 1, 4, 4), np.nan)),
        hostile("signature.running", np.zeros((2, 1), complex)),
        hostile("signature.running", np.zeros((3, 1))),
        hostile("signature.classes", np.full(CLASSES, np.inf)),
        hostile("signature.classes", np.zeros(CLASSES + 3)),
        hostile("signature.recent.count", -3.0),
        hostile("signature.recent.sums", np.zeros((2, 9))),
        hostile("signature.recent.sums", [[1], [1, 2]]),
        hostile("domain.sums", np.zeros((2, 9))),
        hostile("domain.count", np.inf),
        hostile("moments.sums", np.zeros((2, CLASSES + 1))),
        hostile("moments.sums", np.full((2, CLASSES), 1e300)),
        hostile("moments.count", np.nan),
        hostile("moments.classes", np.zeros(CLASSES - 1)),
        hostile("moments.classes", -np.ones(CLASSES)),
    ],
)
def test_states_that_are_refused_change_nothing(wrong: dict[str, Any], evenly: np.ndarray) -> None:
    adapter, other = (race_merge(Confidence(True), [expert(2.0, batch_norm=True)]) for _ in range(2))
    adapter.predict(evenly[:40])
    for images in (evenly[:100], evenly[:20]):
        other.predict(images)
    good, before = other.state_dict(), adapter.state_dict()
    assert set(wrong) <= set(good)
    assert (len(good["candidates"]), len(good["scores"])) == (5, 1)
    expected = adapter.look(evenly)
    with pytest.raises(MergettaError, match="does not fit"):
        adapter.load_state_dict({**good, **wrong})
    assert_same_state(adapter.state_dict(), before)
    np.testing.assert_array_equal(adapter.look(evenly), expected)
    adapter.load_state_dict(good)
    assert_same_state(adapter.state_dict(), good)


def test_a_state_that_lacks_anything_is_refused_and_changes_nothing(evenly: np.ndarray) -> None:
    adapter, other = (race_merge(Confidence(True), [expert(2.0, batch_norm=True)]) for _ in range(2))
    adapter.predict(evenly[:40])
    other.predict(evenly[:100])
    good, before = other.state_dict(), adapter.state_dict()
    optional = {"trials.held", "signature.running", "signature.classes", "signature.recent.count"}
    for name in good.keys() - optional:
        with pytest.raises(MergettaError, match=f"it has no '{name}'"):
            adapter.load_state_dict({key: value for key, value in good.items() if key != name})
        assert_same_state(adapter.state_dict(), before)


def test_a_state_whose_point_has_no_moments_is_refused(evenly: np.ndarray) -> None:
    """Who loses a duel gets the moments of the best point back: without them the device would stop there."""
    adapter, other = (race_merge(Confidence(True), [expert(2.0, batch_norm=True)], patience=300) for _ in range(2))
    while not other.refinement.steps:
        other.predict(evenly)
    good, before = other.state_dict(), adapter.state_dict()
    kept = {name for name in good if name.startswith("refinement.kept.")}
    assert kept
    with pytest.raises(MergettaError, match="does not fit the adapter: it has no"):
        adapter.load_state_dict({name: value for name, value in good.items() if name not in kept})
    assert_same_state(adapter.state_dict(), before)
    adapter.load_state_dict(good)


def test_a_state_of_other_experts_is_refused(evenly: np.ndarray) -> None:
    one = race_merge(Confidence(), [expert(2.0)])
    one.predict(evenly)
    with pytest.raises(MergettaError, match="does not fit"):
        race_merge(Confidence(), [expert(2.0), expert(3.0)]).load_state_dict(one.state_dict())
    with pytest.raises(MergettaError, match="it has no 'fallbacks'"):
        one.load_state_dict({"trials.count": 0, "trials.owed": 0})


def test_a_state_after_a_candidate_without_numbers_is_read_again(evenly: np.ndarray) -> None:
    """Also where single frames showed it eight images at a time, each time without numbers."""
    adapter, again = (race_merge(Confidence(), [expert(value) for value in (2.0, 3e38)]) for _ in range(2))
    with np.errstate(all="ignore"):
        while not adapter.settled:
            for start in range(len(evenly)):
                adapter.predict(evenly[start : start + 1] * 10)
    assert adapter.race.scores.min() < -1e5
    again.load_state_dict(adapter.state_dict())
    assert_same_state(again.state_dict(), adapter.state_dict())
