"""EATA, SAR, CoTTA, RMT and AdaMerging against values worked out from their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mergetta import Expert, MergettaError, TorchRuntime, create_adapter
from mergetta.adapters.backprop.eata import CertainAndUncommon, estimate_fisher
from mergetta.adapters.backprop.rmt import Robust, contrastive, source_prototypes
from mergetta.groups import has_batch_norm, learnable
from mergetta.losses.probabilities import entropy
from mergetta.losses.views import colour_and_geometry
from mergetta.models.family import load_family
from mergetta.seeds import generator

from .moving import moved
from .numpy_runtime import NumpyRuntime

PEERS = ("eata", "sar", "cotta", "rmt", "adamerging")
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "nesterov": False}


def experts_of(runtime: Any, count: int = 3) -> list[Expert]:
    rng = np.random.default_rng(5)
    return [Expert(moved(runtime.groups, rng, 0.1), runtime.family, f"{i}") for i in range(count)]


def needed(name: str, runtime: Any) -> dict[str, Any]:
    """Experts; for SAR no recovery, which on clean images would come after every batch."""
    return {"adamerging": {"experts": experts_of(runtime)}, "sar": {"recover_below": 0.0}}.get(name, {})


Weights = dict[str, torch.Tensor]


def weights_of(runtime: TorchRuntime, groups: dict[str, np.ndarray] | None = None) -> Weights:
    """The groups that can be learnt, the source's unless given, as tensors."""
    tensors = runtime.tensors(runtime.groups if groups is None else groups)
    return {name: tensors[name].clone() for name in learnable(runtime.groups)}


def gradients_of(value: Callable[[Weights], torch.Tensor], weights: Weights) -> dict[str, np.ndarray]:
    """Of a loss (a function of the weights) with respect to them."""
    parameters = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    gradients = torch.autograd.grad(value(parameters), list(parameters.values()))
    return {name: g.numpy().copy() for name, g in zip(parameters, gradients, strict=True)}


def logits_of(*probabilities: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor(probabilities))


@pytest.mark.parametrize("name", PEERS)
class TestEveryPeer:
    def test_bad_images_leave_the_adapter_as_it_was(
        self, name: str, bn_runtime: TorchRuntime, images: np.ndarray
    ) -> None:
        adapter = create_adapter(name, bn_runtime, **needed(name, bn_runtime))
        expected = [adapter.predict(images) for _ in range(2)]
        adapter.reset()
        adapter.predict(images)
        for bad in (np.full_like(images, np.nan), images[:0], images[0], np.zeros((2, 3, 28, 28), np.float32)):
            with pytest.raises(MergettaError):
                adapter.predict(bad)
        assert not any(parameter.requires_grad for parameter in adapter.learnt.values())
        np.testing.assert_array_equal(adapter.predict(images), expected[1])

    def test_learns_and_repeats(self, name: str, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        runs = []
        for seed in (1, 1, 2):
            adapter = create_adapter(name, bn_runtime, seed=seed, lr=0.01, **needed(name, bn_runtime))
            start = adapter.groups
            for _ in range(3):
                logits = adapter.predict(torch.from_numpy(images))
                assert isinstance(logits, torch.Tensor)
                assert not logits.requires_grad
            runs.append(adapter.groups)
            changed = {group for group, value in runs[-1].items() if not np.array_equal(value, start[group])}
            assert changed
            assert changed <= set(learnable(start))
        assert all(np.array_equal(value, runs[1][group]) for group, value in runs[0].items())
        seeded = name in ("cotta", "rmt")
        assert seeded == any(not np.array_equal(value, runs[2][group]) for group, value in runs[0].items())

    def test_needs_a_torch_runtime(self, name: str, numpy_runtime: NumpyRuntime) -> None:
        with pytest.raises(MergettaError, match="needs a TorchRuntime"):
            create_adapter(name, numpy_runtime, **needed(name, numpy_runtime))


class TestEATA:
    def test_loss_by_hand(self) -> None:
        rng, images = np.random.default_rng(0), np.zeros(3)
        loss = CertainAndUncommon(redundancy=0.4, entropy_margin=0.4)
        sure = [0.97, 0.01, 0.01, 0.01]
        h = -(0.97 * math.log(0.97) + 0.03 * math.log(0.01))
        certain = math.exp(0.4 * math.log(4) - h) * h
        first = logits_of(sure, [0.25, 0.25, 0.25, 0.25], sure)
        evaluation = loss.evaluate(lambda x, gradient=True: first, images, rng)
        assert evaluation.kept == 2  # the even one has H = ln 4 > 0.4 ln 4
        assert float(evaluation.value) == pytest.approx(certain, rel=1e-5)
        loss.observe(first)
        np.testing.assert_allclose(loss.mean_prediction, sure, rtol=1e-5)
        # cos(sure, p̄) = 1: redundant. Another class has cos = (2·0.97·0.01 + 2·0.0001)/(0.9409 + 0.0003) ≈ 0.02: not.
        second = logits_of(sure, sure[::-1])
        evaluation = loss.evaluate(lambda x, gradient=True: second, images, rng)
        assert evaluation.kept == 1
        assert float(evaluation.value) == pytest.approx(certain, rel=1e-5)
        loss.observe(second)
        np.testing.assert_allclose(loss.mean_prediction, [0.874, 0.01, 0.01, 0.106], rtol=1e-5)

    def test_fisher_pulls_back_to_the_source(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        name, away = next(iter(bn_runtime.groups)), {n: v + 0.1 for n, v in bn_runtime.groups.items()}
        fisher = {n: np.zeros_like(bn_runtime.groups[n]) for n in learnable(bn_runtime.groups)}
        fisher[name][:2] = 3.0
        after = []
        for options in ({}, {"fisher": fisher, "alpha": 5.0}):
            adapter = create_adapter("eata", bn_runtime, lr=0.01, **PLAIN, **options)
            with torch.no_grad():
                for n, parameter in adapter.learnt.items():
                    parameter.copy_(torch.from_numpy(away[n]))
            if options:
                assert float(adapter.penalty(fisher)) == pytest.approx(5 * 2 * 3 * 0.1**2, rel=1e-4)
            adapter.predict(images)
            after.append(adapter.groups[name])
        pull = np.zeros_like(after[0])
        pull[:2] = 0.01 * 5 * 2 * 3 * 0.1  # lr · α · 2 F (θ − θ₀)
        np.testing.assert_allclose(after[0] - after[1], pull, atol=1e-6)

    def test_fisher_is_the_mean_squared_gradient(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        def loss(batch: np.ndarray, weights: Weights) -> torch.Tensor:
            p = bn_runtime.forward(batch, weights).logits.softmax(dim=1)
            return -p.max(dim=1).values.log().mean()

        both = [
            gradients_of(lambda weights, b=batch: loss(b, weights), weights_of(bn_runtime))
            for batch in (images[:24], images[24:])
        ]
        fisher = estimate_fisher(bn_runtime, [images[:24], images[24:]])
        assert tuple(fisher) == learnable(bn_runtime.groups)
        for name, value in fisher.items():
            np.testing.assert_allclose(value, (both[0][name] ** 2 + both[1][name] ** 2) / 2, rtol=1e-3, atol=1e-9)
        with pytest.raises(MergettaError, match="no source images"):
            estimate_fisher(bn_runtime, [])
        with pytest.raises(MergettaError, match="Fisher information lacks"):
            create_adapter("eata", bn_runtime, fisher={})

    def test_nothing_certain_moves_nothing(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = create_adapter("eata", bn_runtime, entropy_margin=0.0)
        adapter.predict(images)
        assert adapter.skipped == 1
        assert adapter.loss.mean_prediction is None


class TestSAR:
    def test_step_by_hand(self, images: np.ndarray) -> None:
        """θ − η ∇L(θ + ρ ∇L(θ)/‖∇L(θ)‖), over samples certain in both passes."""
        runtime = TorchRuntime(load_family("fashion-vit"))  # smooth: ReLU would magnify rounding
        limit = 0.4 * math.log(10)
        certain = entropy(runtime.forward(images, {}).logits) < limit

        def loss(weights: Weights) -> torch.Tensor:
            h = entropy(runtime.forward(images, weights).logits)
            return h[certain & (h < limit)].mean()

        first = gradients_of(loss, weights_of(runtime))
        norm = math.sqrt(sum(float((g**2).sum()) for g in first.values()))
        away = weights_of(runtime, {name: v + 0.05 * first[name] / norm for name, v in runtime.groups.items()})
        second, value = gradients_of(loss, away), float(loss(away))
        adapter = create_adapter("sar", runtime, lr=0.1, frozen=(), recover_below=0.0, **PLAIN)
        adapter.predict(images)
        for name, now in adapter.groups.items():
            np.testing.assert_allclose(now, runtime.groups[name] - 0.1 * second[name], atol=1e-6)
        assert max(np.abs(second[name] - first[name]).max() for name in first) > 1e-3  # the second pass matters
        assert adapter.mean_loss == pytest.approx(value, rel=1e-5)
        adapter.predict(images)
        assert adapter.mean_loss < value

    def test_defaults_follow_the_model(self, runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = create_adapter("sar", runtime, recover_below=0.0)
        batch_norm = has_batch_norm(runtime.structure)
        assert adapter.optimizer.param_groups[0]["lr"] == (2.5e-4 if batch_norm else 1e-3)
        adapter.predict(images)
        last = max(group.block for group in runtime.structure)
        now = adapter.groups
        frozen = [group.name for group in runtime.structure if group.block == last]
        assert all(np.array_equal(now[name], runtime.groups[name]) for name in frozen)
        assert any(not np.array_equal(now[name], runtime.groups[name]) for name in now)

    def test_recovers_from_collapse(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = create_adapter("sar", bn_runtime, recover_below=100.0)
        for steps in (1, 2):
            adapter.predict(images)
            assert (adapter.steps, adapter.recoveries, adapter.mean_loss) == (steps, steps, None)
        assert all(np.array_equal(value, bn_runtime.groups[name]) for name, value in adapter.groups.items())


class TestCoTTA:
    def test_step_by_hand(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        x, views = torch.from_numpy(images), generator(4, 0, "teacher views")
        every = np.ones(len(images), dtype=bool)
        with torch.no_grad():
            target = sum(bn_runtime.forward(colour_and_geometry(x, views, every), {}).logits for _ in range(3)) / 3
        gradients = gradients_of(
            lambda weights: (
                -(target.softmax(dim=1) * bn_runtime.forward(x, weights).logits.log_softmax(dim=1)).sum(dim=1).mean()
            ),
            weights_of(bn_runtime),
        )
        options = {"views": 3, "confidence": 1.1, "restore": 0.3, "teacher_momentum": 0.75, "lr": 0.1, "seed": 4}
        adapter = create_adapter("cotta", bn_runtime, **options, **PLAIN)
        np.testing.assert_allclose(adapter.predict(images), target, atol=1e-5)
        for name in learnable(bn_runtime.groups):
            source, now = bn_runtime.groups[name], adapter.groups[name]
            student = source - 0.1 * gradients[name]
            np.testing.assert_allclose(adapter.teacher[name], 0.75 * source + 0.25 * student, atol=1e-6)
            back = generator(4, 0, f"restore {name}").random(source.size) < 0.3
            np.testing.assert_allclose(now, np.where(back, source, student), atol=1e-6)

    def test_a_sure_source_model_needs_no_views(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        source = bn_runtime(images).logits
        adapter = create_adapter("cotta", bn_runtime, confidence=0.0)
        before = bn_runtime.forwarded
        np.testing.assert_allclose(adapter.predict(images), source, atol=1e-5)
        assert bn_runtime.forwarded - before == 3 * len(images)  # source, teacher, student

    def test_bad_options(self, bn_runtime: TorchRuntime) -> None:
        for options in ({"views": 0}, {"restore": 2.0}, {"teacher_momentum": -0.1}):
            with pytest.raises(MergettaError, match=next(iter(options))):
                create_adapter("cotta", bn_runtime, **options)


class TestRMT:
    def test_contrast_by_hand(self) -> None:
        # One sample, three views at right angles: each anchor must pick among two equal others.
        assert float(contrastive(list(torch.eye(3)[:, None]), 0.1)) == pytest.approx(math.log(2))
        # Two samples at right angles, views equal but for length: two positives at cos 1, three negatives at cos 0.
        views = [scale * torch.eye(2) for scale in (1.0, 2.0, 3.0)]
        assert float(contrastive(views, 0.5)) == pytest.approx(math.log(2 * math.exp(2) + 3) - 2)

    def test_loss_by_hand(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        loss = Robust(bn_runtime, None, 1.0, 0.1)
        loss.target = logits_of([0.5, 0.5])
        answers = iter([logits_of([0.8, 0.2]), logits_of([0.5, 0.5])])
        one = torch.from_numpy(images[:1])
        value = loss.evaluate(lambda x, gradient=True: next(answers), one, np.random.default_rng(0)).value
        clean = -0.5 * (math.log(0.5) + 0.5 * math.log(0.8) + 0.5 * math.log(0.2))
        assert float(value) == pytest.approx((clean + math.log(2)) / 2, rel=1e-5)

    def test_returns_student_and_teacher(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        source = bn_runtime(images).logits
        adapter = create_adapter("rmt", bn_runtime, lr=0.05)
        np.testing.assert_allclose(adapter.predict(images), 2 * source, atol=1e-4)
        student = bn_runtime(images, adapter.groups).logits
        teacher = bn_runtime(images, adapter.teacher).logits
        assert np.abs(student - teacher).max() > 1e-2
        np.testing.assert_allclose(adapter.predict(images), student + teacher, atol=1e-4)

    def test_prototypes(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        labels = np.arange(len(images)) % 10
        prototypes = source_prototypes(bn_runtime, [(images, labels)])
        features = bn_runtime(images).features
        np.testing.assert_allclose(prototypes[3], features[labels == 3].mean(axis=0), rtol=1e-5)
        after = []
        for options in ({}, {"prototypes": prototypes, "contrast": 0.0}, {"prototypes": prototypes}):
            adapter = create_adapter("rmt", bn_runtime, **options)
            adapter.predict(images)
            after.append(np.concatenate(list(adapter.groups.values())))
        np.testing.assert_array_equal(after[0], after[1])
        assert not np.array_equal(after[0], after[2])
        with pytest.raises(MergettaError, match="no source image of class 3"):
            source_prototypes(bn_runtime, [(images[:3], labels[:3])])
        with pytest.raises(MergettaError, match="one feature vector per class"):
            create_adapter("rmt", bn_runtime, prototypes=prototypes[:3])
        with pytest.raises(MergettaError, match="NaN"):
            create_adapter("rmt", bn_runtime, prototypes=prototypes * np.nan)


class TestAdaMerging:
    def test_step_by_hand(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        experts, source = experts_of(bn_runtime), bn_runtime.groups
        tasks = {name: np.stack([e.groups[name] - source[name] for e in experts]) for name in learnable(source)}
        merged = {**source, **{name: source[name] + 0.2 * tasks[name].sum(axis=0) for name in tasks}}
        before = bn_runtime(images, merged).logits
        gradients = gradients_of(
            lambda weights: entropy(bn_runtime.forward(images, weights).logits).mean(), weights_of(bn_runtime, merged)
        )
        adapter = create_adapter("adamerging", bn_runtime, experts=experts, initial=0.2, lr=0.05, **PLAIN)
        np.testing.assert_allclose(adapter.predict(images), before, atol=1e-4)
        for name, coefficients in adapter.coefficients.items():
            expected = 0.2 - 0.05 * tasks[name] @ gradients[name]  # dL/dλ_m = τ_m · dL/dθ
            np.testing.assert_allclose(coefficients, expected, atol=1e-6)
            np.testing.assert_allclose(adapter.groups[name], source[name] + coefficients @ tasks[name], atol=1e-6)
        for name in set(source) - set(tasks):
            np.testing.assert_array_equal(adapter.groups[name], source[name])

    def test_coefficients_stay_within_bounds(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        frozen = list(bn_runtime.groups)[:2]
        adapter = create_adapter("adamerging", bn_runtime, experts=experts_of(bn_runtime), lr=5.0, frozen=frozen)
        adapter.predict(images)
        assert not set(frozen) & adapter.coefficients.keys()
        values = np.concatenate(list(adapter.coefficients.values()))
        assert values.min() == 0
        assert values.max() == 1
        for name in frozen:
            merged = bn_runtime.groups[name] + 0.3 * sum(
                e.groups[name] - bn_runtime.groups[name] for e in experts_of(bn_runtime)
            )
            np.testing.assert_allclose(adapter.groups[name], merged, atol=1e-6)

    def test_bad_experts(self, bn_runtime: TorchRuntime) -> None:
        with pytest.raises(MergettaError, match="at least one expert"):
            create_adapter("adamerging", bn_runtime, experts=[])
        with pytest.raises(MergettaError, match="belongs to the family"):
            create_adapter("adamerging", bn_runtime, experts=[Expert(bn_runtime.groups, "other", "x")])
        with pytest.raises(MergettaError, match="lacks the group"):
            create_adapter("adamerging", bn_runtime, experts=[Expert({"g": np.ones(2)}, bn_runtime.family, "x")])
        with pytest.raises(MergettaError, match="needs experts"):
            create_adapter("adamerging", bn_runtime)
