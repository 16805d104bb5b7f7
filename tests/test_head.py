"""The classifier that follows the stream: around any adapter, what it learns, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mergetta import MergettaError, create_adapter
from mergetta.adapters.base import Adapter
from mergetta.adapters.wrappers import wrapped
from mergetta.adapters.wrappers.head import Headed, HeadSettings
from mergetta.losses.probabilities import softmax
from mergetta.losses.roid import likelihood_ratio_slope, sample_weights, soft_likelihood_ratio
from mergetta.runtimes.base import Output

from .confidence import CLASSES, Confidence, assert_same_state
from .contracts import SmallImagesContract
from .numpy_runtime import NumpyRuntime
from .test_adapters import needed
from .test_runs import Shifting

SIZE = HeadSettings().size


class Biased(Confidence):
    """It has learnt the first class to be everywhere a little."""

    bias = np.array([1, 0, 0, 0], np.float32)

    def __call__(self, images: np.ndarray, *further: object, **options: object) -> Output:
        output = super().__call__(images, *further, **options)  # type: ignore[arg-type]
        return output._replace(logits=output.logits + self.bias)


def stream(count: int = 40, noise: float = 0.6) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Sets of images of each class in turn: its pixel is 2, and all have noise."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        labels = rng.permutation(np.arange(SIZE) % CLASSES)
        images = np.zeros((SIZE, 1, 6, 6), np.float32)
        images[:, 0, 0, :CLASSES] = 2 * np.eye(CLASSES)[labels] + noise * rng.standard_normal((SIZE, CLASSES))
        yield images, labels


def wrong(adapter: Adapter, sets: Iterator[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    return np.array([np.mean(adapter.predict(images).argmax(axis=1) != labels) for images, labels in sets])


@pytest.mark.parametrize("name", ["bn-stats", "zo-merge", "race-merge"])
class TestAroundAnyAdapter(SmallImagesContract):
    @pytest.fixture
    def subject(self, name: str, images: np.ndarray) -> Headed:
        runtime = NumpyRuntime()
        settings = HeadSettings(size=10, mixed=0.0)  # it learns from the contract's few images
        return Headed(create_adapter(name, runtime, **needed(name, runtime, images)), settings)

    def test_the_adapter_does_not_notice(self, name: str, subject: Headed, images: np.ndarray) -> None:
        runtime = NumpyRuntime()
        alone = create_adapter(name, runtime, **needed(name, runtime, images))
        for batch in (images, images[::-1], images[:5]):
            alone.predict(batch), subject.predict(batch)
            assert_same_state(subject.adapter.state_dict(), alone.state_dict())
        assert subject.steps == 2

    def test_it_takes_no_pass(self, name: str, subject: Headed, images: np.ndarray) -> None:
        runtime = NumpyRuntime()
        alone = create_adapter(name, runtime, **needed(name, runtime, images))
        counts = []
        for adapter in (alone, subject):
            adapter.runtime.forwarded = 0
            adapter.predict(images)
            counts.append(adapter.runtime.forwarded)
        assert counts[0] == counts[1]


def test_a_biased_classifier_is_put_right() -> None:
    alone, headed = create_adapter("source", Biased()), Headed(create_adapter("source", Biased()))
    errors = [wrong(adapter, stream(150))[-100:].mean() for adapter in (alone, headed)]
    assert errors[1] < 0.8 * errors[0]


def test_images_are_predicted_before_they_are_learnt_from() -> None:
    runtime = Biased()
    alone, headed = create_adapter("source", runtime), Headed(create_adapter("source", runtime))
    images, _ = next(stream())
    np.testing.assert_array_equal(headed.predict(images), alone.predict(images))
    assert headed.steps == 1 and (headed.predict(images) != alone.predict(images)).any()


@pytest.mark.parametrize("size", [1, 7, 64, 200])
def test_batches_do_not_matter(size: int) -> None:
    images = np.concatenate([each for each, _ in stream(8)])
    whole, parts = (Headed(create_adapter("source", Biased())) for _ in range(2))
    expected = whole.predict(images)
    found = [parts.predict(images[start : start + size]) for start in range(0, len(images), size)]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-5)


def test_the_first_step_by_hand() -> None:
    """Down the gradient of ROID's weighted likelihood ratio, at the length that is asked for, and the pull."""
    images, _ = next(stream())
    headed = Headed(create_adapter("source", Biased()))
    logits = headed.predict(images).astype(np.float64)
    features = images[:, 0, 0, :CLASSES].astype(np.float64)
    x = np.column_stack([(features - features.mean(axis=0)) / features.std(axis=0), np.ones(SIZE)])
    weights, keep = sample_weights(logits, np.full(CLASSES, 1 / CLASSES), 1 / 3)

    def loss(head: np.ndarray) -> float:
        return float((weights * soft_likelihood_ratio(logits + x @ head.T))[keep].sum() / SIZE)

    zero, step = np.zeros((CLASSES, CLASSES + 1)), 1e-5
    gradient = np.zeros_like(zero)
    for place in np.ndindex(zero.shape):
        moved = zero.copy()
        moved[place] = step
        gradient[place] = (loss(moved) - loss(-moved)) / (2 * step)
    length = np.sqrt((gradient**2).mean())
    np.testing.assert_allclose(headed.head, -0.99 * 1e-3 * gradient / length, rtol=1e-3, atol=1e-7)
    assert (likelihood_ratio_slope(logits)[keep] != 0).any()


def test_runs_of_one_class_teach_nothing() -> None:
    headed = Headed(create_adapter("source", Confidence()))
    images = np.zeros((SIZE, 1, 6, 6), np.float32)
    images[:, 0, 0, 1] = 4 + np.random.default_rng(0).standard_normal(SIZE)
    headed.predict(images)
    assert headed.head is None and not headed.steps


def test_images_that_are_no_numbers_are_left_out() -> None:
    sets = [images for images, _ in stream(3)]
    clean, headed = (Headed(create_adapter("source", Biased())) for _ in range(2))
    for images in sets:
        clean.predict(images)
        broken = np.concatenate([images[:3], np.full_like(images[:1], np.nan), images[3:]])
        found = headed.predict(broken)
        assert np.isnan(found[3]).all() and np.isfinite(np.delete(found, 3, axis=0)).all()
    assert_same_state(headed.state_dict(), clean.state_dict())


def test_another_domain_has_another_classifier() -> None:
    class Showing(Shifting):
        def predict(self, images: np.ndarray) -> np.ndarray:
            super().predict(images)
            return self._shown(self.runtime(images))

    headed = Headed(Showing(NumpyRuntime()), HeadSettings(size=10, mixed=0.0))
    rng = np.random.default_rng(0)
    headed.predict(0.1 * rng.random((10, 1, 6, 6)).astype(np.float32))
    assert headed.steps == 1
    headed.predict(0.9 + 0.1 * rng.random((1, 1, 6, 6)).astype(np.float32))
    assert headed.head is None and not headed.steps


def test_a_method_that_shows_no_features_is_refused() -> None:
    class Silent(Adapter):
        def predict(self, images: np.ndarray) -> np.ndarray:
            return self.runtime(images).logits

    with pytest.raises(MergettaError, match="Silent does not show features"):
        Headed(Silent(NumpyRuntime())).predict(np.zeros((2, 1, 6, 6), np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1),
        ("length", np.nan),
        ("average", np.zeros(CLASSES + 1)),
        ("weights", np.full((CLASSES, CLASSES + 1), np.inf)),
        ("scaling", np.zeros((2, CLASSES))),
        ("features", np.zeros((SIZE, CLASSES))),
    ],
)
def test_hostile_states_are_refused(name: str, value: object) -> None:
    headed = Headed(create_adapter("source", Biased()))
    for images, _ in stream(2):
        headed.predict(images)
    headed.predict(images[:5])
    state = headed.state_dict()
    with pytest.raises(MergettaError, match="state"):
        headed.load_state_dict({**state, f"head.{name}": value})
    assert_same_state(headed.state_dict(), state)


def test_it_never_moves_far(count: int = 200) -> None:
    """The pull bounds it: a step of length r and a pull of one in a hundred amount to a hundred steps at most."""
    headed = Headed(create_adapter("source", Biased()))
    for images, _ in stream(count):
        softmax(headed.predict(images))
    chosen = headed.settings
    assert headed.head is not None and np.sqrt((headed.head**2).mean()) <= 1.5 * chosen.rate / chosen.pull


@pytest.mark.parametrize(("classes", "learns"), [(100, True), (101, False)])
def test_there_is_none_for_many_classes(classes: int, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Confidence(batch_norm=True)
    monkeypatch.setattr(type(runtime), "classes", classes)
    assert isinstance(wrapped(create_adapter("source", runtime), head=True), Headed) == learns
