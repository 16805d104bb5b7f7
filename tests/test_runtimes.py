"""Runtimes: the contract, and BatchNorm statistics from the batch's to the source's."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from mergetta import MergettaError, TorchRuntime
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.models.family import Family, load_family

from .contracts import RuntimeContract
from .numpy_runtime import NumpyRuntime


class TestTorchRuntime(RuntimeContract):
    @pytest.fixture
    def subject(self, runtime: TorchRuntime) -> TorchRuntime:
        return runtime


class TestNumpyRuntime(RuntimeContract):
    @pytest.fixture
    def subject(self) -> NumpyRuntime:
        return NumpyRuntime()

    @pytest.fixture
    def images(self) -> np.ndarray:
        return np.random.default_rng(0).random((16, 1, 6, 6)).astype(np.float32)


def test_embedded_families_are_as_accurate_as_promised(family: Family) -> None:
    pixels, labels = load_fashion()
    runtime = TorchRuntime(family)
    logits = np.concatenate(
        [runtime(as_input(pixels[i : i + 500]), source_statistics=1.0).logits for i in range(0, 4000, 500)]
    )
    accuracy = np.mean(logits.argmax(axis=1) == labels)
    assert accuracy >= (0.91 if family.name == "fashion-bn" else 0.88)


def test_torch_in_torch_out(runtime: TorchRuntime, images: np.ndarray) -> None:
    output = runtime(torch.from_numpy(images))
    assert all(isinstance(value, torch.Tensor) for value in output)
    np.testing.assert_allclose(output.logits.numpy(), runtime(images).logits, atol=1e-6)


def test_the_family_model_is_not_touched(family: Family, images: np.ndarray) -> None:
    before = copy.deepcopy(family.model.state_dict())
    runtime = TorchRuntime(family)
    runtime.load({name: value + 1 for name, value in runtime.groups.items()})
    runtime(images)
    assert all(torch.equal(before[name], value) for name, value in family.model.state_dict().items())


def reference(family: Family, images: np.ndarray, training: bool) -> np.ndarray:
    model = copy.deepcopy(family.model).train(training)
    x = (torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0]
    with torch.no_grad():
        return model(x).numpy()


def test_ends_of_the_statistics_blend(images: np.ndarray) -> None:
    family = load_family("fashion-bn")
    runtime = TorchRuntime(family)
    np.testing.assert_allclose(runtime(images).logits, reference(family, images, True), atol=1e-4)
    np.testing.assert_allclose(
        runtime(images, source_statistics=1.0).logits, reference(family, images, False), atol=1e-4
    )
    for share, end in ((1e-7, 0.0), (1 - 1e-7, 1.0)):
        np.testing.assert_allclose(
            runtime(images, source_statistics=share).logits, runtime(images, source_statistics=end).logits, atol=1e-3
        )


def test_blend_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].running_mean.fill_(1.0)
        model[1].running_var.fill_(4.0)
        model[1].weight.fill_(2.0)
        model[1].bias.fill_(0.5)
    pixels = np.array([[[[0.0, 0.2], [0.4, 0.6]]]], np.float32)
    mean, variance = 0.25 * 1 + 0.75 * 0.3, 0.25 * 4 + 0.75 * 0.05
    expected = 2 * (pixels - mean) / np.sqrt(variance + 1e-5) + 0.5
    output = TorchRuntime(model, source_statistics=0.25)(pixels)
    np.testing.assert_allclose(output.features, expected.reshape(1, 4), rtol=1e-5)
    np.testing.assert_allclose(output.statistics, [[0.3], [0.05]], rtol=1e-5)


def test_a_blend_is_the_same_with_gradients(images: np.ndarray) -> None:
    runtime = TorchRuntime(load_family("fashion-bn"), source_statistics=0.5)
    for parameter in runtime.parameters.values():
        parameter.requires_grad_()
    logits = runtime.forward(images)
    np.testing.assert_allclose(logits.detach(), runtime(images).logits, atol=1e-4)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in runtime.parameters.values())


def test_layer_norm_models_do_not_care_about_statistics(images: np.ndarray) -> None:
    runtime = TorchRuntime(load_family("fashion-vit"))
    np.testing.assert_array_equal(runtime(images).logits, runtime(images, source_statistics=1.0).logits)


def test_a_single_value_per_channel() -> None:
    """torch refuses batch statistics of one value; the runtime gives what they are: the value itself, variance 0."""
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    output = TorchRuntime(model)(np.random.default_rng(0).random((1, 1, 2, 2)).astype(np.float32))
    np.testing.assert_allclose(output.features, np.zeros((1, 3)), atol=1e-5)


def test_transformer_statistics_leave_out_the_class_token(images: np.ndarray) -> None:
    family = load_family("fashion-vit")
    model = family.model
    x = (torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0]
    with torch.no_grad():
        tokens = model.patch_embed(x).flatten(2).transpose(1, 2) + model.positions[:, 1:]
    statistics = TorchRuntime(family)(images).statistics
    np.testing.assert_allclose(statistics[0], tokens.mean(dim=(0, 1)), atol=1e-4)
    np.testing.assert_allclose(statistics[1], tokens.var(dim=(0, 1), correction=0), rtol=1e-3)


def test_activation_inside_a_norm_layer_survives() -> None:
    """timm's BatchNormAct2d normalises and activates; the blend must not lose the second half."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=5).eval()
    pixels = np.random.default_rng(0).random((2, 3, 64, 64)).astype(np.float32)
    runtime = TorchRuntime(model)
    with torch.no_grad():
        np.testing.assert_allclose(
            runtime(pixels, source_statistics=1.0).logits, model(torch.from_numpy(pixels)).numpy(), atol=1e-4
        )
    blended = runtime(pixels, source_statistics=1 - 1e-7).logits
    np.testing.assert_allclose(blended, runtime(pixels, source_statistics=1.0).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (np.zeros((0, 1, 28, 28)), "no images"),
        (np.zeros((1, 28, 28)), "must have shape"),
        (np.zeros((1, 3, 28, 28)), "1 channels, not 3"),
        (np.full((1, 1, 28, 28), np.nan), "NaN or infinite pixels"),
        (np.full((1, 1, 28, 28), np.inf), "NaN or infinite pixels"),
    ],
)
def test_bad_images(runtime: TorchRuntime, pixels: np.ndarray, sentence: str) -> None:
    with pytest.raises(MergettaError, match=sentence):
        runtime(pixels)


def test_a_size_that_the_model_cannot_take() -> None:
    with pytest.raises(MergettaError, match="cannot take images of shape"):
        TorchRuntime(load_family("fashion-vit"))(np.zeros((1, 1, 14, 14)))


def test_statistics_share_out_of_range(bn_runtime: TorchRuntime, images: np.ndarray) -> None:
    with pytest.raises(MergettaError, match="between 0 and 1"):
        bn_runtime(images, source_statistics=1.5)
