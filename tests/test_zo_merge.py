"""Algorithm 2: one step by hand, exact replay, convergence, guards."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mergetta import Bundle, MergettaError, ZOMerge, build_bundle
from mergetta.losses import Evaluation, Loss
from mergetta.seeds import generator
from mergetta.zeroth_order.perturbation import draw
from mergetta.zeroth_order.spsa import Step, apply, probe, replay

from .numpy_runtime import NumpyRuntime


def make_bundle(runtime: NumpyRuntime, seed: int = 0, **options: object) -> Bundle:
    rng = np.random.default_rng(seed)
    experts = [
        {name: value + 0.3 * rng.normal(size=value.shape) for name, value in runtime.groups.items()} for _ in range(4)
    ]
    return build_bundle(runtime.groups, experts, family=runtime.family, **options)


def batches(count: int = 5, size: int = 16) -> list[np.ndarray]:
    return list(np.random.default_rng(3).random((count, size, 1, 6, 6)).astype(np.float32))


def test_one_step_equals_the_formula(numpy_runtime: NumpyRuntime) -> None:
    bundle = make_bundle(numpy_runtime)
    images = batches(1)[0]
    adapter = ZOMerge(numpy_runtime, bundle, loss="entropy", lr=0.1, delta=0.5, clamp=5.0, seed=11)
    adapter.predict(images)

    z = {name: generator(11, 0, f"z/{name}").standard_normal(bundle.coefficients[name].size) for name in bundle.moving}

    def mean_entropy(sign: float) -> float:
        moved_w = {name: bundle.coefficients[name] + sign * 0.5 * z[name] for name in z}
        groups = {
            name: base + (moved_w[name].astype(np.float32) @ bundle.basis[name]) for name, base in bundle.base.items()
        }
        hidden = images.reshape(16, -1) @ numpy_runtime.first.T * groups["a.weight"] + groups["a.bias"]
        logits = np.maximum(hidden, 0) @ numpy_runtime.classifier.weight.T + numpy_runtime.classifier.bias
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        return float(-(p * np.log(p)).sum(axis=1).mean())

    slope = (mean_entropy(1) - mean_entropy(-1)) / (2 * 0.5)
    for name, w in adapter.coefficients.items():
        np.testing.assert_allclose(w, bundle.coefficients[name] - 0.1 * slope * z[name], rtol=1e-5, atol=1e-7)
    assert adapter.history[0].slope == pytest.approx(slope, rel=1e-4)
    assert adapter.steps == 1


def test_the_batch_is_predicted_before_the_step(numpy_runtime: NumpyRuntime) -> None:
    bundle = make_bundle(numpy_runtime)
    images = batches(1)[0]
    logits = ZOMerge(numpy_runtime, bundle, lr=1.0).predict(images)
    np.testing.assert_array_equal(logits, numpy_runtime(images, bundle.merge()).logits)


W = (("w", 2),)


def test_the_slope_is_clamped() -> None:
    steep = probe(lambda w: 1000 * float(w.sum()), np.zeros(2), W, 0, 0, delta=1.0, clamp=5.0)
    assert abs(steep.slope) == 5.0


@pytest.mark.parametrize("loss", ["entropy", "roid", "deyo"])
def test_history_replays_bit_for_bit(numpy_runtime: NumpyRuntime, loss: str) -> None:
    bundle = make_bundle(numpy_runtime)
    adapter = ZOMerge(numpy_runtime, bundle, loss=loss, lr=0.05, delta=0.3, seed=5)
    for images in batches(8):
        adapter.predict(images)
    again = replay(bundle.flatten(), bundle.sizes, [Step(*step) for step in adapter.history], lr=0.05)
    np.testing.assert_array_equal(again, adapter.point)
    named = bundle.unflatten(again)
    assert all(np.array_equal(named[name], w) for name, w in adapter.coefficients.items())
    assert adapter.steps == 8


def test_perturbation_does_not_drift() -> None:
    """δ up and down again, out of place, leaves the stored point untouched."""
    point = np.random.default_rng(0).normal(size=100)
    before = point.copy()
    for step in range(50):
        probe(lambda w: 1.0, point, (("w", 100),), 0, step, delta=0.1, clamp=5)
    np.testing.assert_array_equal(point, before)


def test_directions_depend_on_seed_step_and_group_only() -> None:
    one = draw(1, 2, (("a", 4), ("b", 4)))
    assert np.array_equal(one[:4], draw(1, 2, (("a", 4),)))
    assert not np.array_equal(one[:4], one[4:])
    assert not np.array_equal(one[:4], draw(1, 3, (("a", 4),)))
    assert not np.array_equal(one[:4], draw(2, 2, (("a", 4),)))
    many = np.concatenate([draw(0, step, (("a", 5),)) for step in range(4000)])
    assert abs(many.mean()) < 0.03
    assert abs(many.std() - 1) < 0.03


def test_converges_on_a_quadratic() -> None:
    target, sizes = np.array([1.0, -2.0, 0.5, 3.0]), (("a", 3), ("b", 1))
    point = np.zeros(4)
    for step in range(1500):
        measured = probe(lambda w: float(((w - target) ** 2).sum()), point, sizes, 0, step, delta=1e-3, clamp=5.0)
        point = apply(point, sizes, measured, lr=0.02)
    np.testing.assert_allclose(point, target, atol=1e-3)


def test_a_quadratic_falls_along_every_accepted_direction() -> None:
    """With a tiny step, −S z never goes uphill: S is the true slope along z."""
    target = np.array([1.0, 2.0])
    for step in range(20):
        measured = probe(lambda w: float(((w - target) ** 2).sum()), np.zeros(2), W, 0, step, delta=0.5, clamp=100.0)
        z = draw(0, step, W)
        assert measured.slope == pytest.approx(-2 * float(z @ target))
        assert ((apply(np.zeros(2), W, measured, 1e-4) - target) ** 2).sum() < (target**2).sum()


def test_one_sided_by_hand(numpy_runtime: NumpyRuntime) -> None:
    target = np.array([1.0, 2.0])

    def quadratic(w: np.ndarray) -> float:
        return float(((w - target) ** 2).sum())

    step = probe(quadratic, np.zeros(2), W, 0, 0, delta=0.1, clamp=100.0, here=quadratic(np.zeros(2)))
    assert step.slope == pytest.approx((quadratic(0.1 * draw(0, 0, W)) - 5.0) / 0.1)
    bundle, images = make_bundle(numpy_runtime), batches(1)[0]
    passes = {}
    for sides in (1, 2):
        before = numpy_runtime.forwarded
        adapter = ZOMerge(numpy_runtime, bundle, loss="entropy", sides=sides)
        adapter.predict(images)
        passes[sides] = (numpy_runtime.forwarded - before) / len(images)
    assert passes == {1: 2, 2: 3}
    with pytest.raises(MergettaError, match="sides must be 1 or 2"):
        ZOMerge(numpy_runtime, bundle, sides=3)


def test_predict_only(numpy_runtime: NumpyRuntime) -> None:
    adapter = ZOMerge(numpy_runtime, make_bundle(numpy_runtime))
    images = batches(1)[0]
    logits = adapter.predict(images, adapt=False)
    assert adapter.steps == 0
    assert numpy_runtime.forwarded == len(images)
    assert adapter.output is not None
    np.testing.assert_array_equal(adapter.output.logits, logits)


class Broken(Loss):
    """Not finite on every second evaluation."""

    calls = 0

    def evaluate(self, forward, images, rng):  # type: ignore[no-untyped-def]
        self.calls += 1
        return Evaluation(math.nan if self.calls % 4 == 0 else 1.0 * self.calls, forward(images), len(images))


def test_a_loss_that_is_not_finite_moves_nothing_and_is_counted(numpy_runtime: NumpyRuntime) -> None:
    adapter = ZOMerge(numpy_runtime, make_bundle(numpy_runtime), loss=Broken())
    first, second, *_ = batches()
    adapter.predict(first)
    assert adapter.skipped == 0
    before = {name: w.copy() for name, w in adapter.coefficients.items()}
    logits = adapter.predict(second)
    assert adapter.skipped == 1
    assert adapter.history[-1].skipped
    assert np.isfinite(logits).all()
    assert all(np.array_equal(before[name], adapter.coefficients[name]) for name in before)
    assert adapter.steps == 2


@pytest.mark.parametrize("loss", ["entropy", "roid", "deyo"])
def test_a_batch_of_one(numpy_runtime: NumpyRuntime, loss: str) -> None:
    adapter = ZOMerge(numpy_runtime, make_bundle(numpy_runtime), loss=loss)
    for images in batches(4, size=1):
        assert np.isfinite(adapter.predict(images)).all()
    assert all(np.isfinite(w).all() for w in adapter.coefficients.values())


def test_a_bundle_that_does_not_move(numpy_runtime: NumpyRuntime) -> None:
    bundle = make_bundle(numpy_runtime, frozen=list(numpy_runtime.groups))
    adapter = ZOMerge(numpy_runtime, bundle)
    adapter.predict(batches(1)[0])
    assert adapter.steps == 0
    assert numpy_runtime.forwarded == 16


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"delta": 0}, "delta"), ({"clamp": -1}, "clamp"), ({"lr": -1}, "lr"), ({"loss": "mse"}, "no loss 'mse'")],
)
def test_bad_options(numpy_runtime: NumpyRuntime, options: dict, sentence: str) -> None:
    with pytest.raises(MergettaError, match=sentence):
        ZOMerge(numpy_runtime, make_bundle(numpy_runtime), **options)


def test_a_bundle_of_another_family(numpy_runtime: NumpyRuntime) -> None:
    bundle = make_bundle(numpy_runtime)
    other = Bundle(bundle.base, bundle.basis, bundle.coefficients, family="other")
    with pytest.raises(MergettaError, match="belongs to the family 'other'"):
        ZOMerge(numpy_runtime, other)
