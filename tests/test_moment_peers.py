"""Peers that move what BatchNorm normalises with, each against values worked out from its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from mergetta import MergettaError, TorchRuntime, create_adapter
from mergetta.adapters.forward_only.adabn import AdaBN
from mergetta.adapters.forward_only.bn_alpha import BNAlpha
from mergetta.adapters.forward_only.dua import DUA
from mergetta.adapters.forward_only.unmix_tns import UnMixTNS, mixture, scattered

from .numpy_runtime import NumpyRuntime


@pytest.fixture
def small_images() -> np.ndarray:
    return np.random.default_rng(0).random((12, 1, 6, 6)).astype(np.float32)


class TestBNAlpha:
    def test_share_by_hand(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        predicted = BNAlpha(bn_runtime).predict(images)  # 16 / (16 + 48) = 0.25
        np.testing.assert_array_equal(predicted, bn_runtime(images, given=0.25).logits)
        fixed = BNAlpha(bn_runtime, alpha=0.5).predict(images)
        np.testing.assert_array_equal(fixed, bn_runtime(images, given=0.5).logits)
        for bad in ({"alpha": 1.5}, {"prior": -1.0}):
            with pytest.raises(MergettaError, match="prior"):
                BNAlpha(bn_runtime, **bad)


def one_channel() -> TorchRuntime:
    """One pixel through one BatchNorm layer with stored moments 0 and 1 into the first logit."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, eps=0.0), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[3].weight.copy_(torch.tensor([[1.0], [0.0]]))
        model[3].bias.zero_()
    return TorchRuntime(model)


class TestAdaBN:
    def test_running_moments_by_hand(self) -> None:
        runtime = one_channel()
        adapter = AdaBN(runtime, momentum=0.1)
        images = np.array([0.0, 1.0], np.float32).reshape(2, 1, 1, 1)  # mean 0.5, variance 0.25
        for mean, variance in ((0.05, 0.925), (0.095, 0.8575)):
            expected = (images.reshape(-1) - mean) / math.sqrt(variance)
            before = runtime.forwarded
            np.testing.assert_allclose(adapter.predict(images)[:, 0], expected, rtol=1e-5)
            assert runtime.forwarded - before == 2  # in one pass
            np.testing.assert_allclose(adapter.running, [[mean], [variance]], rtol=1e-6)
        assert adapter.state_dict().keys() == {"running", "batches"}

    def test_momentum_0_is_source_and_1_batch_statistics(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        source, batch = (create_adapter(name, bn_runtime).predict(images) for name in ("source", "bn-stats"))
        np.testing.assert_allclose(AdaBN(bn_runtime, momentum=0.0).predict(images), source, atol=1e-4)
        np.testing.assert_allclose(AdaBN(bn_runtime, momentum=1.0).predict(images), batch, atol=1e-3)

    def test_without_batch_norm_it_is_the_source(self, numpy_runtime: NumpyRuntime, small_images: np.ndarray) -> None:
        source = numpy_runtime(small_images).logits
        adapter = AdaBN(numpy_runtime)
        for _ in range(2):
            np.testing.assert_array_equal(adapter.predict(small_images), source)

    @pytest.mark.parametrize("momentum", [2.0, -0.1, np.nan])
    def test_bad_options(self, numpy_runtime: NumpyRuntime, momentum: float) -> None:
        with pytest.raises(MergettaError, match="momentum"):
            AdaBN(numpy_runtime, momentum)

    def test_states(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        adapter = DUA(bn_runtime, decay=0.5)
        adapter.predict(images)
        state = adapter.state_dict()
        running = state["running"]
        for bad in (
            {},
            {"running": running},
            {"batches": 1},
            {**state, "running": running[:, 1:]},
            {**state, "running": running * np.nan},
            {**state, "running": -running},
            {**state, "batches": -1},
            {**state, "batches": 1.5},
        ):
            with pytest.raises(MergettaError, match=r"does not fit|negative variances"):
                adapter.load_state_dict(bad)
        np.testing.assert_array_equal(adapter.running, running)
        other = DUA(bn_runtime, decay=0.5)
        other.load_state_dict(state)
        np.testing.assert_array_equal(adapter.predict(images), other.predict(images))
        assert adapter.batches == other.batches == 2


class TestDUA:
    def test_momentum_by_hand(self) -> None:
        """0.4 · 0.5 + 0.1, then 0.4 · 0.25 + 0.1, then 0.4 · 0.125 + 0.1."""
        images, runtime = np.array([1.0], np.float32).reshape(1, 1, 1, 1), one_channel()  # mean 1, variance 0
        adapter, mean, variance = DUA(runtime, momentum=0.4, decay=0.5, floor=0.1), 0.0, 1.0
        for momentum in (0.3, 0.2, 0.15):
            mean, variance = (1 - momentum) * mean + momentum, (1 - momentum) * variance
            np.testing.assert_allclose(adapter.predict(images)[:, 0], (1 - mean) / math.sqrt(variance), rtol=1e-5)
            np.testing.assert_allclose(adapter.running, [[mean], [variance]], rtol=1e-6)
        assert adapter.batches == 3

    def test_the_published_first_step(self) -> None:
        assert DUA(one_channel()).share() == pytest.approx(0.1 * 0.94 + 0.005)

    @pytest.mark.parametrize(
        "options", [{"decay": 0.0}, {"decay": 1.1}, {"floor": -1.0}, {"momentum": 1.0, "decay": 1.0}]
    )
    def test_bad_options(self, numpy_runtime: NumpyRuntime, options: dict[str, float]) -> None:
        with pytest.raises(MergettaError, match="decay must lie"):
            DUA(numpy_runtime, **options)


def two_layers() -> TorchRuntime:
    """Two BatchNorm layers of different widths, one after the other."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    for layer in (model[1], model[4]):
        nn.init.uniform_(layer.running_mean, -0.5, 0.5)
        nn.init.uniform_(layer.running_var, 0.5, 1.5)
        nn.init.uniform_(layer.weight, 0.5, 1.5)
    return TorchRuntime(model.eval())


class TestUnMixTNS:
    def layer(self, x: torch.Tensor, norm: nn.BatchNorm2d, components: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The published layer for one image (1, C, H, W): what comes out, and where it pulls the components."""
        own = torch.stack([x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), unbiased=False)])
        cosines = nn.functional.cosine_similarity(own[0][None], components[:, 0], dim=1)
        share = torch.softmax(cosines / 0.07, dim=0)[:, None]
        mixed = (1 - share[:, None]) * components + share[:, None] * own
        mean = mixed[:, 0].mean(dim=0)
        variance = mixed[:, 1].mean(dim=0) + (mixed[:, 0] ** 2).mean(dim=0) - mean**2
        scale, shift, mean, variance = (v.view(1, -1, 1, 1) for v in (norm.weight, norm.bias, mean, variance))
        return (x - mean) / torch.sqrt(variance + norm.eps) * scale + shift, share[:, None] * (own - components)

    def test_enough_rounds_give_the_published_layer(self) -> None:
        """Image by image through the network; then the components take in the batch."""
        runtime = two_layers()
        images = np.random.default_rng(1).random((6, 1, 8, 8)).astype(np.float32)
        adapter = UnMixTNS(runtime, components=4, rounds=3, seed=2)
        components = [torch.from_numpy(part).float() for part in np.split(adapter.components, [3], axis=2)]
        model = runtime.model
        for _ in range(2):
            expected, pulls = [], [torch.zeros_like(each) for each in components]
            with torch.no_grad():
                for image in torch.from_numpy(images)[:, None]:
                    x, first = self.layer(model[0](image), model[1], components[0])
                    x, second = self.layer(model[3](x.relu()), model[4], components[1])
                    expected.append(model[8](x.relu().mean(dim=(2, 3))))
                    pulls = [pulls[0] + first, pulls[1] + second]
                components = [
                    each + (1 - 0.9 ** (6 / 64)) * pull / 6 for each, pull in zip(components, pulls, strict=True)
                ]
            np.testing.assert_allclose(adapter.predict(images), torch.cat(expected), atol=1e-4)
        np.testing.assert_allclose(adapter.components, torch.cat(components, dim=2), atol=1e-5)
        assert runtime.forwarded == 2 * 6 * 4

    def test_it_starts_around_what_is_stored(self) -> None:
        source = np.array([[1.0, -2.0], [4.0, 0.25]])
        found = scattered(source, 4000, 0.5, np.random.default_rng(0))
        np.testing.assert_allclose(mixture(found), source, rtol=0.1)
        np.testing.assert_array_equal(found[:, 1], [[2.0, 0.125]] * 4000)
        np.testing.assert_array_equal(scattered(source, 1, 0.5, np.random.default_rng(0)), source[None])

    def test_one_image_in_one_layer_by_hand(self) -> None:
        """Two components (0, 1) and (2, 3), of an image (1, 0): in one dimension the cosines are 0 and 1."""
        adapter = UnMixTNS(one_channel(), components=2, temperature=1.0, momentum=0.5, reference=1, rounds=1)
        adapter.components = np.array([[[0.0], [1.0]], [[2.0], [3.0]]])
        p = 1 / (1 + math.e)  # of the first; the second has 1 − p
        means, variances = (p, 2 - (1 - p)), ((1 - p) * 1, p * 3)
        mean, gap = sum(means) / 2, (means[1] - means[0]) / 2
        variance = sum(variances) / 2 + gap**2
        logits = adapter.predict(np.ones((1, 1, 1, 1), np.float32))
        assert logits[0, 0] == pytest.approx((1 - mean) / math.sqrt(variance), rel=1e-4)
        np.testing.assert_allclose(
            adapter.components[..., 0], [[0.5 * p, 1 - 0.5 * p], [2 - 0.5 * (1 - p), 3 - 1.5 * (1 - p)]], rtol=1e-5
        )

    def test_a_batch_does_not_matter_but_for_what_is_learnt(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        whole = UnMixTNS(bn_runtime, components=4).predict(images[:4])
        alone = [UnMixTNS(bn_runtime, components=4).predict(images[i : i + 1])[0] for i in range(4)]
        np.testing.assert_allclose(whole, alone, atol=1e-3)

    @pytest.mark.parametrize("options", [{"components": 0}, {"rounds": 0}, {"alpha": 1.0}, {"temperature": 0.0}])
    def test_what_is_refused(self, bn_runtime: TorchRuntime, options: dict[str, float]) -> None:
        with pytest.raises(MergettaError, match=next(iter(options))):
            UnMixTNS(bn_runtime, **options)
        adapter = UnMixTNS(bn_runtime, components=2)
        with pytest.raises(MergettaError, match="negative variances"):
            adapter.load_state_dict({"components": -np.abs(adapter.components) - 1})
