"""Steps after the race: the gradient that passes have learnt, what a duel decides, what a state keeps."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mergetta import Bundle, MergettaError, build_bundle
from mergetta.adapters.forward_only.refinement import Refinement, RefineSettings, directions, second_views
from mergetta.groups import Vector
from mergetta.losses.roid import likelihood_ratio_slope, soft_likelihood_ratio
from mergetta.losses.views import colour_and_geometry
from mergetta.zeroth_order.broyden import Jacobian

from .confidence import assert_same_state

CLASSES, SIZE = 4, 16
QUICK = RefineSettings(size=SIZE, warm=2, block=6, duel=2, blocks=3, together=4)


@pytest.fixture
def bundle() -> Bundle:
    rng = np.random.default_rng(0)
    base = {"norm.weight": np.ones(CLASSES), "norm.bias": np.zeros(CLASSES)}
    experts = [{name: value + rng.normal(size=CLASSES) for name, value in base.items()} for _ in range(5)]
    return build_bundle(base, experts)


class Model:
    """Logits are scale · pixels + shift, so that what a step does can be worked out."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.passes = bundle, 0

    def __call__(self, images: np.ndarray, moved: dict[str, Vector]) -> np.ndarray:
        self.passes += len(images)
        scale, shift = (self.bundle.base[name] + moved.get(name, 0) for name in ("norm.weight", "norm.bias"))
        return np.asarray(images[:, 0, 0, :CLASSES] * scale * 4 + shift)


def images(count: int = SIZE, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).random((count, 1, 4, 4)).astype(np.float32) / 2
    found[np.arange(count), 0, 0, np.arange(count) % CLASSES] += 0.5
    return found


def refinement(bundle: Bundle, **changes: Any) -> Refinement:
    return Refinement(bundle, CLASSES, 0.5, replace(QUICK, **changes))


def run(subject: Refinement, model: Model, sets: int, start: int = 0) -> None:
    for seed in range(start, start + sets):
        x = images(seed=seed)
        subject.run(x, model(x, subject.moved()), model, model)


class TestJacobian:
    def test_finds_a_linear_map_by_class(self) -> None:
        rng = np.random.default_rng(0)
        true, known = rng.normal(size=(3, 3, 5)), Jacobian(3, 3, 5)
        for _ in range(400):
            labels, z = rng.integers(0, 3, 6), rng.normal(size=5)
            known.learn(labels, true[labels] @ z, z)
        np.testing.assert_allclose(known.values, true, atol=0.1)
        labels, slopes = rng.integers(0, 3, 8), rng.normal(size=(8, 3))
        expected = sum(true[label].T @ slope for label, slope in zip(labels, slopes, strict=True))
        np.testing.assert_allclose(known.gradient(labels, slopes), expected, atol=0.5)

    def test_one_update_by_hand(self) -> None:
        """Two images of class 1: (Δ₁ + Δ₂) zᵀ / (d + n) = (3, 3) · (1, 2) / (2 + 2)."""
        known = Jacobian(2, 2, 2)
        known.learn(np.array([1, 1]), np.array([[1.0, 2.0], [2.0, 1.0]]), np.array([1.0, 2.0]))
        np.testing.assert_allclose(known.values, [[[0, 0], [0, 0]], [[0.75, 1.5], [0.75, 1.5]]])
        assert known.counts.tolist() == [0, 2]

    def test_memory_has_an_end(self) -> None:
        known = Jacobian(1, 1, 1, memory=3)
        for _ in range(5):
            known.learn(np.array([0]), np.ones((1, 1)), np.ones(1))
        assert known.counts.tolist() == [3]


def test_the_slope_of_the_likelihood_ratio_is_that_of_autograd() -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(size=(20, 5)) * 3, requires_grad=True)
    soft_likelihood_ratio(logits).sum().backward()
    assert logits.grad is not None
    np.testing.assert_allclose(likelihood_ratio_slope(logits.detach().numpy()), logits.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_views_of_a_few_at_a_time_are_those_of_all(channels: int) -> None:
    rng = np.random.default_rng(0)
    x, keep = rng.random((20, channels, 9, 7)).astype(np.float32), rng.random(20) < 0.6
    expected = colour_and_geometry(x, np.random.default_rng(1), keep)
    for together in (1, 8, 64):
        np.testing.assert_array_equal(second_views(x, np.random.default_rng(1), keep, together), expected)


def test_second_views_of_large_images_are_not_made_at_once() -> None:
    x = np.zeros((64, 3, 64, 64), np.float32)
    tracemalloc.start()
    second_views(x, np.random.default_rng(1), np.ones(64, bool), 8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * x.nbytes


def test_directions_are_those_of_the_members(bundle: Bundle) -> None:
    """In the longest directions of each group, as long as members go along them: uᵀu = the eigenvalues of τᵀτ / M."""
    names, found = directions(bundle, 2)
    assert names == ["norm.weight", "norm.bias"]
    for name, rows in zip(names, found, strict=True):
        tasks = bundle.member_tasks[name]
        expected = np.sort(np.linalg.eigvalsh(tasks.T @ tasks / len(tasks)))[::-1][:2]
        np.testing.assert_allclose((rows**2).sum(axis=1), expected, rtol=1e-4)


def test_members_without_a_direction_leave_nothing_to_do(bundle: Bundle) -> None:
    base = {name: value.copy() for name, value in bundle.base.items()}
    subject = refinement(build_bundle(base, [base, base]))
    assert subject.over and subject.moved() == {}


class TestSteps:
    def test_nothing_moves_before_the_jacobian_is_known(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        run(subject, model, 2)
        assert not subject.point.any() and subject.steps == 2
        assert subject.jacobian.values.any()
        run(subject, model, 1, start=2)
        assert subject.point.any()

    def test_the_gradient_is_nearly_exact(self, bundle: Bundle) -> None:
        """The model is linear in its coordinates, so a Jacobian that has seen enough is the true one."""
        subject, model = refinement(bundle, warm=60, block=1000), Model(bundle)
        run(subject, model, 60)
        x = images(seed=99)
        logits, z = model(x, {}), np.random.default_rng(1).normal(size=subject.size)
        change = model(x, subject.moved(0.01 * z)) - logits
        found = subject.jacobian.values[logits.argmax(axis=1)] @ (0.01 * z)
        assert np.corrcoef(found.ravel(), change.ravel())[0, 1] > 0.9

    def test_images_wait_until_there_are_enough(self, bundle: Bundle) -> None:
        whole, single, model = refinement(bundle), refinement(bundle), Model(bundle)
        x = images(5 * SIZE)
        for start in range(0, len(x), 5):
            single.run(x[start : start + 5], model(x[start : start + 5], single.moved()), model, model)
        for start in range(0, len(x), SIZE):
            whole.run(x[start : start + SIZE], model(x[start : start + SIZE], whole.moved()), model, model)
        assert (single.steps, whole.steps) == (4, 5)  # of a batch, what is more than enough is not taken
        assert single.point.any() and whole.point.any()

    def test_images_of_few_classes_are_let_go(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        x = images(4 * SIZE)[::4]  # all of class 0
        subject.run(x, model(x, {}), model, model)
        assert subject.steps == 0 and not subject.held

    def test_what_it_costs(self, bundle: Bundle) -> None:
        """A perturbed pass of each image while warm, then of every so many sets; a second view of what ROID keeps."""
        subject, model = refinement(bundle, again=2), Model(bundle)
        run(subject, model, 2)
        assert model.passes == 2 * (SIZE + SIZE)
        for start, perturbed in ((2, 0), (3, SIZE)):
            before = model.passes
            run(subject, model, 1, start=start)
            assert 0 < model.passes - before - SIZE - perturbed < SIZE

    def test_images_of_another_size_start_anew(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        subject.run(images(3), model(images(3), {}), model, model)
        larger = np.zeros((2, 1, 9, 9), np.float32)
        subject.run(larger, model(larger, {}), model, model)
        assert [each.shape for each in subject.held] == [(2, 1, 9, 9)]

    def test_a_class_that_is_ruled_out_can_be_saved(self, bundle: Bundle) -> None:
        subject = refinement(bundle)
        logits = np.tile(np.array([-np.inf, 0, 1, 2], np.float32), (3, 1))
        subject.run(images(3), logits, Model(bundle), Model(bundle))
        again = refinement(bundle).restored(subject.state("r."), "r.")
        assert_same_state(again.state(""), subject.state(""))

    def test_images_of_a_large_batch_are_not_copied(self, bundle: Bundle) -> None:
        subject, model, x = refinement(bundle), Model(bundle), images(100 * SIZE)
        x = np.repeat(np.repeat(x, 8, axis=2), 8, axis=3)
        logits = model(x, {})
        tracemalloc.start()
        subject.run(x, logits, lambda part, moved: np.zeros((len(part), CLASSES)), model)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < x.nbytes / 2

    def test_a_pass_without_numbers_moves_nothing(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        broken = np.full((SIZE, CLASSES), np.nan)
        for seed in range(4):
            x = images(seed=seed)
            subject.run(x, model(x, {}), lambda part, moved: broken[: len(part)], model)
        assert not subject.point.any() and not subject.jacobian.values.any()

    def test_where_classes_are_no_longer_mixed_it_ends(self, bundle: Bundle) -> None:
        """At the best point so far, so that a device can rest."""
        subject, model = refinement(bundle), Model(bundle)
        run(subject, model, 4)
        assert subject.point.any()
        x = images(4 * SIZE)[::4]  # all of class 0
        for count in range(QUICK.block):
            assert not subject.over
            assert subject.idle == count
            subject.run(x, model(x, subject.moved()), model, model)
        assert subject.over and not subject.point.any()


class TestDuels:
    def alone(self, better: bool) -> Any:
        """The point is surer than the start, or less sure."""

        def predict(x: np.ndarray, moved: dict[str, Vector]) -> np.ndarray:
            sure = 4.0 if bool(moved) == better else 1.0
            return np.asarray(sure * np.eye(CLASSES)[np.arange(len(x)) % CLASSES])

        return predict

    def play(self, subject: Refinement, model: Model, better: bool, sets: int) -> None:
        for seed in range(sets):
            x = images(seed=seed)
            subject.run(x, model(x, subject.moved()), model, self.alone(better))

    def test_who_wins_stays(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        self.play(subject, model, True, QUICK.warm + QUICK.block)
        assert subject.duel.lost == 0 and not subject.duel.tally.any()
        assert subject.point.any()
        np.testing.assert_array_equal(subject.duel.best, subject.point)

    def test_who_loses_goes_back_and_gives_up_in_the_end(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        self.play(subject, model, False, QUICK.warm + QUICK.block)
        assert (subject.duel.lost, subject.over) == (1, False)
        assert not subject.point.any()
        self.play(subject, model, False, QUICK.block)
        assert (subject.duel.lost, subject.over) == (2, True)
        assert not subject.point.any() and not subject.held

    def test_it_is_over_after_the_last_block(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        self.play(subject, model, True, QUICK.warm + QUICK.blocks * QUICK.block)
        assert subject.over
        point = subject.point
        self.play(subject, model, True, 3)
        assert subject.point is point and not subject.held

    def test_the_point_rests_during_a_duel(self, bundle: Bundle) -> None:
        subject, model = refinement(bundle), Model(bundle)
        self.play(subject, model, True, QUICK.warm + QUICK.block - QUICK.duel)
        point = subject.point
        self.play(subject, model, True, 1)
        assert subject.point is point and subject.duel.tally.all(axis=1).any()


class TestState:
    @pytest.mark.parametrize("sets", [0, 1, 4, 7, 20])
    def test_goes_on_exactly(self, bundle: Bundle, sets: int) -> None:
        subject, model = refinement(bundle), Model(bundle)
        run(subject, model, sets)
        subject.run(images(3), model(images(3), {}), model, model)
        again = refinement(bundle).restored(subject.state("r."), "r.")
        assert_same_state(again.state(""), subject.state(""))
        for each in (subject, again):
            run(each, model, 5, start=50)
        assert_same_state(again.state(""), subject.state(""))

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("steps", -1),
            ("lost", 0.5),
            ("point", np.zeros(1)),
            ("best", np.full(6, np.nan)),
            ("point", np.full(6, 1e300)),
            ("mean", np.full(6, 1e300)),
            ("held", np.full((3, 1, 4, 4), 1e38)),
            ("jacobian.values", np.full((CLASSES, CLASSES, 6), 1e300)),
            ("square", -np.ones(6)),
            ("average", -np.ones(CLASSES)),
            ("tally", np.zeros(3)),
            ("held", np.zeros((SIZE, 1, 4, 4))),
            ("held", np.zeros((2, 1, 4, 4))),
            ("logits", np.zeros((3, CLASSES + 1))),
            ("jacobian.values", np.zeros((CLASSES, CLASSES, 5))),
            ("jacobian.counts", -np.ones(CLASSES)),
        ],
    )
    def test_hostile_states_are_refused(self, bundle: Bundle, name: str, value: Any) -> None:
        subject, model = refinement(bundle), Model(bundle)
        run(subject, model, 3)
        subject.run(images(3), model(images(3), {}), model, model)
        state = subject.state("r.")
        with pytest.raises(MergettaError, match="does not fit the adapter"):
            subject.restored({**state, f"r.{name}": value}, "r.")
