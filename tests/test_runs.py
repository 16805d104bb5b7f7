"""Classes that come in runs: what the filter believes, when it believes it, and around which adapters."""

from __future__ import annotations

import numpy as np
import pytest

from mergetta import MergettaError, create_adapter
from mergetta.adapters.base import Adapter
from mergetta.adapters.wrappers.filtered import Filtered
from mergetta.losses.probabilities import softmax
from mergetta.streams.runs import PRIOR, RunFilter, RunSettings

from .confidence import assert_same_state
from .contracts import SmallImagesContract
from .numpy_runtime import NumpyRuntime
from .test_adapters import needed

CLASSES = 5


def predictions(labels: np.ndarray, accuracy: float, seed: int = 0, favourite: int | None = None) -> np.ndarray:
    """Of a model that is right with this probability, and else predicts its favourite class or any."""
    rng = np.random.default_rng(seed)
    other = rng.integers(0, CLASSES, len(labels)) if favourite is None else np.full(len(labels), favourite)
    taken = np.where(rng.random(len(labels)) < accuracy, labels, other)
    return np.asarray(softmax(4 * np.eye(CLASSES)[taken] + rng.normal(size=(len(labels), CLASSES))))


def errors(p: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(p.argmax(axis=1) != labels))


def in_runs(length: int, count: int = 1000, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CLASSES, -(-count // length)).repeat(length)[:count]


@pytest.mark.parametrize("length", [20, 50, 100])
def test_runs_are_made_use_of(length: int) -> None:
    labels = in_runs(length)
    p, believed = predictions(labels, 0.6), RunFilter(CLASSES)
    assert errors(believed(p), labels) < 0.6 * errors(p, labels)
    assert believed.runs > 0.9


@pytest.mark.parametrize("accuracy", [0.9, 0.6, 0.3])
@pytest.mark.parametrize("favourite", [None, 2])
def test_mixed_classes_stay_what_they_are(accuracy: float, favourite: int | None) -> None:
    """Also where a model has collapsed, and predicts one class for most images."""
    labels = in_runs(1, 2000)
    p, believed = predictions(labels, accuracy, favourite=favourite), RunFilter(CLASSES)
    found = believed(p)
    assert errors(found, labels) < errors(p, labels) + 0.02
    assert believed.runs < 0.1
    assert np.mean(found[-500:] != p[-500:]) < 0.05


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_an_unsure_model_is_left_alone(classes: int) -> None:
    """Of predictions that are nearly even, a small part of a sure belief would decide."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, 1000)
    p = np.asarray(softmax(1.5 * np.eye(classes)[labels] + 0.5 * rng.normal(size=(1000, classes))))
    found = RunFilter(classes)(p)
    assert errors(found, labels) < errors(p, labels) + 0.005


def test_a_stream_may_change_its_ways() -> None:
    labels = np.concatenate([in_runs(50), in_runs(1), in_runs(50)])
    p = predictions(labels, 0.6)
    found = RunFilter(CLASSES)(p)
    for part in (slice(0, 1000), slice(2000, 3000)):
        assert errors(found[part], labels[part]) < 0.6 * errors(p[part], labels[part])
    assert errors(found[1100:2000], labels[1100:2000]) < errors(p[1100:2000], labels[1100:2000]) + 0.02


def test_batches_do_not_matter() -> None:
    p = predictions(in_runs(30), 0.6)
    whole, single = RunFilter(CLASSES), RunFilter(CLASSES)
    np.testing.assert_array_equal(whole(p), np.concatenate([single(p[i : i + 1]) for i in range(len(p))]))


def test_the_first_image_by_hand() -> None:
    """Shares are equal, so it is p softened, √0.64 : √0.36 = 4 : 3. Evidence is one, and runs not likely enough."""
    filtered = RunFilter(2)
    (found,) = filtered(np.array([[0.64, 0.36]]))
    np.testing.assert_allclose(filtered.belief, [4 / 7, 3 / 7])
    np.testing.assert_allclose(filtered.weights, PRIOR)
    np.testing.assert_array_equal(found, [0.64, 0.36])


def test_the_second_image_by_hand() -> None:
    filtered = RunFilter(2, RunSettings(hazard=0.5, temperature=1.0, unknown=1.0, recent=2.0, forget=0.0))
    filtered(np.array([[0.75, 0.25], [0.75, 0.25]]))
    shares = np.array([1.25, 0.75]) / 2
    said = np.array([0.75, 0.25]) / shares
    expected = (np.array([0.75, 0.25]) + shares) / 2
    weights = PRIOR * [said @ expected, 1, said @ [0.625, 0.375]]
    believed = np.array([0.75, 0.25]) * expected  # one class has been named: by equal shares
    np.testing.assert_allclose(filtered.belief, believed / believed.sum())
    np.testing.assert_allclose(filtered.weights, weights / weights.sum())
    np.testing.assert_allclose(filtered.sums, [2.0, 1.0])


def test_predictions_that_are_no_numbers_leave_no_trace() -> None:
    p = predictions(in_runs(30, 100), 0.6)
    clean, broken = RunFilter(CLASSES), RunFilter(CLASSES)
    spoilt = np.insert(p, 50, np.nan, axis=0)
    found = broken(spoilt)
    assert np.isnan(found[50]).all()
    np.testing.assert_array_equal(np.delete(found, 50, axis=0), clean(p))


def test_memory_has_an_end() -> None:
    filtered = RunFilter(CLASSES, RunSettings(memory=100))
    filtered(predictions(in_runs(1), 0.6))
    np.testing.assert_allclose(filtered.sums.sum(), 100)


@pytest.mark.parametrize("name", ["bn-stats", "zo-merge", "race-merge"])
class TestAroundAnyAdapter(SmallImagesContract):
    @pytest.fixture
    def subject(self, name: str, images: np.ndarray) -> Filtered:
        runtime = NumpyRuntime()
        return Filtered(create_adapter(name, runtime, **needed(name, runtime, images)))

    def test_the_adapter_does_not_notice(self, name: str, subject: Filtered, images: np.ndarray) -> None:
        runtime = NumpyRuntime()
        alone = create_adapter(name, runtime, **needed(name, runtime, images))
        beside = RunFilter(len(runtime.classifier.bias))
        for batch in (images, images[::-1], images[:5]):
            expected = beside(softmax(alone.predict(batch)))
            np.testing.assert_allclose(softmax(subject.predict(batch)), expected, rtol=1e-5)
            assert_same_state(subject.adapter.state_dict(), alone.state_dict())
        assert subject.status().runs == beside.runs

    def test_to_look_is_the_adapters(self, subject: Filtered, images: np.ndarray) -> None:
        subject.predict(images)
        before = subject.state_dict()
        np.testing.assert_array_equal(subject.look(images), subject.adapter.look(images))
        assert_same_state(subject.state_dict(), before)


class Shifting(Adapter):
    """Reports a shift with every image that is bright."""

    shifts = 0

    def predict(self, images: np.ndarray) -> np.ndarray:
        self.shifts += int(images.max() > 0.5)
        return self.runtime(images).logits

    def status(self):  # type: ignore[no-untyped-def]
        from mergetta.adapters.base import Status

        return Status(shifts=self.shifts)


def test_another_domain_is_another_stream() -> None:
    """What predictions were on average belongs to a domain."""
    dark, adapter = np.full((30, 1, 6, 6), 0.1, np.float32), Filtered(Shifting(NumpyRuntime()))
    adapter.predict(dark)
    assert adapter.filter.sums.sum() > 40
    adapter.predict(dark[:1] + 0.8)
    np.testing.assert_allclose(adapter.filter.sums.sum(), 17)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", [0.5, 0.5, 0.5]),
        ("belief", [0.5] * 5),
        ("sums", [0.0] * 5),
        ("sums", [1e-320, 1, 1, 1, 1]),
        ("sums", [1e308] * 5),
        ("recent", [np.nan] * 5),
    ],
)
def test_hostile_states_are_refused(name: str, value: list[float]) -> None:
    filtered = RunFilter(CLASSES)
    with pytest.raises(MergettaError, match="state"):
        filtered.restored({**filtered.state("runs."), f"runs.{name}": np.array(value)}, "runs.")


def test_one_class_for_ever_stays_that_class() -> None:
    """Less sure of it is not another one, however much surer than before of others: there is no run yet to tell by."""
    sure, less = np.full(CLASSES, 0.05 / (CLASSES - 1)), np.full(CLASSES, 0.15 / (CLASSES - 2))
    sure[0], less[0], less[1] = 0.95, 0.80, 0.05
    found = RunFilter(CLASSES)(np.array(400 * [sure] + 300 * [less] + 100 * [sure]))
    assert (found.argmax(axis=1) == 0).all()


def test_classes_that_were_named_are_what_a_biased_model_is_measured_by() -> None:
    """Of two named equally often, half of the way from equal shares to the mean prediction."""
    runs = RunFilter(2, RunSettings(temperature=1.0, unknown=1e-9))
    runs(np.array([[0.9, 0.1], [0.4, 0.6]]))
    np.testing.assert_allclose(runs._base(runs.sums / runs.sums.sum()), (np.array([0.65, 0.35]) + 0.5) / 2)
