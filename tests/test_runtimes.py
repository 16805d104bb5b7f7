"""Runtimes: the contract, and what BatchNorm normalises with: the batch's moments, given ones, or a blend."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from mergetta import MergettaError, TorchRuntime
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.groups import learnable, moments_of, with_moments
from mergetta.models.family import Family, load_family
from mergetta.streams.moments import batch_moments

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
    logits = np.concatenate([runtime(as_input(pixels[i : i + 500]), given=1.0).logits for i in range(0, 4000, 500)])
    accuracy = np.mean(logits.argmax(axis=1) == labels)
    assert accuracy >= (0.91 if family.name == "fashion-bn" else 0.88)


def test_torch_in_torch_out(runtime: TorchRuntime, images: np.ndarray) -> None:
    output = runtime(torch.from_numpy(images))
    assert all(isinstance(value, torch.Tensor) for value in output[:3])
    assert isinstance(runtime(torch.from_numpy(images), moments=True).moments, torch.Tensor)
    np.testing.assert_allclose(output.logits.numpy(), runtime(images).logits, atol=1e-6)


def test_the_family_model_is_not_touched(family: Family, images: np.ndarray) -> None:
    before = copy.deepcopy(family.model.state_dict())
    runtime = TorchRuntime(family)
    for given in (0.0, 0.3, 1.0):
        runtime(images, {name: value + 1 for name, value in runtime.groups.items()}, given, moments=True)
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
    np.testing.assert_allclose(runtime(images, given=1.0).logits, reference(family, images, False), atol=1e-4)
    for share, end in ((1e-7, 0.0), (1 - 1e-7, 1.0)):
        np.testing.assert_allclose(runtime(images, given=share).logits, runtime(images, given=end).logits, atol=1e-3)


def two_layers() -> nn.Module:
    """One channel, two BatchNorm layers with nothing between them, so that all can be worked out by hand."""
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].running_mean.fill_(1.0)
        model[1].running_var.fill_(4.0)
        model[1].weight.fill_(2.0)
        model[1].bias.fill_(0.5)
    return model


@pytest.mark.parametrize("given", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("changed", [False, True])
def test_blend_and_moments_by_hand(given: float, changed: bool) -> None:
    runtime = TorchRuntime(two_layers())
    pixels = np.array([[[[0.0, 0.2], [0.4, 0.6]]]], np.float32)
    values = {
        **runtime.groups,
        **({"1.weight": [3.0], "1.bias": [-1.0], "1.running_mean": [0.1], "2.running_var": [9.0]} if changed else {}),
    }
    x, seen = pixels.astype(np.float64), []
    for layer in ("1", "2"):
        scale, shift, mean, variance = (
            float(values[f"{layer}.{part}"][0]) for part in ("weight", "bias", "running_mean", "running_var")
        )
        seen.append((x.mean(), x.var()))
        mean, variance = given * mean + (1 - given) * x.mean(), given * variance + (1 - given) * x.var()
        x = scale * (x - mean) / np.sqrt(variance + 1e-5) + shift
    output = runtime(pixels, {name: np.asarray(v, np.float32) for name, v in values.items()}, given, moments=True)
    np.testing.assert_allclose(output.features, x.reshape(1, 4), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output.moments, [np.transpose(seen)], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output.signature, [[0.3], [0.05]], rtol=1e-5)


def test_moments_against_a_direct_measurement(bn_runtime: TorchRuntime, images: np.ndarray) -> None:
    """In the published model, with hooks on its own layers and stored statistics."""
    family = load_family("fashion-bn")
    model, inputs = copy.deepcopy(family.model).eval(), []
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    with torch.no_grad():
        model((torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0])
    means, variances = (
        torch.cat([part(x) for x in inputs])
        for part in (lambda x: x.mean(dim=(0, 2, 3)), lambda x: x.var(dim=(0, 2, 3), correction=0))
    )
    seen = bn_runtime(images, given=1.0, moments=True).moments
    np.testing.assert_allclose(batch_moments(seen), torch.stack([means, variances]), rtol=1e-3, atol=1e-4)
    of_each = [
        torch.cat([x[3].mean(dim=(1, 2)) for x in inputs]),
        torch.cat([x[3].var(dim=(1, 2), correction=0) for x in inputs]),
    ]
    np.testing.assert_allclose(seen[3], torch.stack(of_each), rtol=1e-3, atol=1e-4)


def test_gradients_reach_the_tensors_that_are_given(runtime: TorchRuntime, images: np.ndarray) -> None:
    names = learnable(runtime.groups)
    changed = {name: v * 1.1 + 0.1 if name in names else v for name, v in runtime.groups.items()}
    tensors = {name: runtime.tensors(changed)[name].clone().requires_grad_() for name in names}
    output = runtime.forward(images, tensors, moments=True)
    plain = runtime(images, changed, moments=True)
    for one, two in zip(output, plain, strict=True):
        np.testing.assert_allclose(one.detach(), two, atol=1e-4, rtol=1e-4)
    assert not output.signature.requires_grad
    assert not output.moments.requires_grad
    output.logits.square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in tensors.values())
    np.testing.assert_allclose(  # nothing of it stays
        runtime(images).logits, TorchRuntime(load_family(family_name(runtime)))(images).logits, atol=1e-5
    )


def family_name(runtime: TorchRuntime) -> str:
    return next(n for n in ("fashion-bn", "fashion-vit") if load_family(n).fingerprint == runtime.family)


def test_gradients_flow_through_the_statistics_of_the_batch(bn_runtime: TorchRuntime, images: np.ndarray) -> None:
    """Asking for moments, which takes another path through the layers, changes no gradient."""
    name = learnable(bn_runtime.groups)[0]
    gradients = []
    for moments in (False, True):
        tensor = bn_runtime.tensors(bn_runtime.groups)[name].clone().requires_grad_()
        bn_runtime.forward(images, {name: tensor}, moments=moments).logits.square().sum().backward()
        gradients.append(tensor.grad.numpy())
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
    family = load_family("fashion-bn")
    model = copy.deepcopy(family.model).train()
    x = (torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0]
    model(x).square().sum().backward()
    wanted = model.get_parameter(name).grad.numpy()
    assert np.linalg.norm(gradients[0] - wanted) < 0.01 * np.linalg.norm(wanted)  # ReLUs at zero, either way


def test_groups_that_are_not_given_to_a_gradient_pass_are_the_source(runtime: TorchRuntime, images: np.ndarray) -> None:
    name = learnable(runtime.groups)[-1]
    changed = {**runtime.groups, name: runtime.groups[name] + 1}
    one = runtime.forward(images, {name: runtime.tensors(changed)[name]}).logits.detach()
    np.testing.assert_allclose(one, runtime(images, changed).logits, atol=1e-4)


def test_norm_layers_without_weights_or_without_moments() -> None:
    """Moments alone adapt too; a layer that was trained without running statistics starts from zeros and ones."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1),
        nn.BatchNorm2d(2, affine=False),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    runtime = TorchRuntime(model)
    assert list(runtime.groups) == [
        *("1.running_mean", "1.running_var"),
        *("2.weight", "2.bias", "2.running_mean", "2.running_var"),
    ]
    np.testing.assert_array_equal(moments_of(runtime.groups), [[0, 0, 0, 0], [1, 1, 1, 1]])
    pixels = np.random.default_rng(0).random((3, 1, 2, 2)).astype(np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(runtime(pixels).logits, model.train()(torch.from_numpy(pixels)), atol=1e-5)
    moved = with_moments(runtime.groups, moments_of(runtime.groups) + 1)
    assert np.abs(runtime(pixels, moved, 1.0).logits - runtime(pixels, given=1.0).logits).max() > 0.01


def test_layer_norm_models_do_not_care_about_the_share(images: np.ndarray) -> None:
    runtime = TorchRuntime(load_family("fashion-vit"))
    np.testing.assert_array_equal(runtime(images).logits, runtime(images, given=1.0).logits)


def test_a_single_value_per_channel() -> None:
    """torch refuses batch statistics of one value; the runtime gives what they are: the value itself, variance 0."""
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    output = TorchRuntime(model)(np.random.default_rng(0).random((1, 1, 2, 2)).astype(np.float32))
    np.testing.assert_allclose(output.features, np.zeros((1, 3)), atol=1e-5)


def test_a_single_value_per_channel_with_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    runtime = TorchRuntime(model)
    bias = runtime.tensors(runtime.groups)["2.bias"].clone().requires_grad_()
    pixels = np.random.default_rng(0).random((1, 1, 2, 2)).astype(np.float32)
    output = runtime.forward(pixels, {"2.bias": bias}, moments=True)
    np.testing.assert_array_equal(output.moments[:, 1], np.zeros((1, 3)))
    output.logits.sum().backward()
    np.testing.assert_allclose(bias.grad, model[3].weight.sum(dim=0).detach(), rtol=1e-5)


def test_transformer_signature_leaves_out_the_class_token(images: np.ndarray) -> None:
    family = load_family("fashion-vit")
    model = family.model
    x = (torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0]
    with torch.no_grad():
        tokens = model.patch_embed(x).flatten(2).transpose(1, 2) + model.positions[:, 1:]
    signature = TorchRuntime(family)(images).signature
    np.testing.assert_allclose(signature[0], tokens.mean(dim=(0, 1)), atol=1e-4)
    np.testing.assert_allclose(signature[1], tokens.var(dim=(0, 1), correction=0), rtol=1e-3)


def test_activation_inside_a_norm_layer_survives() -> None:
    """timm's BatchNormAct2d normalises and activates; the blend must not lose the second half."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=5).eval()
    pixels = np.random.default_rng(0).random((2, 3, 64, 64)).astype(np.float32)
    runtime = TorchRuntime(model)
    with torch.no_grad():
        np.testing.assert_allclose(
            runtime(pixels, given=1.0).logits, model(torch.from_numpy(pixels)).numpy(), atol=1e-4
        )
    blended = runtime(pixels, given=1 - 1e-7).logits
    np.testing.assert_allclose(blended, runtime(pixels, given=1.0).logits, atol=1e-3)


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
