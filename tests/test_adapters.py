"""Adapters: every one through the contract, then each against values worked out from its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mergetta import Expert, MergettaError, TorchRuntime, build_bundle, create_adapter, list_adapters
from mergetta.adapters import METHODS
from mergetta.adapters.backprop.expert_training import Training, train_expert
from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.cola import CoLA, distance, source_expert
from mergetta.adapters.forward_only.source_features import measure_source
from mergetta.adapters.forward_only.t3a import T3A
from mergetta.groups import learnable, moments_of
from mergetta.models.family import Family, load_family
from mergetta.runtimes.prompted import PromptedRuntime
from mergetta.streams.moments import batch_moments

from .contracts import AdapterContract, SmallImagesContract
from .moving import moved
from .numpy_runtime import NumpyRuntime, PromptedNumpyRuntime


def needed(name: str, runtime: Any, images: np.ndarray) -> dict[str, Any]:
    """A bundle or experts, if the method needs them."""
    rng = np.random.default_rng(5)
    experts = [
        Expert(
            moved(runtime.groups, rng, 0.05),
            runtime.family,
            f"domain {i}",
            np.asarray(runtime(images).signature) * rng.uniform(0.5, 2, (2, 1)),
        )
        for i in range(3)
    ]
    if METHODS[name].needs == "source":
        return {"source": measure_source(runtime, [images])}
    if METHODS[name].needs == "experts":
        return {"experts": experts}
    return {"bundle": build_bundle(runtime.groups, experts)} if METHODS[name].needs == "bundle" else {}


@pytest.mark.parametrize("name", list_adapters())
class TestEveryAdapter(AdapterContract):
    @pytest.fixture
    def subject(self, name: str, family: Family, runtime: TorchRuntime, images: np.ndarray) -> Adapter:
        options = needed(name, runtime, images)
        if METHODS[name].prompts and family.architecture != "small-vit":
            pytest.skip("prompts are for transformers")
        return create_adapter(name, PromptedRuntime(family) if METHODS[name].prompts else runtime, **options)


@pytest.mark.parametrize("name", [n for n, method in METHODS.items() if not method.backprop])
class TestForwardOnlyWithoutTorch(SmallImagesContract):
    @pytest.fixture
    def subject(self, name: str, images: np.ndarray) -> Adapter:
        runtime = PromptedNumpyRuntime() if METHODS[name].prompts else NumpyRuntime()
        return create_adapter(name, runtime, **needed(name, runtime, images))


@pytest.mark.parametrize("name", ["zo-merge", "race-merge", "t3a", "cola", "merge"])
def test_torch_tensors_give_the_same_numbers(name: str, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
    adapter = create_adapter(name, bn_runtime, **needed(name, bn_runtime, images))
    first = [adapter.predict(images) for _ in range(2)]
    adapter.reset()
    again = [adapter.predict(torch.from_numpy(images)) for _ in range(2)]
    for one, other in zip(first, again, strict=True):
        assert isinstance(other, torch.Tensor)
        np.testing.assert_allclose(one, other.numpy(), atol=1e-4)


def test_unknown_names_and_options(bn_runtime: TorchRuntime) -> None:
    with pytest.raises(MergettaError, match="no adapter 'magic'"):
        create_adapter("magic", bn_runtime)
    with pytest.raises(MergettaError, match="tent has no option 'speed'"):
        create_adapter("tent", bn_runtime, speed=3)
    with pytest.raises(MergettaError, match="zo-merge needs bundle"):
        create_adapter("zo-merge", bn_runtime)
    with pytest.raises(MergettaError, match="adam or sgd"):
        create_adapter("tent", bn_runtime, optimizer="lbfgs")
    with pytest.raises(MergettaError, match="no such group"):
        create_adapter("roid", bn_runtime, frozen=["x"])


def test_every_registered_method_loads() -> None:
    assert all(issubclass(method.load(), Adapter) for method in METHODS.values())


class TestT3A:
    def test_prototypes_by_hand(self, numpy_runtime: NumpyRuntime) -> None:
        adapter = T3A(numpy_runtime, keep=1)
        adapter.supports = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
        adapter.labels = np.array([0, 0, 1])
        adapter.entropies = np.array([0.1, 0.2, 0.3])
        mean = np.array([0.6 + 0.0, 0.8 + 1.0])  # of the normalised supports (0.6, 0.8) and (0, 1)
        np.testing.assert_allclose(adapter.prototypes(3), [mean / np.linalg.norm(mean), [1, 0], [0, 0]])
        adapter._filter()  # keep=1: of class 0 only the support with the lower entropy stays
        assert adapter.labels.tolist() == [0, 1]
        np.testing.assert_allclose(adapter.prototypes(3), [[0.6, 0.8], [1, 0], [0, 0]])

    def test_keep_all_means_all(self, numpy_runtime: NumpyRuntime) -> None:
        images = np.random.default_rng(0).random((10, 1, 6, 6)).astype(np.float32)
        adapter = T3A(numpy_runtime, keep=-1)
        start = len(adapter.supports)
        for call in range(1, 4):
            adapter.predict(images)
            assert len(adapter.supports) == start + 10 * call

    def test_supports_per_class_are_bounded(self, numpy_runtime: NumpyRuntime) -> None:
        images = np.random.default_rng(0).random((40, 1, 6, 6)).astype(np.float32)
        adapter = T3A(numpy_runtime, keep=3)
        adapter.predict(images)
        assert np.bincount(adapter.labels).max() <= 3

    def test_bad_keep(self, numpy_runtime: NumpyRuntime) -> None:
        with pytest.raises(MergettaError, match="keep must be"):
            T3A(numpy_runtime, keep=0)


class TestCoLA:
    def test_distance_by_hand(self) -> None:
        a, b = np.array([[0.0, 1.0], [1.0, 4.0]]), np.array([[1.0, 1.0], [2.0, 4.0]])
        # channel 0: (1+1)/(2·2) + (2+1)/(2·1) − 1 = 1; channel 1: equal, 0
        assert distance(a, b) == pytest.approx(0.5)
        assert distance(np.stack([a, b]), b) == pytest.approx([0.5, 0.0])

    def test_weights_by_hand(self, numpy_runtime: NumpyRuntime) -> None:
        images = np.random.default_rng(0).random((20, 1, 6, 6)).astype(np.float32)
        now = numpy_runtime(images).signature
        near = Expert(numpy_runtime.groups, "numpy-test", "near", now * 1.5)
        far = Expert(numpy_runtime.groups, "numpy-test", "far", now * 4)
        adapter = CoLA(numpy_runtime, [near, far])
        adapter.predict(images)
        closeness = np.array([1 / (float(distance(e.signature, now)) + 1e-4) / 5 for e in (near, far)])
        np.testing.assert_allclose(adapter.weights, np.exp(closeness) / np.exp(closeness).sum(), rtol=1e-4)
        np.testing.assert_allclose(adapter.mixed()["a.weight"], 1.0)

    def test_one_pass_per_batch_two_after_a_shift(self, numpy_runtime: NumpyRuntime) -> None:
        rng = np.random.default_rng(0)
        images = rng.random((20, 1, 6, 6)).astype(np.float32)
        numpy_runtime.signature = numpy_runtime(images).signature
        adapter = CoLA(numpy_runtime, [source_expert(numpy_runtime)])
        passes = []
        for batch in (images, images[::-1], 1 - 0.1 * images, 1 - 0.1 * images):
            before = numpy_runtime.forwarded
            adapter.predict(batch)
            passes.append((numpy_runtime.forwarded - before) // 20)
        assert passes == [2, 1, 2, 1]

    def test_needs_signatures(self, numpy_runtime: NumpyRuntime) -> None:
        with pytest.raises(MergettaError, match="no signature"):
            CoLA(numpy_runtime, [Expert(numpy_runtime.groups, "numpy-test", "x")])
        with pytest.raises(MergettaError, match="at least one expert"):
            CoLA(numpy_runtime, [])
        experts = [Expert(numpy_runtime.groups, "numpy-test", f"{c}", np.ones((2, c))) for c in (6, 7)]
        with pytest.raises(MergettaError, match="of another size"):
            CoLA(numpy_runtime, experts)
        with pytest.raises(MergettaError, match="not of this model"):
            CoLA(numpy_runtime, experts[1:]).predict(np.zeros((2, 1, 6, 6), np.float32))


class TestBackprop:
    def test_tent_is_one_gradient_step_on_entropy(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        names = learnable(bn_runtime.groups)
        source = bn_runtime.tensors(bn_runtime.groups)
        parameters = {name: source[name].clone().requires_grad_() for name in names}
        logits = bn_runtime.forward(torch.from_numpy(images), parameters).logits
        p = torch.softmax(logits, dim=1)
        (-(p * torch.log_softmax(logits, dim=1)).sum(dim=1).mean()).backward()
        adapter = create_adapter("tent", bn_runtime, optimizer="sgd", lr=0.01, momentum=0.0)
        adapter.predict(images)
        assert set(adapter.learnt) == set(names)
        for name, value in adapter.groups.items():
            step = 0.01 * parameters[name].grad.numpy() if name in names else 0.0
            np.testing.assert_allclose(value, bn_runtime.groups[name] - step, atol=1e-6)

    def test_two_adapters_on_one_runtime_do_not_meet(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        one, other = (create_adapter("tent", bn_runtime, lr=0.05) for _ in range(2))
        first = [one.predict(images) for _ in range(3)]
        again = [other.predict(images) for _ in range(3)]
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)
        assert set(one.state_dict()) >= {f"learnt/{name}" for name in learnable(bn_runtime.groups)}
        assert not [name for name in one.state_dict() if "running" in name]

    def test_the_first_pass_is_kept(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """What an expert tells of its domain comes from the pass it predicts with, and costs none of its own."""
        adapter = create_adapter("roid", bn_runtime)
        expected, passes = bn_runtime(images, moments=True), []
        for watching in (False, True):
            adapter.watching = watching
            adapter.reset()
            before = bn_runtime.forwarded
            adapter.predict(images)
            passes.append(bn_runtime.forwarded - before)
            np.testing.assert_allclose(adapter.output.logits, expected.logits, atol=1e-3)
            np.testing.assert_allclose(adapter.output.signature, expected.signature, rtol=1e-3, atol=1e-4)
            assert not adapter.output.features.requires_grad
            assert (adapter.output.moments is not None) == watching
        np.testing.assert_allclose(adapter.output.moments, expected.moments, rtol=1e-3, atol=1e-3)
        assert passes[0] == passes[1]

    def test_roid_mixes_the_source_back_in(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        free = create_adapter("roid", bn_runtime, source_share=0.0, lr=0.01)
        free.predict(images)
        mixed = create_adapter("roid", bn_runtime, source_share=0.25, lr=0.01)
        mixed.predict(images)
        for name, value in mixed.groups.items():
            np.testing.assert_allclose(value, 0.75 * free.groups[name] + 0.25 * bn_runtime.groups[name], atol=1e-6)

    def test_deyo_leaves_the_last_block_alone(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = create_adapter("deyo", bn_runtime, lr=0.01, plpd=-1.0)
        adapter.predict(images)
        moved = {name for name, value in adapter.groups.items() if not np.array_equal(value, bn_runtime.groups[name])}
        assert moved
        assert not any(name.startswith("stages.2") for name in moved)

    def test_no_reliable_sample_no_update(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = create_adapter("deyo", bn_runtime, plpd=2.0)
        adapter.predict(images)
        assert adapter.skipped == 1
        assert all(np.array_equal(value, bn_runtime.groups[name]) for name, value in adapter.groups.items())

    def test_bad_images_leave_the_adapter_as_it_was(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = create_adapter("roid", bn_runtime)
        expected = adapter.predict(images)
        adapter.reset()
        with pytest.raises(MergettaError, match="NaN"):
            adapter.predict(np.full_like(images, np.nan))
        assert not any(parameter.requires_grad for parameter in adapter.learnt.values())
        np.testing.assert_array_equal(adapter.predict(images), expected)

    def test_bad_rates(self, bn_runtime: TorchRuntime) -> None:
        for options in ({"lr": float("nan")}, {"lr": -1.0}, {"momentum": 1.5}):
            with pytest.raises(MergettaError, match="lr must be finite and not negative"):
                create_adapter("tent", bn_runtime, **options)

    def test_needs_a_torch_runtime(self, numpy_runtime: NumpyRuntime) -> None:
        with pytest.raises(MergettaError, match="needs a TorchRuntime"):
            create_adapter("tent", numpy_runtime)


class TestExpertTraining:
    def test_expert_holds_what_was_learnt(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        expert = train_expert(bn_runtime, [images[:24], images[24:]], "roid", "clean", seed=3, lr=0.01)
        assert expert.family == bn_runtime.family
        assert expert.provenance == {"method": "roid", "samples": 48, "seed": 3, "options": {"lr": 0.01}}
        assert any(not np.allclose(expert.groups[name], value) for name, value in bn_runtime.groups.items())
        np.testing.assert_allclose(expert.signature, bn_runtime(images).signature, rtol=1e-3, atol=1e-4)

    def test_moments_of_a_stream_of_one_batch(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """They are those of the pass in which it learnt: with the source's weights and the batch's statistics."""
        expert = train_expert(bn_runtime, [images], "roid", lr=0.01)
        measured = batch_moments(bn_runtime(images, moments=True).moments)
        np.testing.assert_allclose(moments_of(expert.groups), measured, rtol=1e-3, atol=1e-4)
        assert expert.features is None
        assert any(not np.array_equal(expert.groups[n], bn_runtime.groups[n]) for n in learnable(expert.groups))

    def test_moments_follow_the_weights_as_they_learn(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        training = Training(bn_runtime, "tent", lr=0.05)
        seen, batches = [], (images[:8], images[8:40], images[40:])
        for batch in batches:
            seen.append(batch_moments(bn_runtime(batch, training.adapter.groups, moments=True).moments))
            training.adapter.predict(batch)
            before = bn_runtime.forwarded
            training.observe(batch)
            assert bn_runtime.forwarded == before  # no pass of its own
        counts = np.array([len(batch) for batch in batches])[:, None] / len(images)
        means, variances = np.moveaxis(np.array(seen), 1, 0)
        mean = (counts * means).sum(axis=0)
        variance = (counts * (variances + (means - mean) ** 2)).sum(axis=0)
        np.testing.assert_allclose(moments_of(training.expert().groups), [mean, variance], rtol=2e-3, atol=1e-3)

    def test_without_batch_norm_features_take_their_place(self, images: np.ndarray) -> None:
        runtime = TorchRuntime(load_family("fashion-vit"))
        expert = train_expert(runtime, [images], "tent")
        features = runtime(images).features
        np.testing.assert_allclose(expert.features, [features.mean(axis=0), features.var(axis=0)], rtol=1e-3, atol=1e-4)
        assert moments_of(expert.groups).size == 0

    def test_an_expert_is_a_bundle_of_its_own(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """Merged in full and with its own moments, it predicts as the expert does, whatever the batch."""
        expert = train_expert(bn_runtime, [images], "tent", lr=0.01)
        bundle = build_bundle(bn_runtime.groups, [expert], keep=None, tolerance=0.0, initial=1.0)
        np.testing.assert_allclose(
            bn_runtime(images[:1], bundle.merge(), 1.0).logits,
            bn_runtime(images, expert.groups, 1.0).logits[:1],
            atol=1e-3,
        )

    def test_no_images_or_no_gradient(self, bn_runtime: TorchRuntime) -> None:
        with pytest.raises(MergettaError, match="no images"):
            train_expert(bn_runtime, [])
        with pytest.raises(MergettaError, match="forward-only"):
            train_expert(bn_runtime, [], "bn-stats")
