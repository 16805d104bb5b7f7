"""The mirrored view: around any adapter, what it changes, when it is dropped, and what it costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError, build_bundle, create_adapter
from mergetta.adapters.base import ADAPTING, SETTLED, Adapter
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.adapters.wrappers.mirrored import Mirrored
from mergetta.losses.probabilities import softmax

from .confidence import CLASSES, HELD, Confidence, assert_same_state, expert, passes_of, race_merge
from .contracts import SmallImagesContract
from .numpy_runtime import NumpyRuntime
from .test_adapters import needed


class Symmetric(Confidence):
    """To this model, a mirrored image is the same: it looks at rows."""

    def look(self, images: np.ndarray) -> np.ndarray:
        return np.asarray(images.sum(axis=(1, 3))[:, :CLASSES])


def in_both_views(value: float = 2.0, **options: Any) -> Mirrored:
    return Mirrored(race_merge(Confidence(), [expert(value)], **options))


@pytest.mark.parametrize("name", ["cola", "zo-merge", "race-merge"])
class TestAroundAnyAdapter(SmallImagesContract):
    @pytest.fixture
    def inner(self, name: str, images: np.ndarray) -> Adapter:
        runtime = NumpyRuntime()
        return create_adapter(name, runtime, **needed(name, runtime, images))

    @pytest.fixture
    def subject(self, inner: Adapter) -> Mirrored:
        return Mirrored(inner)

    def test_the_adapter_does_not_notice(self, name: str, subject: Mirrored, images: np.ndarray) -> None:
        """It learns from the images as they come, as it would without the wrapper."""
        runtime = NumpyRuntime()
        alone = create_adapter(name, runtime, **needed(name, runtime, images))
        for batch in (images, images[::-1], images[:5], 1 - images, images):
            logits, both = alone.predict(batch), subject.predict(batch)
            assert_same_state(subject.adapter.state_dict(), alone.state_dict())
            flipped = alone.look(np.flip(batch, axis=3))
            if name != "zo-merge":  # whose step comes after the prediction
                np.testing.assert_allclose(softmax(both), (softmax(logits) + softmax(flipped)) / 2, rtol=1e-5)

    def test_to_look_is_the_adapters(self, subject: Mirrored, images: np.ndarray) -> None:
        subject.predict(images)
        before = subject.state_dict()
        np.testing.assert_array_equal(subject.look(images), subject.adapter.look(images))
        assert_same_state(subject.state_dict(), before)


def test_mirrored_images_are_predicted_alike(evenly: np.ndarray) -> None:
    adapter = in_both_views(probe=False)
    adapter.predict(evenly)
    one, other = (adapter.predict(images) for images in (evenly, evenly[:, :, :, ::-1].copy()))
    np.testing.assert_array_equal(one, other)


def test_the_mean_of_both_views_by_hand(evenly: np.ndarray) -> None:
    adapter = in_both_views(probe=False)
    found = adapter.predict(evenly)
    views = (softmax(2 * images[:, 0, 0, :CLASSES]) for images in (evenly, evenly[:, :, :, ::-1]))
    np.testing.assert_allclose(found, np.log(sum(views) / 2), rtol=1e-5)


def test_a_view_that_changes_nothing_is_dropped_until_the_domain_changes(evenly: np.ndarray) -> None:
    images, runtime = evenly.transpose(0, 1, 3, 2), Symmetric()
    adapter, again = (Mirrored(race_merge(runtime, [expert(2.0)])) for _ in range(2))
    while adapter.adapter.status().phase != SETTLED:
        adapter.predict(images)
        assert adapter.status().phase == ADAPTING
    assert adapter.compared <= len(images)  # nothing counts before
    adapter.predict(images)
    again.load_state_dict(adapter.state_dict())
    for each in (adapter, again):
        each.predict(images)
        assert each.compared >= 2 * len(images)
        assert (each.changed, each.agreed, each.status().phase) == (0, True, SETTLED)
    np.testing.assert_array_equal(adapter.predict(images), adapter.look(images))
    adapter.predict(images + 5)
    assert (adapter.compared, adapter.agreed, adapter.status().phase) == (0, False, ADAPTING)


@pytest.mark.parametrize(
    ("changed", "compared", "enough"),
    [(0, 255, False), (0, 256, True), (5, 256, True), (6, 256, False), (25, 1000, True), (30, 1000, False)],
)
def test_how_much_it_must_change(changed: int, compared: int, enough: bool) -> None:
    """5 + 2√5 = 9.5 < 10.24 = 4 % of 256; 6 + 2√6 = 10.9; 25 + 10 < 40; 30 + 11 > 40."""
    adapter = in_both_views()
    adapter.changed, adapter.compared = changed, compared
    assert adapter.agreed == enough


def test_what_it_changes_is_counted(evenly: np.ndarray) -> None:
    """Of every fifth image the mirrored view is sure of another class."""
    adapter = in_both_views(probe=False)
    for count in (1, 2):
        adapter.predict(evenly)
        assert adapter.compared == count * len(evenly)
        assert adapter.changed == count * len(evenly[::5])
    adapter.reset()
    assert (adapter.compared, adapter.changed) == (0, 0)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(("model", "last"), [(Confidence, 2), (Symmetric, 1)])
@pytest.mark.parametrize("size", [48, 16])
def test_passes(batch_norm: bool, model: type[Confidence], last: int, size: int, evenly: np.ndarray) -> None:
    runtime, evenly = model(batch_norm), evenly[:size]
    if model is Symmetric:
        evenly = evenly.transpose(0, 1, 3, 2)
    adapter = Mirrored(race_merge(runtime, [expert(1 + i / 10, batch_norm=batch_norm) for i in range(4)]))
    counts = passes_of(adapter, runtime, evenly, 25 * HELD // size)
    assert sum(counts[:4]) <= 4 * 4  # a large batch beside what is known is seen twice
    changes = 8 if batch_norm else 0  # of who wins: moments begin anew, and a large batch is seen twice
    assert (np.cumsum(counts[4:]) <= 3 * np.arange(1, len(counts) - 3) + (1 + changes) * HELD / size).all()
    assert adapter.adapter.status().phase == SETTLED
    assert (adapter.status().phase == SETTLED) == adapter.agreed == (last == 1)
    assert counts[-1] == last
    runtime.forwarded = 0
    adapter.look(evenly)
    assert runtime.forwarded == len(evenly)


def test_status_is_the_adapters_but_for_the_phase(evenly: np.ndarray) -> None:
    adapter = in_both_views(refine=False)  # else it would take steps by then, and go on
    for _ in range(20):
        adapter.predict(evenly)
    inner, outer = adapter.adapter.status(), adapter.status()
    assert (inner.phase, outer.phase) == (SETTLED, ADAPTING)  # both views go on to differ
    assert (inner.steps, inner.shifts, inner.fallbacks) == (outer.steps, outer.shifts, outer.fallbacks)
    assert inner.weights == outer.weights


def test_another_bundle_is_for_the_adapter(evenly: np.ndarray) -> None:
    adapter, runtime = in_both_views(), Confidence()
    adapter.predict(evenly)
    same, other = (build_bundle(runtime.groups, [expert(value)]) for value in (2.0, 3.0))
    assert not adapter.swap(same)
    assert adapter.swap(other)
    assert isinstance(adapter.adapter, RaceMerge) and adapter.adapter.bundle is other
    with pytest.raises(MergettaError, match="works on no bundle"):
        Mirrored(create_adapter("bn-stats", NumpyRuntime())).swap(other)


def test_images_without_numbers_are_not_compared(evenly: np.ndarray) -> None:
    adapter = in_both_views(probe=False)
    adapter.predict(evenly)
    with np.errstate(all="ignore"):
        adapter.predict(np.full_like(evenly, np.nan))
    assert adapter.compared == len(evenly)


@pytest.mark.parametrize(
    "wrong",
    [
        {"changed": 10**6},
        {"changed": -1},
        {"compared": 0.5},
        {"compared": 2**70},
        {"compared": np.zeros(2, int)},
        {"adapter/shifts": -1},
        {"adapter/candidates": np.ones((5, 9))},
        {"adapter/scores": np.ones(4)},
        {"adapter/scores": np.full(5, np.nan)},
    ],
)
def test_states_that_are_refused_change_nothing(wrong: dict[str, Any], evenly: np.ndarray) -> None:
    adapter, other = in_both_views(), in_both_views()
    adapter.predict(evenly[:40])
    for _ in range(20):
        other.predict(evenly)
    good, before = other.state_dict(), adapter.state_dict()
    assert good["compared"] > good["changed"] > 0
    assert set(wrong) <= set(good)
    with pytest.raises(MergettaError, match="does not fit"):
        adapter.load_state_dict({**good, **wrong})
    assert_same_state(adapter.state_dict(), before)
    for name in ("compared", "changed", "adapter/shifts"):
        with pytest.raises(MergettaError, match="it has no"):
            adapter.load_state_dict({key: value for key, value in good.items() if key != name})
        assert_same_state(adapter.state_dict(), before)
    adapter.load_state_dict(good)
    assert_same_state(adapter.state_dict(), good)
