"""Forward-only peers, each against values worked out from its definition; prompts; source features."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mergetta import Bundle, Expert, MergettaError, TorchRuntime, build_bundle, create_adapter
from mergetta.adapters.forward_only.entropy_merge import EntropyMerge
from mergetta.adapters.forward_only.foa import FOA, alignment_loss
from mergetta.adapters.forward_only.fozo import FOZO
from mergetta.adapters.forward_only.knowledge_bank import KnowledgeBank
from mergetta.adapters.forward_only.lame import LAME, assign, nearest
from mergetta.adapters.forward_only.source_features import (
    BackToSource,
    SourceFeatures,
    check_source,
    measure_source,
    squared_distances,
)
from mergetta.adapters.forward_only.zoa import CNN, VIT, ZOA, published_frozen
from mergetta.groups import Group
from mergetta.losses.probabilities import entropy, softmax
from mergetta.models.family import Family, load_family
from mergetta.models.small_vit import SmallViT
from mergetta.models.vit import VisionTransformer
from mergetta.runtimes.base import Output
from mergetta.runtimes.onnx_runtime import OnnxRuntime
from mergetta.runtimes.prompted import PromptedRuntime
from mergetta.zeroth_order.perturbation import draw
from mergetta.zeroth_order.segmented import draw_segmented

from .contracts import RuntimeContract
from .numpy_runtime import NumpyRuntime, PromptedNumpyRuntime


@pytest.fixture(scope="module")
def vit() -> Family:
    return load_family("fashion-vit")


@pytest.fixture
def small_images() -> np.ndarray:
    return np.random.default_rng(0).random((12, 1, 6, 6)).astype(np.float32)


def source_of(runtime: NumpyRuntime, images: np.ndarray) -> SourceFeatures:
    """Features that are not the batch's own."""
    mean, std = measure_source(runtime, [images])
    return SourceFeatures(mean + 0.3, std * 1.2)


class TestSourceFeatures:
    def test_batches_are_pooled(self, numpy_runtime: NumpyRuntime, small_images: np.ndarray) -> None:
        features = numpy_runtime(small_images).features
        mean, std = measure_source(numpy_runtime, [small_images[:2], small_images[2:]])
        np.testing.assert_allclose(mean, features.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(std, features.std(axis=0, ddof=1), rtol=1e-4, atol=1e-6)

    def test_distances_by_hand(self) -> None:
        features = np.array([[0.0, 1.0], [2.0, 1.0]])  # means 1 and 1, std √2 and 0
        far = squared_distances(features, SourceFeatures(np.array([0.0, 1.0]), np.array([math.sqrt(2), 3.0])))
        np.testing.assert_allclose(far, [[1, 0], [0, 9]], atol=1e-12)

    def test_shift_by_hand(self, numpy_runtime: NumpyRuntime) -> None:
        back = BackToSource(numpy_runtime, SourceFeatures(np.ones(6), np.ones(6)))

        def of(value: float) -> Output:
            return Output(np.zeros((1, 4), np.float32), np.full((1, 6), value, np.float32), np.zeros((2, 6)))

        output = of(2.0)
        np.testing.assert_array_equal(back.logits(output), 0)  # nothing seen yet: as they are
        back.observe(output)
        back.observe(of(3.0), of(np.nan), of(5.0))  # 0.9 · 2 + 0.1 · 4 = 2.2: what is no number does not count
        back.observe(of(np.inf))
        weight, bias = numpy_runtime.classifier
        np.testing.assert_allclose(back.logits(output)[0], weight @ np.full(6, 2 + 1 - 2.2) + bias, rtol=1e-5)

    def test_what_is_refused(self, numpy_runtime: NumpyRuntime) -> None:
        with pytest.raises(MergettaError, match="two clean images"):
            measure_source(numpy_runtime, [])
        for bad in ((np.ones(6),), (np.ones(6), np.ones(5)), (np.ones(6), np.full(6, np.nan))):
            with pytest.raises(MergettaError, match="of 6 features"):
                check_source(numpy_runtime, bad)
        with pytest.raises(MergettaError, match="zoa needs source"):
            create_adapter("zoa", numpy_runtime)


class TestLAME:
    def test_nearest_by_hand(self) -> None:
        features = np.array([[1.0, 0.0], [9.0, 1.0], [0.0, 2.0], [0.5, 5.0]])  # by direction: two pairs
        assert nearest(features, 1).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
        assert nearest(features, 9).sum(axis=1).tolist() == [3, 3, 3, 3]
        assert nearest(features[:1], 5).tolist() == [[0]]

    def test_one_iteration_by_hand(self) -> None:
        p = np.array([[0.5, 0.5], [0.9, 0.1]])
        y = np.exp(assign(np.log(p), np.array([[0.0, 1.0], [1.0, 0.0]]), 1, 0.0))
        assert y[0, 0] == pytest.approx(1 / (1 + math.exp(-(0.9 - 0.1))))  # softmax(log 0.5 + (0.9, 0.1))
        assert y[1, 0] == pytest.approx(0.9 / (0.9 + 0.1))  # its neighbour prefers neither class

    def test_converges_to_the_fixed_point(self, rng: np.random.Generator) -> None:
        p = softmax(rng.normal(size=(20, 5)))
        affinity = nearest(rng.normal(size=(20, 8)), 5)
        log_y = assign(np.log(p), affinity, 1000, 0.0)
        np.testing.assert_allclose(np.exp(log_y), softmax(np.log(p) + affinity @ np.exp(log_y)), atol=1e-6)

    def test_alone_nothing_changes(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        source = create_adapter("source", bn_runtime).predict(images[:1])
        np.testing.assert_allclose(np.exp(LAME(bn_runtime).predict(images[:1])), softmax(source), atol=1e-6)
        with pytest.raises(MergettaError, match="at least 1"):
            LAME(bn_runtime, neighbours=0)


class TestEntropyMerge:
    def test_weights_by_hand(self, numpy_runtime: NumpyRuntime, small_images: np.ndarray) -> None:
        groups = numpy_runtime.groups
        experts = [
            Expert({**groups, "a.weight": groups["a.weight"] * scale}, "numpy-test", str(scale)) for scale in (1.0, 3.0)
        ]
        each = [float(entropy(numpy_runtime(small_images, expert.groups).logits).mean()) for expert in experts]
        share = 1 / (1 + math.exp((each[0] - each[1]) / 0.5))  # of the first
        adapter = EntropyMerge(numpy_runtime, experts, temperature=0.5)
        np.testing.assert_allclose(adapter.weights(small_images), [share, 1 - share], rtol=1e-5)
        merged = {**groups, "a.weight": groups["a.weight"] * (share + 3 * (1 - share))}
        before = numpy_runtime.forwarded
        np.testing.assert_allclose(
            adapter.predict(small_images), numpy_runtime(small_images, merged).logits, rtol=1e-4, atol=1e-5
        )
        assert numpy_runtime.forwarded == before + 4 * len(small_images)  # two experts, the merge, and the line above
        assert share != pytest.approx(0.5, abs=0.05)

    @pytest.mark.parametrize("options", [{"temperature": 0.0}, {"given": 1.5}])
    def test_bad_options(self, numpy_runtime: NumpyRuntime, options: dict[str, float]) -> None:
        with pytest.raises(MergettaError, match="temperature must be positive"):
            EntropyMerge(numpy_runtime, [Expert(numpy_runtime.groups, "numpy-test", "x")], **options)
        with pytest.raises(MergettaError, match="at least one expert"):
            EntropyMerge(numpy_runtime, [])


class TestZOA:
    def test_one_step_equals_the_formula(self, numpy_runtime: NumpyRuntime, small_images: np.ndarray) -> None:
        source = source_of(numpy_runtime, small_images)
        adapter = ZOA(numpy_runtime, source, lr=0.1, delta=0.5, weight=2.0, frozen=(), seed=7)
        z = 0.5 * draw_segmented(7, 0, (("a.weight", 6), ("a.bias", 6)))

        def loss(moved: np.ndarray) -> float:
            logits, features, *_ = numpy_runtime(small_images, {"a.weight": 1 + moved[:6], "a.bias": moved[6:]})
            far = np.mean((features.mean(axis=0) - source.mean) ** 2)
            far += np.mean((features.std(axis=0, ddof=1) - source.std) ** 2)
            return float(entropy(logits).mean() + 2.0 * far)

        start = np.full(12, 0.02)
        adapter.epsilon = start
        expected = start - 0.1 * ((loss(start + z) - loss(start)) / z + 0.4 * start)
        before = numpy_runtime.forwarded
        logits = adapter.predict(small_images)
        assert numpy_runtime.forwarded == before + 2 * len(small_images)
        np.testing.assert_allclose(adapter.epsilon, expected, rtol=1e-4)
        as_it_was = {"a.weight": 1 + start[:6], "a.bias": start[6:]}  # predicted before the step
        np.testing.assert_allclose(logits, numpy_runtime(small_images, as_it_was).logits, rtol=1e-6)

    def test_bank_by_hand(self) -> None:
        bank = KnowledgeBank((("a", 2),), limit=2)
        epsilon = bank.remember(np.array([0.03, 0.01]))  # mean 0.02 is twice the margin: half of it goes to the bank
        np.testing.assert_allclose(bank.mixing, [0, 0])
        np.testing.assert_allclose(bank.vectors, [[0, 0], [0.03, 0.01]])
        np.testing.assert_allclose(epsilon, [0.015, 0.005])

    def test_bank_drops_the_older_of_the_most_similar(self) -> None:
        bank = KnowledgeBank((("a", 2),), limit=3)
        bank.vectors = np.array([[0, 0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.1]])
        bank.mixing = np.array([0.0, 0.1, 0.2, 0.3])
        moved = bank.mixed(bank.mixing) + 0.5
        epsilon = bank.remember(np.full(2, 0.5))
        np.testing.assert_allclose(bank.vectors, [[0, 0], [0, 1], [1, 0.1], moved])
        np.testing.assert_allclose(bank.mixed(bank.mixing) + epsilon, moved)  # the weights do not jump

    def test_a_new_domain_joins_the_bank(self, numpy_runtime: NumpyRuntime) -> None:
        images = np.random.default_rng(0).random((64, 1, 6, 6)).astype(np.float32)
        adapter = ZOA(numpy_runtime, source_of(numpy_runtime, images), frozen=(), **CNN._replace(lr=0.01)._asdict())
        for batch in (images, images[::-1], 1 - 0.1 * images[:10]):  # too few images to tell a new domain
            adapter.predict(batch)
        assert len(adapter.bank.vectors) == 1
        learnt = adapter.epsilon
        adapter.predict(1 - 0.1 * images)
        np.testing.assert_allclose(adapter.bank.vectors, [np.zeros(12), learnt])
        assert adapter.bank.mixing.shape == (2,)
        assert set(np.round(np.abs(adapter.bank.mixing - adapter.bank.mixing.mean()), 6)) <= {0.0, 0.01}
        state = adapter.state_dict()
        expected = adapter.predict(images)
        adapter.reset()
        adapter.load_state_dict(state)
        np.testing.assert_array_equal(adapter.predict(images), expected)

    def test_presets_and_frozen_groups(self, bn_runtime: TorchRuntime, vit: Family, images: np.ndarray) -> None:
        adapter = ZOA(bn_runtime, measure_source(bn_runtime, [images]))
        assert adapter.settings == CNN
        assert {group.block for group in bn_runtime.structure if group.name in dict(adapter.sizes)} == {1, 2}
        assert {group.kind for group in bn_runtime.structure if group.name in dict(adapter.sizes)} == {"scale", "shift"}
        runtime = TorchRuntime(vit)
        adapter = ZOA(runtime, measure_source(runtime, [images]), lr=1.0)
        assert adapter.settings == VIT._replace(lr=1.0)
        assert {group.block for group in runtime.structure if group.name in dict(adapter.sizes)} == {2, 3}
        assert published_frozen([Group("a", 1, 1, "scale"), Group("b", 1, 2, "scale")]) == {"b"}
        for bad in ({"delta": 0.0}, {"frozen": ["x"]}, {"frozen": list(runtime.groups)}):
            with pytest.raises(MergettaError):
                ZOA(runtime, measure_source(runtime, [images]), **bad)

    def test_a_loss_that_is_not_finite_moves_nothing(
        self, numpy_runtime: NumpyRuntime, small_images: np.ndarray
    ) -> None:
        adapter = ZOA(numpy_runtime, source_of(numpy_runtime, small_images), weight=math.inf)
        assert np.isfinite(adapter.predict(small_images)).all()
        assert adapter.skipped == 1
        np.testing.assert_array_equal(adapter.epsilon, 0)


class TestFOA:
    def test_loss_by_hand(self, numpy_runtime: NumpyRuntime) -> None:
        features = np.zeros((2, 6))
        features[1, 0] = 2.0  # mean 1 and std √2 in one channel
        output = Output(np.zeros((2, 4)), features, np.zeros((2, 6)))
        back = BackToSource(numpy_runtime, SourceFeatures(np.zeros(6), np.zeros(6)))
        assert alignment_loss(output, output.logits, back, 0.4) == pytest.approx(2 * math.log(4) + 0.4 * 3 * 2 / 64)

    def test_the_best_of_the_population_predicts(self, small_images: np.ndarray) -> None:
        runtime = PromptedNumpyRuntime()
        adapter = FOA(runtime, source_of(runtime, small_images))
        for batch in (small_images, small_images[::-1]):
            outputs, losses, mean = [], [], adapter.back.mean
            candidates = adapter.search.ask()
            for prompts in candidates:
                outputs.append(runtime(batch, {**runtime.groups, "prompts": prompts}))
                losses.append(alignment_loss(outputs[-1], outputs[-1].logits, adapter.back, 0.4))
            best = int(np.argmin(losses))
            shift = 0 if mean is None else adapter.back.source.mean - mean
            weight, bias = runtime.classifier
            np.testing.assert_allclose(
                adapter.predict(batch), (outputs[best].features + shift) @ weight.T + bias, rtol=1e-4, atol=1e-5
            )
            np.testing.assert_array_equal(adapter.search.best, candidates[best])
        assert len(candidates) == 28
        assert adapter.search.steps == 2

    def test_needs_prompts(self, vit: Family, images: np.ndarray) -> None:
        runtime = TorchRuntime(vit)
        for name in ("foa", "fozo"):
            with pytest.raises(MergettaError, match="runtime with prompts"):
                create_adapter(name, runtime, source=measure_source(runtime, [images]))


class TestFOZO:
    def test_one_step_equals_the_formula(self, small_images: np.ndarray) -> None:
        runtime = PromptedNumpyRuntime()
        adapter = FOZO(runtime, source_of(runtime, small_images), seed=4)
        start, z = adapter.prompts, draw(4, 0, (("prompts", 12),))
        tried = []
        for sign in (1, -1):
            tried.append(runtime(small_images, {**runtime.groups, "prompts": start + sign * 0.5 * z}))
        plus, minus = (alignment_loss(output, output.logits, adapter.back, 0.4) for output in tried)
        logits = adapter.predict(small_images)
        np.testing.assert_allclose(logits, tried[int(minus < plus)].logits, rtol=1e-5)
        lr = 0.7 * 0.08 + 0.1
        np.testing.assert_allclose(adapter.prompts, start - lr * (plus - minus) / (2 * 0.5) * z, rtol=1e-5)
        means = [output.features.mean(axis=0) for output in tried]
        np.testing.assert_allclose(adapter.back.mean, np.mean(means, axis=0), rtol=1e-5)

    def test_pace_by_hand(self, small_images: np.ndarray) -> None:
        runtime = PromptedNumpyRuntime()
        adapter = FOZO(runtime, source_of(runtime, small_images))
        expected = [
            (10.0, 0.45, 0.156),  # 0.7 · 0.08 + 0.1
            (20.0, 0.5, 0.1),  # above 1.05 · (0.9 · 10 + 0.1 · 20): again from the start
            (11.0, 0.45, 0.17),
        ]
        for loss, epsilon, lr in expected:
            adapter._pace(loss)
            assert (adapter.epsilon, adapter.lr) == pytest.approx((epsilon, lr))
        for _ in range(20):
            adapter._pace(1.0)
        assert adapter.epsilon == 0.2
        with pytest.raises(MergettaError, match="epsilon_min"):
            FOZO(runtime, adapter.back.source, epsilon=0.1)


class TestPromptedRuntime(RuntimeContract):
    @pytest.fixture
    def subject(self, vit: Family) -> PromptedRuntime:
        return PromptedRuntime(vit)

    @pytest.mark.parametrize("kind", ["small", "torchvision"])
    def test_tokens_stand_behind_the_class_token(self, kind: str) -> None:
        torch.manual_seed(0)
        x = torch.rand(2, 3, 16, 16)
        model: nn.Module
        if kind == "small":
            small = model = SmallViT(3, 5, 16, 4, 8, 2, 2)
            patches = small.patch_embed(x).flatten(2).transpose(1, 2)
            tokens = torch.cat([small.class_token.expand(2, -1, -1), patches], 1) + small.positions
        else:
            large = model = VisionTransformer(5, 16, 4, 8, 2, 2)
            patches = large.conv_proj(x).flatten(2).transpose(1, 2)
            tokens = torch.cat([large.class_token.expand(2, -1, -1), patches], 1) + large.encoder.pos_embedding
        runtime = PromptedRuntime(model, count=2)
        prompts = torch.from_numpy(runtime.groups["prompts"]).view(1, 2, 8).expand(2, -1, -1)
        tokens = torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], 1)
        if kind == "small":
            logits = small.head(small.norm(small.blocks(tokens))[:, 0])
        else:
            logits = large.heads(large.encoder.ln(large.encoder.layers(tokens))[:, 0])
        np.testing.assert_allclose(runtime(x.numpy()).logits, logits.detach(), atol=1e-5)

    def test_the_family_stays_as_it_is(self, vit: Family, images: np.ndarray) -> None:
        plain, runtime = TorchRuntime(vit), PromptedRuntime(vit)
        assert runtime.family == f"{plain.family}+3-prompts"
        assert runtime.structure == (Group("prompts", 192, 0, "prompts"), *plain.structure)
        assert all(np.array_equal(runtime.groups[name], value) for name, value in plain.groups.items())
        np.testing.assert_array_equal(runtime(images).signature, plain(images).signature)
        assert TorchRuntime(vit).groups.keys() == plain.groups.keys()  # nothing was put into the family's own model
        bundle: Bundle = build_bundle(plain.groups, [plain.groups], family=plain.family)
        with pytest.raises(MergettaError, match="belongs to the family"):
            create_adapter("merge", runtime, bundle=bundle)

    def test_what_is_refused(self, vit: Family) -> None:
        with pytest.raises(MergettaError, match="vision transformer with a class token"):
            PromptedRuntime(load_family("fashion-bn"))
        with pytest.raises(MergettaError, match="at least one prompt"):
            PromptedRuntime(vit, count=0)


@pytest.mark.parametrize("name", ["lame", "zoa", "foa", "fozo", "bn-alpha", "adabn", "unmix-tns"])
def test_torch_tensors_give_the_same_numbers(name: str, vit: Family, images: np.ndarray) -> None:
    runtime: TorchRuntime = PromptedRuntime(vit) if name in ("foa", "fozo") else TorchRuntime(vit)
    needs = {"source": measure_source(TorchRuntime(vit), [images])} if name in ("zoa", "foa", "fozo") else {}
    adapter = create_adapter(name, runtime, **needs)
    first = [adapter.predict(images) for _ in range(2)]
    adapter.reset()
    for one in first:
        other = adapter.predict(torch.from_numpy(images))
        assert isinstance(other, torch.Tensor)
        np.testing.assert_allclose(one, other.numpy(), atol=1e-4)


def test_the_device_runtime_gives_the_same_numbers(images: np.ndarray, exported: Callable[[str], Path]) -> None:
    device, runtime = OnnxRuntime(exported("fashion-bn"), threads=1), TorchRuntime(load_family("fashion-bn"))
    source = measure_source(runtime, [images])
    for found, expected in zip(measure_source(device, [images]), source, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    for name, options in (
        ("lame", {}),
        ("bn-alpha", {}),
        ("adabn", {}),
        ("unmix-tns", {}),
        ("zoa", {"source": source}),
    ):
        first, second = (create_adapter(name, r, **options) for r in (device, runtime))
        for _ in range(2):
            np.testing.assert_allclose(first.predict(images), second.predict(images), atol=2e-3)
